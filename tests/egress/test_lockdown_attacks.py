"""What code that took a worker over would try next. Each attempt is made twice: locked down, and to show it, free."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from stockade.egress import _filters
from tests.egress.test_lockdown import Ran, run
from tests.support import requires, requires_root

KILLED = -signal.SIGSYS
BEFORE = """
import _thread, ctypes, fcntl, mmap, platform, resource, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
numbers = {numbers}
def call(name, *arguments):
    ctypes.set_errno(0)
    passed = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = libc.syscall(ctypes.c_long(numbers[name]), *passed)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return "done"
def tried(function):
    function()
    return "done"
def started():
    try:
        _thread.start_new_thread(int, ())
    except RuntimeError:
        raise PermissionError(errno.EPERM, "thread") from None
    return "done"
parent = os.getppid()
"""


@dataclass(frozen=True)
class Attack:
    """``code`` is an expression; ``free`` are the results that show that only the lock-down is in its way."""

    name: str
    code: str
    free: tuple[str, ...] = ("done",)
    killed: bool = True
    root: bool = False
    before: str = ""


def refused(name: str, code: str, *free: str, root: bool = False, before: str = "") -> Attack:
    return Attack(name, code, free or ("done",), killed=False, root=root, before=before)


OWN_MOUNTS = """
libc.unshare(0x00020000)
libc.mount(None, b"/", None, ctypes.c_ulong(0x44000), None)
"""
"""A mount namespace of its own, made private: what is mounted ends with the process."""

KILLING = (
    Attack("execve", 'os.execv("/bin/echo", ["echo", "execve", "done"])'),
    Attack(
        "execveat",
        'call("execveat", program, b"", (ctypes.c_char_p * 4)(b"echo", b"execveat", b"done", None), None, 0x1000)',
        before='program = os.open("/bin/echo", os.O_RDONLY)\n',
    ),
    Attack(
        "memory as a program",
        'os.execv(f"/proc/self/fd/{program}", ["echo", "memory-as-a-program", "done"])',
        before='program = os.memfd_create("p", 0)\nos.write(program, open("/bin/echo", "rb").read())\n',
    ),
    Attack("fork", "tried(lambda: os.fork() or os._exit(0))"),
    Attack("posix_spawn", 'tried(lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0))'),
    Attack("clone", 'tried(lambda: libc.syscall(numbers["clone"], 17, 0, 0, 0, 0) or os._exit(0))'),
    Attack("ptrace me", 'call("ptrace", 0, 0, 0, 0)'),
    Attack("ptrace the parent", 'call("ptrace", 0x4206, parent, 0, 0)', root=True),
    Attack(
        "read another's memory",
        'call("process_vm_readv", os.getpid(), ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0)',
        before="page = ctypes.create_string_buffer(8)\nvector = (ctypes.c_size_t * 2)(ctypes.addressof(page), 8)\n",
    ),
    Attack("mount", 'call("mount", b"none", scratch.encode(), b"tmpfs", 0, None)', root=True, before=OWN_MOUNTS),
    Attack("unmount", 'call("umount2", b"/nonexistent", 0)', ("ENOENT",), root=True),
    Attack("new mount interface", 'call("fsopen", b"tmpfs", 0)', root=True),
    Attack("unshare", 'call("unshare", 0x10000000)', ("done", "EPERM", "ENOSPC")),
    Attack("setns", 'call("setns", -1, 0)', ("EBADF",)),
    Attack("chroot", 'call("chroot", b"/")', root=True),
    Attack("bpf", 'call("bpf", 0, ctypes.byref((ctypes.c_uint32 * 16)(2, 4, 8, 1)), 64)', root=True),
    Attack("io_uring", 'call("io_uring_setup", 4, ctypes.create_string_buffer(120))', ("done", "EPERM")),
    Attack("keyctl", 'call("keyctl", 0, -4, 1)'),
    Attack("add_key", 'call("add_key", b"user", b"stockade-test", b"x", 1, -2)'),
    Attack("userfaultfd", 'call("userfaultfd", 0)', root=True),
    Attack(
        "perf",
        'call("perf_event_open", ctypes.byref((ctypes.c_uint32 * 32)(1, 128)), 0, -1, -1, 0)',
        ("done", "ENOENT", "EACCES"),
    ),
    Attack(
        "file handles",
        'call("open_by_handle_at", -1, ctypes.create_string_buffer(136), 0)',
        ("EBADF", "EPERM", "EINVAL"),
    ),
    Attack("load a module", 'call("finit_module", -1, b"", 0)', ("EBADF", "EPERM", "ENOSYS"), root=True),
    Attack("another's descriptor", 'call("pidfd_getfd", -1, 0, 0)', ("EBADF",)),
)


def sock(family: int, kind: int, protocol: int = 0) -> str:
    return f"tried(lambda: socket.socket({family}, {kind}, {protocol}))"


ABSENT = ("done", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT")
"""What a kernel without that family says: it was asked, which the filter does not let happen."""
SERVER = """
server = socket.socket(socket.AF_UNIX)
server.bind("\\0stockade-test-%d" % os.getpid())
server.listen()
"""

REFUSING = (
    refused("netlink", sock(16, 3)),
    refused("packet", sock(17, 3, 0x0300), *ABSENT, root=True),
    refused("raw", sock(2, 3, 1), root=True),
    refused("raw IPv6", sock(10, 3, 58), root=True),
    refused("ping", sock(2, 2, 1), "done", "EACCES"),
    refused("alg", sock(38, 5), *ABSENT),
    refused("vsock", sock(40, 1), *ABSENT),
    refused("bluetooth", sock(31, 1), *ABSENT),
    refused("tipc", sock(30, 5), *ABSENT),
    refused("xdp", sock(44, 3), *ABSENT, root=True),
    refused("mptcp", sock(2, 1, 262), *ABSENT, "ENOPROTOOPT"),
    refused("sctp", sock(2, 1, 132), *ABSENT),
    refused("unix", sock(1, 1)),
    refused("unix datagrams", sock(1, 2)),
    refused("socketpair", "tried(socket.socketpair)"),
    refused("bind", 'own.bind(("127.0.0.1", 0))', before="own = socket.socket()\n"),
    refused("bind UDP", 'own.bind(("127.0.0.1", 0))', before="own = socket.socket(2, 2)\n"),
    refused("listen", "own.listen()", before='own = socket.socket()\nown.bind(("127.0.0.1", 0))\n'),
    refused("listen unbound", "own.listen()", before="own = socket.socket()\n"),
    refused(
        "upper layer", 'own.setsockopt(6, 31, b"smc")', "ENOENT", "ENOTCONN", "EPERM", before="own = socket.socket()\n"
    ),
    refused(
        "socket filter",
        "own.setsockopt(1, 26, struct.pack('HxxxxxxP', 1, ctypes.addressof(code)))",
        before="own = socket.socket(2, 2)\ncode = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0))\n",
    ),
    refused("thread", "started()"),
    refused("executable memory", "tried(lambda: mmap.mmap(-1, 4096, prot=7))"),
    refused(
        "make memory executable",
        'call("mprotect", address, 4096, 5)',
        before="page = mmap.mmap(-1, 4096)\naddress = ctypes.addressof(ctypes.c_char.from_buffer(page))\n",
    ),
    refused("kill", "os.kill(parent, 0)"),
    refused("kill oneself", "os.kill(os.getpid(), 0)"),
    refused("tgkill", 'call("tgkill", os.getpid(), os.getpid(), 0)'),
    refused("outlive the agent", 'call("prctl", 1, 0, 0, 0, 0)'),
    refused("become dumpable", 'call("prctl", 4, 1, 0, 0, 0)'),
    refused("signals by descriptor", "tried(lambda: fcntl.fcntl(1, fcntl.F_SETOWN, os.getpid()))"),
    refused("type into a terminal", 'fcntl.ioctl(0, 0x5412, b"x")', "ENOTTY", "EIO", "EPERM"),
    refused("limits of another", 'call("prlimit64", parent, 7, None, None)'),
    refused("the agent's descriptors", "tried(lambda: os.listdir(f'/proc/{parent}/fd'))"),
)

FILES = (
    refused("read a file", 'tried(lambda: os.open("/etc/passwd", os.O_RDONLY))'),
    refused("read its own program", "tried(lambda: os.open(sys.executable, os.O_RDONLY))"),
    refused("list the root", 'tried(lambda: os.listdir("/"))'),
    refused("create", 'tried(lambda: os.open(scratch + "/new", os.O_WRONLY | os.O_CREAT))'),
    refused("overwrite", 'tried(lambda: os.open(scratch + "/old", os.O_WRONLY | os.O_TRUNC))'),
    refused("unnamed file", "tried(lambda: os.open(scratch, os.O_WRONLY | os.O_TMPFILE))", "done", "EOPNOTSUPP"),
    refused("truncate", 'os.truncate(scratch + "/old", 0)'),
    refused("mkdir", 'os.mkdir(scratch + "/folder")'),
    refused("unlink", 'os.unlink(scratch + "/old")'),
    refused("rename", 'os.rename(scratch + "/old", scratch + "/moved")'),
    refused("link", 'os.link(scratch + "/old", scratch + "/second")'),
    refused("symlink", 'os.symlink("/", scratch + "/soft")'),
    refused("device", 'os.mknod(scratch + "/null", 0o020666, os.makedev(1, 3))', root=True),
    refused("chmod", 'os.chmod(scratch + "/old", 0o777)'),
    refused("chmod by descriptor", "os.fchmod(old, 0o777)", before='old = os.open(scratch + "/old", os.O_RDONLY)\n'),
    refused("chown", 'os.chown(scratch + "/old", -1, -1)'),
    refused("times", 'os.utime(scratch + "/old", (0, 0))'),
    refused("attributes", 'os.setxattr(scratch + "/old", b"user.x", b"x")', "done", "EOPNOTSUPP"),
    refused("the parent's files", 'tried(lambda: os.open(f"/proc/{parent}/environ", os.O_RDONLY))'),
    refused("the parent's root", 'tried(lambda: os.listdir(f"/proc/{parent}/root/"))'),
    refused("its own memory", 'tried(lambda: os.open("/proc/self/mem", os.O_RDWR))'),
    refused("a terminal", 'tried(lambda: os.open("/dev/ptmx", os.O_RDWR))', "done", "ENOENT"),
    refused("chdir", 'os.chdir("/")'),
)


def numbers() -> dict[str, int]:
    folder = Path(_filters.__file__).parent / "plain"
    entry = json.loads((folder / "filters.json").read_text())["machines"].get(os.uname().machine)
    requires(entry is not None, "no seccomp filter for this machine")
    return {name: number for group in entry["syscalls"].values() for name, number in group.items()}


REFUSED = (*REFUSING, *FILES)


def named(attack: Attack) -> str:
    return attack.name.replace(" ", "-")


def prepared(attack: Attack, folder: Path) -> str:
    """Return the code that readies an attack, with a file ``old`` in a folder of its own to attack."""
    scratch = folder / named(attack)
    scratch.mkdir()
    (scratch / "old").write_text("x")
    return (
        f"space = spaces[{named(attack)!r}] = {{**globals(), 'scratch': {str(scratch)!r}}}\n"
        f"exec({attack.before!r}, space)\n"
    )


def carried_out(attack: Attack) -> str:
    return f"attempt({named(attack)!r}, lambda: eval({attack.code!r}, spaces[{named(attack)!r}]))\n"


def attempt(attacks: tuple[Attack, ...], folder: Path, *, lock: bool) -> Ran:
    """Make all ``attacks`` in one process."""
    before = BEFORE.format(numbers=numbers()) + "spaces = {}\n"
    before += "".join(prepared(attack, folder) for attack in attacks)
    return run("".join(map(carried_out, attacks)), before, lock=lock)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    folder = tmp_path_factory.mktemp("locked")
    return attempt(REFUSED, folder, lock=True), folder


@pytest.fixture(scope="module")
def successes(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    attacks = tuple(attack for attack in REFUSED if os.geteuid() == 0 or not attack.root)
    return attempt(attacks, tmp_path_factory.mktemp("free"), lock=False)


@pytest.mark.promise("S3.18")
@pytest.mark.parametrize("attack", KILLING, ids=named)
def test_the_process_is_killed_for_it(attack: Attack, tmp_path: Path) -> None:
    ran = attempt((attack,), tmp_path, lock=True)
    assert (ran.status, named(attack) in ran.found) == (KILLED, False), ran


@pytest.mark.promise("S3.18")
@pytest.mark.parametrize("attack", KILLING, ids=named)
def test_without_the_lock_down_it_is_done(attack: Attack, tmp_path: Path) -> None:
    if attack.root:
        requires_root()
    ran = attempt((attack,), tmp_path, lock=False)
    assert ran.found.get(named(attack)) in attack.free, ran


@pytest.mark.promise("S3.18")
@pytest.mark.parametrize("attack", REFUSED, ids=named)
def test_it_is_refused(attack: Attack, refusals: tuple[Ran, Path]) -> None:
    ran, folder = refusals
    assert ran.status == 0
    assert ran.found[named(attack)] in ("EPERM", "EACCES", "ENOSYS")
    scratch = folder / named(attack)
    assert (scratch / "old").read_text() == "x"
    assert [path.name for path in scratch.iterdir()] == ["old"]


@pytest.mark.parametrize("attack", REFUSED, ids=named)
def test_without_the_lock_down_it_is_not_refused(attack: Attack, successes: Ran) -> None:
    if attack.root:
        requires_root()
    assert successes.found[named(attack)] in attack.free


def test_with_unix_sockets_allowed_abstract_ones_stay_out_of_reach(tmp_path: Path) -> None:
    """A path can be connected to, which is what it is for; names without a path belong to other programs."""
    path = tmp_path / "s"
    before = SERVER + f"named = socket.socket(1)\nnamed.bind({str(path)!r})\nnamed.listen(8)\n"
    code = (
        f'attempt("named", lambda: socket.socket(1).connect({str(path)!r}))\n'
        'attempt("abstract", lambda: socket.socket(1).connect(server.getsockname()))\n'
        'attempt("pair", lambda: socket.socketpair())\n'
        'attempt("seqpacket", lambda: socket.socket(1, 5))\n'
    )
    found = run(code, before, unix=True).found
    assert (found["named"], found["pair"], found["seqpacket"]) == ("done", "EPERM", "EPERM")
    requires(int(found["landlock"].partition("-")[2]) >= 6, "Landlock knows no scopes")
    assert found["abstract"] == "EPERM"
    path.unlink()
    assert run(code, before, lock=False).found["abstract"] == "done"
