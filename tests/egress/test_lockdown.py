"""What a worker-like process holds after its lock-down, and what it can still do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from stockade.egress._channel import worker_environment
from stockade.egress._lockdown import Lockdown
from tests.support import requires, requires_root

LOCK = """
store_fd = os.open(STORE, os.O_RDONLY | os.O_DIRECTORY) if STORE else None
_lockdown.preload_codecs()
_lockdown.drop_privileges(UID, UID)
_lockdown.harden_process()
held = _lockdown.lock_down(store_fd, unix=UNIX)
print("landlock", held.landlock)
print("seccomp", held.seccomp, flush=True)
"""
FREE = """
store_fd = os.open(STORE, os.O_RDONLY | os.O_DIRECTORY) if STORE else None
print("landlock", "none")
print("seccomp", "none", flush=True)
"""
BEGIN = """
import errno, os, socket, sys
from stockade.egress import _lockdown

def attempt(name, call):
    try:
        result = call()
        print(name, "done" if result is None else result, flush=True)
    except OSError as error:
        print(name, errno.errorcode[error.errno], flush=True)
"""


@dataclass
class Ran:
    """What a process printed as ``name value`` lines, and how it ended (negative: by that signal)."""

    found: dict[str, str]
    status: int


def run(
    code: str,
    before: str = "",
    *,
    lock: bool = True,
    store: Path | None = None,
    uid: int | None = None,
    unix: bool = False,
    stdin: int | None = None,
) -> Ran:
    """Run ``before``, the lock-down (unless ``lock`` is False) and ``code`` in a process of their own."""
    values = f"STORE = {None if store is None else str(store)!r}\nUID = {uid}\nUNIX = {unix}\n"
    argv = [sys.executable, "-c", BEGIN + values + before + (LOCK if lock else FREE) + code]
    done = subprocess.run(
        argv, env=worker_environment(), stdin=stdin, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.startswith("landlock "), done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    requires(found["landlock"] != "unenforced", "no Landlock")
    requires(found["seccomp"] != "unenforced", "no seccomp filter")
    if done.returncode > 0:
        found["error"] = done.stderr.strip().rpartition("\n")[2]
    return Ran(found, done.returncode)


def locked(code: str, before: str = "", **options: object) -> dict[str, str]:
    """Return what a locked process found, which must have ended well."""
    ran = run(code, before, **options)  # type: ignore[arg-type]
    assert ran.status == 0, ran
    return ran.found


# --------------------------------------------------------------------------------------- what is held

OPEN_STATUS = 'status = os.open("/proc/self/status", os.O_RDONLY)\n'
STATUS = """
for line in os.pread(status, 8192, 0).decode().splitlines():
    name, _, value = line.partition(":")
    print(name, value.strip() or "none")
"""
SETS = ("CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd")


def test_no_capability_is_left() -> None:
    found = locked(STATUS, OPEN_STATUS)
    sets = SETS if os.geteuid() == 0 else SETS[:-1]
    assert {name: found[name].strip("0") for name in sets} == dict.fromkeys(sets, "")
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")


def test_root_holds_capabilities_without_it() -> None:
    requires_root()
    found = locked(STATUS, OPEN_STATUS, lock=False)
    assert found["CapEff"].strip("0")
    assert found["CapBnd"].strip("0")
    assert found["Seccomp"] == "0"


def test_root_becomes_the_uid_it_is_given_and_keeps_nothing() -> None:
    requires_root()
    found = locked(STATUS, OPEN_STATUS, uid=65534)
    assert (found["Uid"].split(), found["Gid"].split(), found["Groups"]) == (["65534"] * 4, ["65534"] * 4, "none")
    assert not any(found[name].strip("0") for name in SETS)


def test_limits_allow_no_process_and_no_core() -> None:
    code = "print('limits', *resource.getrlimit(resource.RLIMIT_NPROC), *resource.getrlimit(resource.RLIMIT_CORE))\n"
    assert locked(code, "import resource\n")["limits"] == "0 0 0 0"


def test_both_walls_are_named() -> None:
    assert str(Lockdown("abi-7", "sha256:0")) == "abi-7"
    plain, unix = locked(""), locked("", unix=True)
    assert plain["landlock"].startswith("abi-")
    assert plain["seccomp"].startswith("sha256:")
    assert plain["seccomp"] != unix["seccomp"]


THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    _lockdown.lock_down()
except Exception as error:
    print("landlock", "none")
    print("seccomp", "none")
    print("refused", error, flush=True)
os._exit(0)
"""


def test_a_process_with_threads_is_refused() -> None:
    assert "several threads" in locked("", THREAD)["refused"]


# ------------------------------------------------------------------------------------ what still works

IMPORTS = "import _thread, fcntl, mmap, select, ssl, time\n"
WORK = """
reader, writer = os.pipe()
memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
os.ftruncate(memory, 4096)
fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
mapped = mmap.mmap(memory, 4096)
mapped[:5] = b"hello"
print("memory", os.pread(memory, 5, 0).decode())
with open(f"/proc/self/fd/{memory}", "rb") as again:
    print("proc", again.read(5).decode())
fcntl.lockf(memory, fcntl.LOCK_EX)
os.write(writer, b"x" * 10)
out, into = os.pipe()
print("splice", os.splice(reader, into, 10))
loop = select.epoll()
loop.register(out, select.EPOLLIN)
print("epoll", len(loop.poll(1)))
sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
attempt("connect", lambda: sock.connect(("127.0.0.1", PORT)))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", 9)))
inherited = socket.socket(fileno=0)
accepted, _ = inherited.accept()
print("accept", accepted.recv(5).decode())
ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
print("random", len(ssl.RAND_bytes(16)))
time.sleep(0.001)
blob = bytearray(32 << 20)
del blob
try:
    _thread.start_new_thread(print, ())
except RuntimeError:
    print("thread refused")
"""


@pytest.mark.parametrize("unix", [False, True])
def test_what_a_worker_does_still_works(unix: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"hello")
            found = locked(WORK.replace("PORT", str(port)), IMPORTS, unix=unix, stdin=server.fileno())
    assert found["memory"] == found["proc"] == found["accept"] == "hello"
    assert (found["splice"], found["epoll"], found["random"]) == ("10", "1", "16")
    assert (found["connect"], found["udp"], found["thread"]) == ("EINPROGRESS", "done", "refused")


# ------------------------------------------------------------------------------------------ the store

STORE_WORK = """
os.mkdir("blobs", 0o700, dir_fd=store_fd)
blobs = os.open("blobs", os.O_RDONLY | os.O_DIRECTORY, dir_fd=store_fd)
fd = os.open(".", os.O_WRONLY | os.O_TMPFILE, 0o600, dir_fd=blobs)
os.write(fd, b"kept")
os.link(f"/proc/self/fd/{fd}", "one", dst_dir_fd=blobs, follow_symlinks=True)
named = os.open("two", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=store_fd)
os.write(named, b"named")
attempt("across", lambda: os.link("two", "two", src_dir_fd=store_fd, dst_dir_fd=blobs))
os.unlink("two", dir_fd=store_fd)
os.ftruncate(named, 2)
again = os.open("one", os.O_RDONLY, dir_fd=blobs)
print("read", os.read(again, 10).decode())
print("list", *sorted(os.listdir(store_fd)), *sorted(os.listdir(blobs)))
"""


@pytest.mark.parametrize("uid", [None, 65534])
def test_a_store_can_be_used(tmp_path: Path, uid: int | None) -> None:
    if uid is not None:
        requires_root()
        os.chown(tmp_path, uid, uid)
    found = locked(STORE_WORK, store=tmp_path, uid=uid)
    assert (found["across"], found["read"], found["list"]) == ("done", "kept", "blobs one two")
    assert (tmp_path / "blobs" / "one").read_bytes() == b"kept"


STORE_ATTACKS = """
attempt("parent", lambda: os.open("..", os.O_RDONLY, dir_fd=store_fd))
attempt("beside", lambda: os.open("../beside", os.O_RDONLY, dir_fd=store_fd))
attempt("absolute", lambda: os.open("/etc/passwd", os.O_RDONLY, dir_fd=store_fd))
attempt("link", lambda: os.open("outward", os.O_RDONLY, dir_fd=store_fd))
attempt("write", lambda: os.open("../beside", os.O_WRONLY | os.O_TRUNC, dir_fd=store_fd))
attempt("create", lambda: os.open("../new", os.O_WRONLY | os.O_CREAT, dir_fd=store_fd))
attempt("mkdir", lambda: os.mkdir("../folder", dir_fd=store_fd))
attempt("unlink", lambda: os.unlink("../beside", dir_fd=store_fd))
attempt("steal", lambda: os.link("../beside", "mine", src_dir_fd=store_fd, dst_dir_fd=store_fd))
attempt("hand_out", lambda: os.link("inside", "../out", src_dir_fd=store_fd, dst_dir_fd=store_fd))
attempt("open_fd", lambda: os.link(f"/proc/self/fd/{held_open}", "mine", dst_dir_fd=store_fd, follow_symlinks=True))
attempt("symlink", lambda: os.symlink("/etc/passwd", "soft", dir_fd=store_fd))
attempt("fifo", lambda: os.mkfifo("fifo", dir_fd=store_fd))
attempt("rename", lambda: os.rename("inside", "other", src_dir_fd=store_fd, dst_dir_fd=store_fd))
attempt("rmdir", lambda: os.rmdir("folder", dir_fd=store_fd))
attempt("chmod", lambda: os.chmod("inside", 0o4777, dir_fd=store_fd))
attempt("inside", lambda: os.close(os.open("inside", os.O_RDWR, dir_fd=store_fd)))
"""


@pytest.mark.promise("S3.18")
def test_a_store_is_not_a_way_to_anything_else(tmp_path: Path) -> None:
    store = tmp_path / "store"

    def fresh() -> None:
        for path in (tmp_path / "beside", store / "inside"):
            path.write_text("x")
        (store / "folder").mkdir(exist_ok=True)

    store.mkdir()
    (store / "outward").symlink_to("../beside")
    before = f"held_open = os.open({str(tmp_path / 'beside')!r}, os.O_RDWR)\n"
    fresh()
    shown = locked(STORE_ATTACKS, before, store=store, lock=False)
    for name in (
        "parent",
        "beside",
        "link",
        "write",
        "create",
        "mkdir",
        "unlink",
        "hand_out",
        "symlink",
        "fifo",
        "rename",
    ):
        assert shown[name] not in ("EACCES", "EPERM", "ENOSYS"), (name, shown)
    for path in (tmp_path / "new", tmp_path / "out", store / "mine", store / "soft", store / "fifo", store / "other"):
        path.unlink(missing_ok=True)
    (tmp_path / "folder").rmdir()
    fresh()
    found = locked(STORE_ATTACKS, before, store=store)
    assert found["inside"] == "done"
    names = [
        "parent",
        "beside",
        "absolute",
        "link",
        "write",
        "create",
        "mkdir",
        "unlink",
        "steal",
        "hand_out",
        "open_fd",
    ]
    assert {found[name] for name in names} <= {"EACCES", "EXDEV"}, found
    assert {found[name] for name in ("symlink", "fifo", "rename", "rmdir", "chmod")} <= {"EACCES", "EPERM", "ENOSYS"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "store"]
    assert sorted(path.name for path in store.iterdir()) == ["folder", "inside", "outward"]
