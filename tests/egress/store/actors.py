"""Processes that the tests let loose on a store. Run as ``python actors.py COMMAND PATH …``; answers in JSON.

A program of its own, because it forks: a process with one thread and nothing but the store in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stockade.egress import _lockdown
from stockade.egress._store import Store, StoreFailed, StoreFull
from stockade.egress._store_tool import check, entries, prepare_store, recount
from tests.egress.store.kit import MIB, fetch, found, keep, opened, record_key, size_of

KEY = record_key("/crash")
BODY = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(4096))  # 128 KiB
_CALLS = ("close", "fstat", "link", "mkdir", "open", "pread", "pwrite", "read", "sendfile", "stat", "unlink", "write")


def forked(work: Callable[[], object]) -> int:
    """Run ``work`` in a child; return its process ID."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def ended(pid: int) -> int:
    """Return the exit status of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- killed at every step


def die_at(step: int) -> None:
    """Let the process be killed before its ``step``-th system call on files from here on."""
    made = 0

    def wrapped(call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            nonlocal made
            made += 1
            if made == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in _CALLS:
        setattr(os, name, wrapped(getattr(os, name)))


def crash(path: str, unnamed: str, heir: str) -> dict[str, object]:
    """Kill a recorder before each of its system calls, and look at what it left: as its ``heir`` or from elsewhere."""
    if heir == "heir":
        random.randrange = lambda *_: 0  # where the search for a place begins
    step = kept = 0
    faults: list[str] = []
    while True:
        step += 1
        place = Path(path) / str(step)

        def record(place: Path = place, step: int = step) -> None:
            fd = prepare_store(place, os.geteuid(), os.getegid())
            store = Store(fd, 64 * MIB)
            store._unnamed = unnamed == "unnamed"
            die_at(step)
            keep(store, KEY, BODY, b"X-A: 1", piece=50_000)

        status = ended(forked(record))
        if status not in (0, -signal.SIGKILL):
            faults.append(f"step {step}: status {status}")
        kept += _looked_at(place, step, faults)
        if status == 0 or step > 500:
            return {"steps": step, "kept": kept, "faults": faults}


def _looked_at(place: Path, step: int, faults: list[str]) -> bool:
    """Return whether the entry is there, after checking that what is there is whole and counted."""
    fd = os.open(place, os.O_RDONLY)
    store = Store(fd, 64 * MIB)
    there = store.lookup(KEY) is not None
    if there and fetch(store, KEY) != BODY:
        faults.append(f"step {step}: not what was recorded")
    # Whoever comes next is told of no less than there is, with the dead one's place inherited or not.
    if store.space.used() + sum(store.space._row(16)) < size_of(place):
        faults.append(f"step {step}: more there than counted")
    if keep(store, KEY, BODY) is there:
        faults.append(f"step {step}: recorded again although it was there, or not although it was missing")
    if fetch(store, KEY) != BODY:
        faults.append(f"step {step}: not what was recorded the second time")
    if store.space.used() + sum(store.space._row(16)) < size_of(place):
        faults.append(f"step {step}: more there than counted the second time")
    store.close()
    if recount(fd) != size_of(place):
        faults.append(f"step {step}: counted {recount(fd)}, there are {size_of(place)}")
    faults.extend(f"step {step}: {one.path}: {one.problem}" for one in check(fd))
    if left := [one.name for one in place.rglob("tmp-*")]:
        faults.append(f"step {step}: left {left}")
    os.close(fd)
    return there


# ---- many at once


def race(path: str, workers: str, unnamed: str) -> dict[str, object]:
    """Let workers record the same keys at once, each with bodies of its own."""
    ready, go = os.pipe(), os.pipe()
    results = os.pipe()
    os.close(prepare_store(path, os.geteuid(), os.getegid()))
    keys = [record_key(f"/race/{number}") for number in range(20)]

    def work(number: int) -> None:
        with opened(Path(path)) as store:
            store._unnamed = unnamed == "unnamed"
            os.write(ready[1], b".")
            os.read(go[0], 1)
            won = [
                index for index, key in enumerate(keys) if keep(store, key, _told(number, index), b"X-By: %d" % number)
            ]
            seen = [found(store, key).headers[0][1].decode() for key in keys]
            good = all(
                fetch(store, key) == _told(int(by), index)
                for index, (key, by) in enumerate(zip(keys, seen, strict=True))
            )
            os.write(results[1], json.dumps({"won": won, "seen": seen, "good": good, "by": number}).encode() + b"\n")

    pids = [forked(partial(work, number)) for number in range(int(workers))]
    for _ in pids:
        os.read(ready[0], 1)
    os.write(go[1], b"." * len(pids))
    statuses = [ended(pid) for pid in pids]
    os.close(results[1])
    lines = b"".join(iter(lambda: os.read(results[0], 65536), b"")).splitlines()
    return {"statuses": statuses, "workers": [json.loads(line) for line in lines]}


def _told(number: int, index: int) -> bytes:
    """Return what worker ``number`` says to key ``index``: its own story, or one that half of them share."""
    return b"%d" % (number % 2 if index % 2 else number) * 30_000


def fill(path: str, workers: str, max_bytes: str) -> dict[str, object]:
    """Let workers write until it is full, some killed on the way, and watch the size all the while."""
    os.close(prepare_store(path, os.geteuid(), os.getegid()))
    limit = int(max_bytes)

    def work(number: int) -> None:
        rng = random.Random(number)
        refused = 0
        with opened(Path(path), limit) as store:
            for step in range(10_000):
                body = rng.randbytes(rng.choice([0, 10, 5000, 70_000]))
                try:
                    keep(store, record_key(f"/{number}/{step}"), body, chunked=rng.random() < 0.5)
                except StoreFull:
                    refused += 1
                    if refused > 20:
                        return

    def brim() -> None:
        with opened(Path(path), limit) as store, contextlib.suppress(StoreFull):
            for step in range(10_000):
                keep(store, record_key(f"/brim/{step}"), b"")

    pids = {forked(partial(work, number)) for number in range(int(workers))}
    most, killed = 0, 0
    while pids:
        most = max(most, size_of(Path(path)))
        if killed < int(workers) // 2 and most > limit * (killed + 1) // 8:
            killed += 1
            os.kill(min(pids), signal.SIGKILL)
        for pid in list(pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                pids.discard(pid)
    fd = os.open(path, os.O_RDONLY)
    before, size = size_of(Path(path)), recount(fd)
    after = size_of(Path(path))
    damaged = [one.path for one in check(fd)]
    ended(forked(brim))  # what the dead held is free again: one more fills it to the last block
    full = size_of(Path(path))
    os.close(fd)
    return {
        "most": most,
        "before": before,
        "counted": size,
        "size": after,
        "full": full,
        "damaged": damaged,
        "killed": killed,
    }


# ---- under Landlock, as another user

_ALL = (1 << 16) - 1
_EXECUTE_TO_READ_DIR = 0b1111
_REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 5, 1 << 7, 1 << 8
RIGHTS = (_EXECUTE_TO_READ_DIR & ~1) | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG
"""Read and write files, list, remove and make files, make directories; neither REFER nor TRUNCATE."""


def locked(fd_text: str, uid: str, unnamed: str) -> dict[str, object]:
    """Use the store ``fd`` as ``uid``, hardened as a worker is, with rights below that directory and nowhere else."""
    fd = int(fd_text)
    store = Store(fd, 64 * MIB)
    store._unnamed = unnamed == "unnamed"
    if int(uid) != os.geteuid():
        _lockdown.drop_privileges(int(uid), int(uid))
    _lockdown.harden_process()
    enforced = _landlocked(fd)
    told: dict[str, object] = {"uid": os.geteuid(), "landlock": enforced, "elsewhere": _opens("/etc/passwd")}
    told["kept"] = [keep(store, KEY, BODY), keep(store, KEY, b"x"), keep(store, record_key("/second"), BODY)]
    told["whole"] = fetch(store, KEY) == fetch(store, record_key("/second")) == BODY
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(found(store, KEY).open()) as serving:
        told["sent"] = theirs.recv(serving.send(ours.fileno(), 1000)) == BODY[:1000]
    told["listed"] = len(list(entries(fd)))
    with contextlib.suppress(StoreFailed):
        keep(store, KEY, b"never")
    store.close()
    return told


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        return False
    return True


def _landlocked(fd: int) -> bool:
    """Allow :data:`RIGHTS` below ``fd`` and nothing else; return whether the kernel knows how."""
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(444, None, 0, 1)
    if abi < 1:
        return False
    handled = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1
    attr = struct.pack("=Q", handled)
    ruleset = libc.syscall(444, attr, len(attr), 0)
    rule = struct.pack("=Qi", RIGHTS, fd)
    assert ruleset >= 0
    assert libc.syscall(445, ruleset, 1, rule, 0) == 0
    assert libc.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return True


if __name__ == "__main__":
    COMMANDS: dict[str, Callable[..., object]] = {"crash": crash, "race": race, "fill": fill, "locked": locked}
    sys.stdout.write(json.dumps(COMMANDS[sys.argv[1]](*sys.argv[2:])))
