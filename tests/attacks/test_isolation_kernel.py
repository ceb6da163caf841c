"""Isolation cases about kernel surface: the battery of tests/sandbox/seccomp_probes.py in a real sandbox.

Without the guards it runs as a careless sandbox allows: root of its own user namespace, without a filter. That it gets
through there is what makes a refusal here worth something.
"""

from __future__ import annotations

import errno
import json
import socket
from pathlib import Path

import pytest

from tests.sandbox import test_seccomp_live as unguarded
from tests.sandbox.test_seccomp import NUMBERS

PROBES = Path(unguarded.__file__).with_name("seccomp_probes.py").read_text()
REFUSALS = {errno.EPERM, errno.ENOSYS, errno.EACCES}


@pytest.fixture(scope="module")
def inside(owner):
    sandbox = owner.create(pids=128)
    result = owner.exec(sandbox, [owner.python, "-I", "-c", PROBES, json.dumps(NUMBERS[unguarded.MACHINE])])
    assert result.exit.code == 0, result.stderr.decode()
    owner.destroy(sandbox)
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def outside():
    return unguarded.battery(filtered=False)


def _ids(*names: str) -> list:
    return [pytest.param(name, id=f"{case}-{name}") for case in names for name in unguarded.CASES[case].split()]


def check(name: str, inside: dict[str, int], outside: dict[str, int]) -> None:
    assert inside[name] in REFUSALS, errno.errorcode.get(inside[name], "it worked")
    if name in unguarded.WORKS_WITHOUT:
        assert outside[name] == 0
    elif name not in unguarded.SECOND_WALL | unguarded.ANSWERED_ENOSYS:
        assert outside[name] != inside[name]  # the kernel itself would have said something else


@pytest.mark.parametrize("name", _ids("A19"))
def test_a19_socket_families(inside, outside, name):
    check(name, inside, outside)


@pytest.mark.parametrize("name", _ids("A24", "A27"))
def test_a24_a27_system_v_ipc_and_keyrings(inside, outside, name):
    check(name, inside, outside)


@pytest.mark.promise("S2.4")
@pytest.mark.parametrize("name", _ids("A28", "A29"))
def test_a28_nested_user_namespace(inside, outside, name):
    check(name, inside, outside)


@pytest.mark.parametrize("name", _ids("A30"))
def test_a30_mounts(inside, outside, name):
    check(name, inside, outside)


@pytest.mark.parametrize("name", _ids("A31"))
def test_a31_io_uring(inside, outside, name):
    assert inside[name] == errno.ENOSYS
    check(name, inside, outside)


@pytest.mark.parametrize("name", _ids("A32", "A33"))
def test_a32_a33_kernel_interfaces_and_file_handles(inside, outside, name):
    check(name, inside, outside)


@pytest.mark.parametrize("name", _ids("A26", "A58", "A63"))
def test_a26_a58_a63_tracing_scheduling_and_clocks(inside, outside, name):
    check(name, inside, outside)


@pytest.mark.parametrize("name", _ids("A36"))
def test_a36_terminal_injection(inside, outside, name):
    check(name, inside, outside)


def test_a36_there_is_no_terminal_to_inject_into(node):
    """Even a controlling terminal of its own: a session without one, and no terminal of the launcher under /dev."""
    source = """
import fcntl
def inject(path):
    fcntl.ioctl(os.open(path, os.O_RDWR), 0x5412, b"x")
say([attempt(os.open, "/dev/tty", os.O_RDWR), attempt(os.listdir, "/dev/pts"), sorted(os.listdir("/dev/pts")), attempt(inject, "/dev/ptmx")])
"""
    tty, _, terminals, own = node.inside(source)
    assert tty == "ENXIO"
    assert terminals == ["ptmx"]
    assert own == "EPERM"


def test_a24_segment_of_the_host(node):
    source = "say(attempt(libc, 'shmget', ARGS, 4096, 0))"
    assert node.plain(source, node.facts["key"]) == "done"
    assert node.careless(source, node.facts["key"]) == "done"
    assert node.inside(source, node.facts["key"]) == "EPERM"


def test_a28_by_the_usual_programs(node):
    source = """
import subprocess
def run(*words):
    done = subprocess.run(words, capture_output=True)
    return "done" if done.returncode == 0 else "refused"
say([run("unshare", "-Ur", "true"), run("unshare", "-Urn", "true"), run("unshare", "-m", "true")])
"""
    assert node.careless(source)[0] == "done"
    assert node.inside(source) == ["refused"] * 3


@pytest.mark.promise("S2.4")
def test_no_capabilities_and_no_new_privileges(node):
    source = "say(dict(map(str.strip, line.split(':', 1)) for line in open('/proc/self/status') if line[:3] in ('Cap', 'NoN', 'Sec', 'Uid')))"
    words = node.inside(source)
    assert {name: int(value, 16) for name, value in words.items() if name.startswith("Cap")} == dict.fromkeys(
        ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0
    )
    assert words["NoNewPrivs"] == "1"
    assert words["Seccomp"] == "2"
    assert words["Uid"].split() == ["1000"] * 4
    outside = node.careless(source)
    assert outside["Seccomp"] == "0" or outside["Seccomp_filters"] != words["Seccomp_filters"]


def test_a64_host_facts(node):
    """What is replaced; the kernel's version and command line stay readable under a shared kernel."""
    source = """
def read(path):
    with open(path) as file:
        return file.read().strip()
say([socket.gethostname(), attempt(read, "/etc/machine-id"), attempt(read, "/etc/hostname"), attempt(os.listdir, "/sys/class"),
     attempt(read, "/etc/shadow"), attempt(read, "/etc/fstab"), len(read("/etc/passwd").splitlines())])
"""
    name, machine, hostname, dmi, shadow, fstab, users = node.inside(source)
    assert [name, hostname, machine] == ["sandbox", "sandbox", "0" * 32]
    assert [dmi, shadow, fstab, users] == ["ENOENT", "ENOENT", "ENOENT", 3]
    assert node.careless(source)[0] == socket.gethostname()


def test_a70_code_without_a_file_keeps_the_walls(owner, sandbox):
    """Allowed, and no way around anything: a program run from memory is under the same filter, uid and limits."""
    source = """
fd = os.memfd_create("x")
with open("/usr/bin/id", "rb") as file:
    os.write(fd, file.read())
reader, writer = os.pipe()
if os.fork() == 0:
    os.dup2(writer, 1)
    os.execve(fd, ["id", "-u"], {})
os.wait()
say([os.read(reader, 100).decode().strip()])
"""
    assert owner.inside(sandbox, source) == ["1000"]
