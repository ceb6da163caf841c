"""Runs as a child: makes namespaces and mounts in them, and says how far it came.

Read from standard input by ``python -I -S -`` and therefore on its own: an unprivileged uid may not be able to open the
file. It prints ``{"userns": …, "netns": …, "tmpfs": …, "overlay": …}``: ``"ok"`` or what went wrong. Everything it makes is
in namespaces of its own and ends with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

_NEWNS, _NEWUSER, _NEWNET, _NEWPID, _NEWIPC, _NEWUTS = (
    *(0x00020000, 0x10000000, 0x40000000),
    *(0x20000000, 0x08000000, 0x04000000),
)
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_INODES = 32
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as stream:
        stream.write(text)


def _mount(kind: str, target: str, options: str) -> None:
    words = [word.encode() for word in (kind, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(0), options.encode()), f"mount {kind}")


def _userns() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEWUSER | _NEWNS), "unshare user and mount namespace")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "make mounts private")


def _others() -> None:
    _check(_libc.unshare(_NEWNET | _NEWPID | _NEWIPC | _NEWUTS), "unshare net, pid, ipc and uts namespaces")


def _tmpfs() -> None:
    _mount("tmpfs", "/tmp", f"size=1m,nr_inodes={_INODES}")  # noqa: S108 -- the mount point, in a namespace of our own
    os.chdir("/tmp")  # noqa: S108
    made = 0
    try:
        for made in range(2 * _INODES):
            os.close(os.open(f"inode{made}", os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError:
        for name in os.listdir("."):
            os.unlink(name)
        return
    raise OSError(0, f"nr_inodes={_INODES} let {made + 1} files be made")


def _overlay() -> None:
    for name in ("lower", "upper", "work", "merged"):
        os.mkdir(name)
    _write("lower/file", "below")
    _mount("overlay", "merged", "lowerdir=lower,upperdir=upper,workdir=work,userxattr")
    _write("merged/file", "above")
    with open("lower/file", encoding="ascii") as stream:
        if stream.read() != "below":
            raise OSError(0, "a write went through to the lower directory")


def main() -> None:
    """Try one step after the other; a step that fails ends those that build on it."""
    answers: dict[str, str] = {}
    for name, step, base in (
        ("userns", _userns, None),
        ("netns", _others, "userns"),
        ("tmpfs", _tmpfs, "userns"),
        ("overlay", _overlay, "tmpfs"),
    ):
        if base is not None and answers[base] != "ok":
            answers[name] = f"not tried: {answers[base]}"
            continue
        try:
            step()
            answers[name] = "ok"
        except OSError as error:
            answers[name] = str(error)
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
