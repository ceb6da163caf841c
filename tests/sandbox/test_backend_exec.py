"""Commands in a live sandbox: what goes in, what comes out, how each ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from stockade.sandbox import ExitKind
from tests.live import MIB, Owner


def test_words_directory_environment_and_input(owner, sandbox):
    source = "say([sys.argv[2:], os.getcwd(), os.environ.get('GIVEN'), sys.stdin.read()])"
    argv = [*owner.probe(source), "", "a b", "é\udcff"]
    result = owner.exec(sandbox, argv, cwd="/tmp", env={"GIVEN": "x=y\nz"}, stdin=b"tea")
    assert result.exit.code == 0, result.stderr
    assert result.stdout == b'[["", "a b", "\\u00e9\\udcff"], "/tmp", "x=y\\nz", "tea"]'
    assert owner.inside(sandbox, "say([os.getcwd(), sys.stdin.read()])") == ["/workspace", ""]


def test_environment_of_the_sandbox_and_of_one_command(owner):
    sandbox = owner.create(env={"A": "sandbox", "B": "sandbox"})
    source = "say([os.environ['A'], os.environ['B'], os.environ['HOME'], os.environ.get('http_proxy')])"
    assert owner.inside(sandbox, source, env={"B": "command"}) == ["sandbox", "command", "/sandbox/home", None]
    owner.destroy(sandbox)
    proxied = owner.create(proxied=True)
    assert owner.inside(proxied, "say(os.environ['http_proxy'])") == "http://127.0.0.1:3128"
    owner.destroy(proxied)


@pytest.mark.parametrize("data", [b"x", bytes(range(256)) * 4, os.urandom(5 * MIB), b"\0" * 70_000], ids=len)
def test_input_and_output_are_bytes(owner, data):
    sandbox = owner.create(output=6 * MIB)
    result = owner.exec(sandbox, ["/bin/cat"], stdin=data)
    assert result.stdout == data
    assert result.stderr == b""
    result = owner.exec(sandbox, ["/bin/sh", "-c", "cat >&2"], stdin=data)
    assert result.stderr == data
    owner.destroy(sandbox)


def test_a_megabyte_of_arguments(owner, sandbox):
    words = [f"{number:099d}" for number in range(10_000)]
    source = "say([len(sys.argv) - 2, sys.argv[-1]])"
    result = owner.exec(sandbox, [*owner.probe(source), *words])
    assert result.stdout.decode() == f'[10000, "{words[-1]}"]'
    result = owner.exec(sandbox, ["/bin/true", "x" * (3 * MIB)])  # more than the kernel takes in one word
    assert result.exit.code == 126
    assert owner.exec(sandbox, ["/bin/true"]).exit.code == 0


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_exit_codes(owner, sandbox, code):
    result = owner.exec(sandbox, ["/bin/sh", "-c", f"exit {code}"])
    assert (result.exit.kind, result.exit.code, result.exit.return_code) == (ExitKind.EXITED, code, code)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE, signal.SIGINT])
def test_signals(owner, sandbox, number):
    result = owner.exec(sandbox, ["/bin/sh", "-c", f"kill -{int(number)} $$"])
    assert (result.exit.kind, result.exit.signal) == (ExitKind.SIGNALED, number)
    assert result.exit.return_code == 128 + number


def test_signals_are_as_a_login_shell_would_leave_them(tmp_path):
    """Python ignores SIGPIPE, and nohup or a shell's ``&`` others: a command that inherited that would not end by them."""
    ours = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)}
    try:
        owner = Owner(tmp_path / "state")
        result = owner.exec(owner.create(), ["/bin/cat", "/proc/self/status"])
        owner.close()
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
    words = dict(line.split(":\t") for line in result.stdout.decode().splitlines() if line.startswith("Sig"))
    internal = 1 << 31 | 1 << 32  # posix_spawn of glibc ignores its own two
    assert {int(words[name], 16) & ~internal for name in ("SigBlk", "SigIgn", "SigCgt")} == {0}


@pytest.mark.parametrize("argv", [["no-such-program"], ["/no/such"], ["/usr/bin/env/x"], ["/workspace/no"]])
def test_not_found(owner, sandbox, argv):
    assert owner.exec(sandbox, argv).exit.return_code in (126, 127)
    assert owner.exec(sandbox, ["no-such-program"]).exit.return_code == 127


def test_not_executable(owner, sandbox):
    owner.run(sandbox.put_dir("/workspace", {"data": b"text", "odd": b"\x7fELFnot", "script": b"#!/no/such\n"}))
    assert owner.exec(sandbox, ["/workspace/data"]).exit.code == 126
    assert owner.exec(sandbox, ["/workspace"]).exit.code == 126
    assert owner.exec(sandbox, ["/bin/chmod", "755", "odd", "script"]).exit.code == 0
    assert owner.exec(sandbox, ["./odd"]).exit.code == 126
    assert owner.exec(sandbox, ["./script"]).exit.code == 127


def test_missing_directory(owner, sandbox):
    result = owner.exec(sandbox, ["/bin/true"], cwd="/no/such")
    assert result.exit.return_code == 127
    assert b"/no/such" in result.stderr


def test_output_limits_and_truncation(owner):
    sandbox = owner.create(output=1000)
    exact = owner.exec(sandbox, owner.probe("os.write(1, b'x' * 1000)"))
    assert (exact.exit.code, len(exact.stdout), exact.stdout_truncated) == (0, 1000, False)
    both = owner.exec(sandbox, owner.probe("os.write(1, b'x' * 600); os.write(2, b'y' * 600); time.sleep(30)"))
    assert both.exit.kind is ExitKind.OUTPUT_LIMIT
    assert len(both.stdout) + len(both.stderr) == 1000
    assert both.stdout_truncated or both.stderr_truncated
    owner.destroy(sandbox)


def test_a_result_has_no_truth_value(owner, sandbox):
    with pytest.raises(TypeError):
        bool(owner.exec(sandbox, ["/bin/false"]))


def test_twenty_at_once(owner, sandbox):
    """More requests than the guest's socket holds: each sender must get its turn, and its own answer."""

    async def all_of_them():
        words = [f"{number:02d}" + "x" * 60_000 for number in range(20)]
        return words, await asyncio.gather(*(sandbox.exec(["/bin/echo", word]) for word in words))

    words, results = owner.run(all_of_them())
    assert [result.stdout.decode() for result in results] == [word + "\n" for word in words]


def test_forty_sandboxes_at_once(owner):
    """More requests than the spawner's socket holds."""

    async def all_of_them():
        made = await asyncio.gather(*(owner.make() for _ in range(40)))
        results = await asyncio.gather(
            *(sandbox.exec(["/bin/cat"], stdin=b"%d" % at) for at, sandbox in enumerate(made))
        )
        return made, results

    made, results = owner.run(all_of_them())
    assert [result.stdout for result in results] == [b"%d" % at for at in range(40)]
    for sandbox in made:
        owner.destroy(sandbox)


def test_many_short_commands_are_not_taken_for_hiding(owner):
    """Between fork and exec a command is as closed to the watchdog as the guest: that alone must not end a sandbox."""
    sandbox = owner.create()

    async def series():
        end = time.monotonic() + 2
        count = 0
        while time.monotonic() < end:
            result = await sandbox.exec(["/bin/true"])
            assert result.exit.code == 0, result.exit
            count += 1
        return count

    assert owner.run(series()) > 20
    owner.destroy(sandbox)


def test_pipes_between_two_sandboxes(owner):
    """Descriptors 3 and 4: what one writes on 4 the other reads on 3; the caller may close its ends at once."""
    first, second = owner.create(), owner.create()
    source = "os.write(4, ARGS.encode()); os.close(4); got = b''\nwhile True:\n piece = os.read(3, 100)\n got += piece\n if not piece: break\nsay([got.decode(), sorted(int(n) for n in os.listdir('/proc/self/fd'))[:5]])"

    async def pair():
        read_a, write_b = os.pipe2(os.O_CLOEXEC)
        read_b, write_a = os.pipe2(os.O_CLOEXEC)
        one = asyncio.ensure_future(first.exec(owner.probe(source, "from one"), pipes=(read_a, write_a)))
        two = asyncio.ensure_future(second.exec(owner.probe(source, "from two"), pipes=(read_b, write_b)))
        await asyncio.sleep(0)
        for fd in (read_a, write_a, read_b, write_b):
            os.close(fd)
        return await one, await two

    one, two = owner.run(pair())
    assert b"from two" in one.stdout
    assert b"from one" in two.stdout
    owner.destroy(first)
    owner.destroy(second)


def test_usage_is_plausible(owner, sandbox):
    source = "area = bytearray(64 << 20)\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    result = owner.exec(sandbox, owner.probe(source))
    assert result.exit.code == 0
    assert 0.3e9 <= result.usage.cpu_ns < 5e9
    assert result.usage.cpu_ns * 0.9 <= result.usage.wall_ns < 60e9
    assert 64 * MIB < result.usage.max_rss_bytes < 128 * MIB
    idle = owner.exec(sandbox, ["/bin/sleep", "0.2"])
    assert idle.usage.wall_ns >= 0.2e9
    assert idle.usage.cpu_ns < 0.2e9
    total = sandbox.usage()
    assert total.cpu_ns >= 0.3e9
    assert total.wall_ns > result.usage.wall_ns
    assert total.max_rss_bytes > 64 * MIB


def test_resource_limits_of_a_command(owner):
    sandbox = owner.create(file_size=MIB, open_files=64, memory=128 * MIB)
    source = """
import resource
def files():
    held = []
    while len(held) < 1000:
        held.append(os.open("/dev/null", os.O_RDONLY))
def grow():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open("/workspace/big", "wb", 0) as file:
        while file.write(b"x" * 65536):
            pass
grown = attempt(grow)
names = ("CORE", "NPROC", "NOFILE", "FSIZE", "MEMLOCK", "NICE", "RTPRIO")
hard = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1] for name in names}
say([grown, os.path.getsize("/workspace/big"), hard, attempt(files)])
"""
    grown, size, hard, opened = owner.inside(sandbox, source)
    assert (grown, size, opened) == ("EFBIG", MIB, "EMFILE")
    assert hard.pop("MEMLOCK") <= 8 * MIB
    assert hard == {"CORE": 1, "NPROC": 64, "NOFILE": 64, "FSIZE": MIB, "NICE": 0, "RTPRIO": 0}
    unhandled = owner.exec(sandbox, ["/bin/sh", "-c", "head -c 4000000 /dev/zero > /workspace/x"])
    assert unhandled.exit.return_code in (1, 128 + signal.SIGXFSZ)
    owner.destroy(sandbox)


def test_files_by_descriptor(owner, sandbox):
    """Written from outside, seen inside, and the other way round."""
    owner.run(sandbox.put_dir("/workspace/src", {"a.py": b"print(1)", "deep/b.py": b"print(2)"}))
    assert owner.exec(sandbox, [owner.python, "src/deep/b.py"]).stdout == b"2\n"
    owner.run(sandbox.write_file("/workspace/src/a.py", b"print(3)"))
    assert owner.exec(sandbox, [owner.python, "src/a.py"]).stdout == b"3\n"
    assert (
        owner.inside(sandbox, "open('src/c', 'w').write('c'); os.mkdir('src/empty'); say(os.stat('src/a.py').st_uid)")
        == 1000
    )
    found = owner.run(sandbox.get_dir("/workspace/src", limit_bytes=MIB))
    assert dict(found.files) == {"a.py": b"print(3)", "deep/b.py": b"print(2)", "c": b"c"}
    assert owner.run(sandbox.read_file("/workspace/src/c", limit_bytes=1)) == b"c"
    with pytest.raises(FileNotFoundError):
        owner.run(sandbox.read_file("/workspace/no", limit_bytes=1))
    with pytest.raises(FileNotFoundError):
        owner.run(sandbox.get_dir("/workspace/no", limit_bytes=1))
    with pytest.raises(ValueError, match="too large"):
        owner.run(sandbox.read_file("/workspace/src/a.py", limit_bytes=3))


def test_disk_limit_holds_for_files_from_outside(owner):
    sandbox = owner.create(disk=4 * MIB, inodes=100)
    with pytest.raises(ValueError, match="no space left"):
        owner.run(sandbox.write_file("/workspace/big", b"x" * (16 * MIB)))
    with pytest.raises(ValueError, match="no space left"):
        owner.run(sandbox.put_dir("/workspace", {f"f{number}": b"" for number in range(500)}))
    owner.destroy(sandbox)


def test_files_of_a_dead_sandbox_can_be_collected(owner):
    sandbox = owner.create(cpu_s=1.0)
    owner.run(sandbox.write_file("/workspace/kept", b"kept"))
    assert owner.exec(sandbox, owner.probe("while True: pass")).exit.kind is ExitKind.CPU_LIMIT
    assert owner.run(sandbox.get_dir("/workspace", limit_bytes=100)).files == {"kept": b"kept"}
    refused = owner.exec(sandbox, ["/bin/true"])
    assert refused.exit.kind is ExitKind.CPU_LIMIT
    owner.destroy(sandbox)
