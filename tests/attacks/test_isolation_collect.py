"""Isolation cases about what a workspace may do to whoever collects it, and to the record.

The naive collector of these tests is the obvious one: walk the directory, open what is there, keep what it reads.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import stat
from pathlib import Path

import pytest

from stockade.events import ChainWriter, Context, Producer, iter_events
from stockade.sandbox import PathRefused
from tests.live import MIB

CANARY = "canary-of-the-host"


def naive(folder: str) -> dict[str, bytes]:
    """Collect like most programs do."""
    found = {}
    for top, _, names in os.walk(folder, followlinks=True):
        for name in names:
            path = os.path.join(top, name)
            with contextlib.suppress(OSError), open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = file.read(MIB)
    return found


def workspace(sandbox) -> str:
    """Return the workspace as a path of the host, for naive collectors."""
    return f"/proc/{os.getpid()}/fd/{sandbox.root_fd}/workspace"


def collect(owner, sandbox, limit_bytes=MIB):
    found = owner.run(sandbox.get_dir("/workspace", limit_bytes=limit_bytes))
    return dict(found.files), {skipped.path: skipped.reason for skipped in found.skipped}


@pytest.fixture
def canary(tmp_path) -> Path:
    for folder in (tmp_path, tmp_path / "secret"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    (tmp_path / "secret" / "key").write_text(CANARY)
    return tmp_path / "secret" / "key"


@pytest.mark.promise("S2.8")
def test_a48_symlink_out(owner, sandbox, canary):
    source = """
os.symlink(ARGS, "/workspace/file")
os.symlink(os.path.dirname(ARGS), "/workspace/folder")
os.symlink("../" * 20 + ARGS.lstrip("/"), "/workspace/relative")
os.symlink("/proc/self/root" + ARGS, "/workspace/proc")
os.mkdir("/workspace/real")
os.symlink("../real", "/workspace/real/loop")
open("/workspace/real/good", "w").write("good")
say("made")
"""
    owner.inside(sandbox, source, str(canary))
    taken = naive(workspace(sandbox)) if os.geteuid() == 0 else naive(workspace(sandbox) + "/folder")
    assert CANARY.encode() in taken.values()
    files, skipped = collect(owner, sandbox)
    assert files == {"real/good": b"good"}
    assert skipped == dict.fromkeys(("file", "folder", "relative", "proc", "real/loop"), "symbolic_link")
    for path, reason in (
        ("file", "symbolic_link"),
        ("folder/key", "not_a_directory"),
        ("real/loop/good", "not_a_directory"),
    ):
        with pytest.raises(PathRefused) as refused:
            owner.run(sandbox.read_file(f"/workspace/{path}", limit_bytes=100))
        assert refused.value.reason == reason
        with pytest.raises(PathRefused):
            owner.run(sandbox.write_file(f"/workspace/{path}", b"overwritten"))
        with pytest.raises(PathRefused):
            owner.run(sandbox.put_dir("/workspace/folder", {"key": b"overwritten"}))
    assert canary.read_text() == CANARY


def test_a48_the_workspace_itself_replaced(owner, sandbox, canary):
    """The roots lie in a directory that code inside cannot write, so they cannot become links."""
    source = """
say([attempt(os.rename, "/workspace", "/moved"), attempt(os.rmdir, "/workspace"), attempt(os.symlink, "/etc", "/workspace2"),
     attempt(os.rmdir, "/tmp"), attempt(os.chmod, "/", 0o777), attempt(os.rename, "/sandbox/home", "/sandbox/x")])
"""
    assert set(owner.inside(sandbox, source)) <= {"EROFS", "EBUSY"}


@pytest.mark.promise("S2.8")
def test_a49_hard_link(owner, sandbox, canary):
    """A second name may be of a file that was never in the workspace; from inside none can be made out of it."""
    beside = canary.parent.parent / "work"
    beside.mkdir()
    os.link(canary, beside / "innocent")
    assert CANARY.encode() in naive(str(beside)).values()
    source = """
open("/workspace/a", "w").write("x")
os.link("/workspace/a", "/workspace/b")
open("/tmp/c", "w").write("y")
say([attempt(os.link, path, "/workspace/stolen") for path in ("/etc/passwd", "/usr/bin/env", "/sandbox/agent.py", "/proc/self/exe")]
    + [attempt(os.link, "/tmp/c", "/workspace/c"), attempt(os.link, "/sandbox/home/.", "/workspace/d")])
"""
    assert set(owner.inside(sandbox, source)) <= {"EXDEV", "EPERM"}
    files, skipped = collect(owner, sandbox)
    assert files == {}
    assert skipped == {"a": "hard_link", "b": "hard_link"}
    with pytest.raises(PathRefused, match="hard link"):
        owner.run(sandbox.read_file("/workspace/a", limit_bytes=100))


@pytest.mark.promise("S2.8")
def test_a50_fifo_socket_device(owner, sandbox):
    source = """
os.mkfifo("/workspace/fifo")
with socket.socket(socket.AF_UNIX) as sock:
    sock.bind("/workspace/socket")
open("/workspace/plain", "w").write("x")
say(attempt(os.mknod, "/workspace/zero", stat.S_IFCHR | 0o666, os.makedev(1, 5)))
"""
    assert owner.inside(sandbox, source) == "EPERM"
    reader = multiprocessing.get_context("fork").Process(target=naive, args=(workspace(sandbox),))
    reader.start()
    reader.join(1)
    assert reader.is_alive(), "a naive collector waits for a writer that never comes"
    reader.kill()
    reader.join()
    reader.close()
    files, skipped = collect(owner, sandbox)
    assert files == {"plain": b"x"}
    assert skipped == dict.fromkeys(("fifo", "socket"), "not_a_regular_file")
    for name in ("fifo", "socket"):
        for work in (
            sandbox.read_file(f"/workspace/{name}", limit_bytes=9),
            sandbox.write_file(f"/workspace/{name}", b"x"),
        ):
            with pytest.raises(PathRefused):
                owner.run(work)


def test_a50_leases_do_not_block(owner, sandbox):
    """A lease makes whoever opens the file wait until its holder lets go, or 45 s (fcntl(2))."""
    source = """
import fcntl
signal.signal(signal.SIGIO, signal.SIG_IGN)
open("/workspace/leased", "w").write("x")
fd = os.open("/workspace/leased", os.O_RDONLY)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
os.set_inheritable(fd, True)
if os.fork() == 0:
    os.close(1), os.close(2)
    time.sleep(60)
say("leased")
"""
    assert owner.inside(sandbox, source) == "leased"
    reader = multiprocessing.get_context("fork").Process(target=naive, args=(workspace(sandbox),))
    reader.start()
    reader.join(1)
    assert reader.is_alive(), "a naive collector waits for the lease"
    reader.kill()
    reader.join()
    reader.close()
    files, skipped = collect(owner, sandbox)
    assert files == {}
    assert skipped == {"leased": "changed_while_read"}
    with pytest.raises((PathRefused, OSError)):
        owner.run(sandbox.write_file("/workspace/leased", b"y"))


def test_a51_modes_and_attributes_stay_behind(owner, sandbox, tmp_path):
    """Only bytes come out: no mode, no attribute, no time is in what ``get_dir`` returns."""
    source = """
open("/workspace/tool", "w").write("#!/bin/sh")
os.chmod("/workspace/tool", 0o6777)
open("/workspace/shut", "w").write("x")
os.chmod("/workspace/shut", 0)
os.mkdir("/workspace/closed", 0)
say([attempt(os.setxattr, "/workspace/tool", "security.capability", b"\\1\\0\\0\\2" + b"\\xff" * 16),
     attempt(os.setxattr, "/workspace/tool", "trusted.x", b"x"), attempt(os.chown, "/workspace/tool", 0, 0)])
"""
    assert set(owner.inside(sandbox, source)) <= {"EPERM", "EINVAL", "EOPNOTSUPP"}
    mode = os.stat(f"{workspace(sandbox)}/tool").st_mode if os.access(workspace(sandbox), os.X_OK) else None
    assert mode is not None
    assert mode & (stat.S_ISUID | stat.S_ISGID)  # what a copy that keeps modes would keep
    files, skipped = collect(owner, sandbox)
    assert files == {"tool": b"#!/bin/sh"}
    assert skipped == {"shut": "unreadable", "closed": "changed_while_read"}


NAMES = [
    *(b"line\nbreak", b"\x1b[2Jescape", b"\xff\xfe", b"-rf", b"--", b"x" * 255, b"...", b".. ", b"Case", b"case"),
    *("\u202egnp.exe".encode(), b"tab\tcr\r", b"%s%n", b"$(id)", b"a" * 100 + b"\x07"),
]


def test_a52_names(owner, sandbox):
    """Names are kept by their bytes and never printed by us; a list with one name a line would have another line."""
    source = """
for name in ARGS:
    with open(b"/workspace/" + bytes.fromhex(name), "wb") as file:
        file.write(bytes.fromhex(name))
say("made")
"""
    owner.inside(sandbox, source, [name.hex() for name in NAMES])
    assert len("\n".join(os.fsdecode(name) for name in os.listdir(workspace(sandbox))).split("\n")) == len(NAMES) + 1
    files, skipped = collect(owner, sandbox)
    assert {os.fsencode(name): data for name, data in files.items()} == {name: name for name in NAMES}
    assert skipped == {}
    for name in NAMES:
        assert owner.run(sandbox.read_file(f"/workspace/{os.fsdecode(name)}", limit_bytes=300)) == name
    assert set(owner.run(sandbox.snapshot())) == {os.fsdecode(name) for name in NAMES}


OUTSIDE = (
    *(
        "/workspace/../etc/passwd",
        "workspace/x",
        "/workspace\0",
        "/etc/passwd",
        "/",
        "/sandbox/home/x",
        "/proc/self/environ",
    ),
    *("/workspace2/x", "/tmp/../workspace/x", "//etc/passwd", ""),
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_a52_paths_that_are_refused(owner, sandbox, path):
    for work in (sandbox.read_file(path, limit_bytes=9), sandbox.get_dir(path, limit_bytes=9)):
        with pytest.raises(PathRefused):
            owner.run(work)
    if not path.startswith("/sandbox/home"):  # written into, never collected
        with pytest.raises((PathRefused, IsADirectoryError)):
            owner.run(sandbox.write_file(path, b"x"))


@pytest.mark.parametrize("name", ["../x", "a/../../x", "\0", "../../etc/passwd"])
def test_a52_names_in_what_is_put(owner, sandbox, name):
    with pytest.raises(PathRefused):
        owner.run(sandbox.put_dir("/workspace/sub", {name: b"x"}))
    assert owner.inside(sandbox, "say([os.listdir('/workspace'), os.listdir('/workspace/sub')])") == [["sub"], []]


FORGERIES = (
    b'done\n{"kind":"rollout.end","exit":"exited"}\n',
    b"\x1b[2J\x1b]0;title\x07\x1b[31mred",
    b"progress 10%\rprogress 99%\r",
    "user\u202e\u2066gnp\u2069".encode() + b"\xff\xc0\x80\x00\x7f",
)


def test_a53_output_in_the_record(owner, sandbox, tmp_path):
    """What a program prints reaches us as bytes; in the record it is one line of ASCII, whatever it is."""
    printed = []
    for data in FORGERIES:
        result = owner.exec(sandbox, ["/bin/cat"], stdin=data)
        assert result.stdout == data
        printed.append(result.stdout.decode("utf-8", "surrogateescape"))
    log = "".join(json.dumps({"said": "X"}).replace("X", text) + "\n" for text in printed)  # the naive record
    assert len(log.splitlines()) > len(FORGERIES)
    assert any('"kind":"rollout.end"' in line for line in log.splitlines())
    path = tmp_path / "run" / "events" / "n" / f"{sandbox.rollout_id}.broker.jsonl"
    path.parent.mkdir(parents=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        writer = ChainWriter(
            fd, Context("run-20260101-000000-abcdef", sandbox.rollout_id, f"sha256:{'0' * 64}"), Producer.BROKER
        )
        writer.append("rollout.start", backend="bubblewrap", role="rollout")
        for number, text in enumerate(printed):
            words = ["printf", text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").replace("\0", " ")]
            writer.append("process.exec", {"process.command_args": words}, exec_id=number)
    finally:
        os.close(fd)
    data = path.read_bytes()
    assert data.count(b"\n") == 1 + len(FORGERIES)
    assert all(byte == 10 or 32 <= byte < 127 for byte in data)
    assert [event["kind"] for event in iter_events(tmp_path / "run")].count("rollout.end") == 0


def test_a55_sparse_files_wide_and_deep_trees(owner):
    sandbox = owner.create(inodes=8192)
    source = """
def sparse(size):
    with open("/workspace/sparse", "w") as file:
        file.truncate(size)
def wide():
    os.mkdir("/workspace/wide")
    for number in range(20000):
        os.close(os.open(f"/workspace/wide/{number}", os.O_CREAT, 0o600))
big, small = attempt(sparse, 1 << 40), attempt(sparse, 30 << 20)
full = attempt(wide)
for number in range(0, 3000):
    os.unlink(f"/workspace/wide/{number}")
fd = os.open("/workspace", os.O_RDONLY)
for depth in range(1500):
    os.mkdir("d" * 40, dir_fd=fd)
    below = os.open("d" * 40, os.O_RDONLY, dir_fd=fd)
    os.close(fd)
    fd = below
say([big, small, full])
"""
    assert owner.inside(sandbox, source) == ["EFBIG", "done", "ENOSPC"]
    assert os.stat(f"{workspace(sandbox)}/sparse").st_blocks == 0  # a naive budget of blocks would see nothing
    files, skipped = collect(owner, sandbox)
    assert skipped["sparse"] == "too_large"
    assert 4000 < len(files) < 8192
    assert [reason for path, reason in skipped.items() if path.startswith("dddd")] == ["too_deep"]
    owner.destroy(sandbox)


def test_a55_long_names_do_not_fill_the_collector(owner):
    """64 directories of 255 bytes, times thousands of files below them: each path is bounded, not only their number."""
    sandbox = owner.create(inodes=8192)
    source = """
fd = os.open("/workspace", os.O_RDONLY)
for depth in range(60):
    os.mkdir("d" * 255, dir_fd=fd)
    below = os.open("d" * 255, os.O_RDONLY, dir_fd=fd)
    os.close(fd)
    fd = below
for number in range(5000):
    os.close(os.open(f"{number:0255}", os.O_CREAT, 0o600, dir_fd=fd))
say("made")
"""
    assert owner.inside(sandbox, source) == "made"
    files, skipped = collect(owner, sandbox)
    assert sum(map(len, [*files, *skipped])) < 5 * MIB
    assert list(skipped.values()) == ["too_many_entries"]
    owner.destroy(sandbox)


def test_a67_nothing_is_shared_between_rollouts(owner):
    """Caches that a later rollout would trust: every place that can be written is gone with its sandbox."""
    names = [".cache/pip/x", ".cache/uv/x", ".npm/x", ".cache/huggingface/x", ".config/git/config", ".pydistutils.cfg"]
    source = """
def plant(name):
    path = os.path.join(os.environ["HOME"], name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "x").close()
say([attempt(plant, name) for name in ARGS])
"""
    for _ in range(2):  # the second would find the first one's file and say EEXIST
        sandbox = owner.create()
        assert owner.inside(sandbox, source, names) == ["done"] * len(names)
        owner.destroy(sandbox)


def test_a34_directories_beside_a_mount(owner, tmp_path):
    """``.snapshot`` and the like beside the mounted directory: ``..`` leads to the sandbox's own root."""
    from stockade.policy import Mount

    for name in ("data", ".snapshot"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text(CANARY)
        (tmp_path / name).chmod(0o755)
    tmp_path.chmod(0o755)
    assert os.path.exists(tmp_path / "data" / ".." / ".snapshot" / "old")
    sandbox = owner.create(mounts=(Mount(source=str(tmp_path / "data"), target="/data"),))
    source = 'say([os.path.exists("/data/old"), os.path.exists("/data/../.snapshot"), os.path.exists("/.snapshot"), os.path.exists("/data/.snapshot")])'
    assert owner.inside(sandbox, source) == [True, False, False, False]
    owner.destroy(sandbox)


def test_descriptors_sent_out_are_not_taken(owner, sandbox):
    """Only bytes cross between sandboxes: a descriptor has no socket to leave by but the guest's, which is shut."""
    source = """
def send(fd):
    with socket.socket(fileno=os.dup(fd)) as sock:
        socket.send_fds(sock, [b"x"], [os.open("/workspace", os.O_RDONLY)])
say([attempt(send, fd) for fd in (0, 1, 2)])
"""
    assert owner.inside(sandbox, source) == ["ENOTSOCK"] * 3
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [0])
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)  # over a socket it would have worked
        os.close(fds[0])
