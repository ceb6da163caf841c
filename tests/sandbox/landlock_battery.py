"""Runs as a process of its own: restricts itself as told, tries everything, prints what worked.

``python landlock_battery.py SPEC`` with ``{"root", "rules", "scope", "net", "max_abi", "outside": pid, "abstract": name,
"port": n}``; ``max_abi`` null restricts nothing. Prints ``{"enforcement": … | null, "did": {attempt: errno or 0}}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from stockade.sandbox._landlock import Access, Rule, restrict

SPEC = json.loads(sys.argv[1])
ROOT = SPEC["root"]
STATE = {"child": 0}


def at(path: str) -> str:
    return os.path.join(ROOT, path)


def read(path: str) -> None:
    with open(at(path), "rb") as stream:
        stream.read()


def write(path: str) -> None:
    with open(at(path), "r+b") as stream:
        stream.write(b"x")


def connect(family: int, address: str | tuple[str, int]) -> None:
    with socket.socket(family) as client:
        client.connect(address)


def bind_tcp() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))


def pty_ioctl() -> None:
    fd = os.open(SPEC["terminal"], os.O_RDWR | os.O_NOCTTY)
    try:
        fcntl.ioctl(fd, 0x5401, bytes(64))
    finally:
        os.close(fd)


def run(path: str) -> None:
    subprocess.run([path], check=True, env={})


def trace(path: str) -> None:
    read(f"/proc/{SPEC['outside']}/root{at(path)}")


ATTEMPTS: dict[str, Callable[[], object]] = {
    "read hidden": lambda: read("hidden/secret"),
    "list hidden": lambda: os.listdir(at("hidden")),
    "read hidden by ..": lambda: read("read/../hidden/secret"),
    "read hidden by link": lambda: read("write/link"),
    "read hidden by /proc": lambda: trace("hidden/secret"),
    "write hidden": lambda: write("hidden/secret"),
    "create in hidden": lambda: os.mkdir(at("hidden/new")),
    "delete hidden": lambda: os.unlink(at("hidden/victim")),
    "truncate hidden": lambda: os.truncate(at("hidden/secret"), 0),
    "move out of hidden": lambda: os.rename(at("hidden/secret"), at("write/stolen")),
    "link out of hidden": lambda: os.link(at("hidden/secret"), at("write/linked")),
    "read read": lambda: read("read/file"),
    "list read": lambda: os.listdir(at("read")),
    "write read": lambda: write("read/file"),
    "truncate read": lambda: os.truncate(at("read/file"), 0),
    "create in read": lambda: os.mkdir(at("read/new")),
    "execute read": lambda: run(at("read/program")),
    "execute read_exec": lambda: run(at("read_exec/program")),
    "read write": lambda: read("write/file"),
    "write write": lambda: write("write/file"),
    "truncate write": lambda: os.truncate(at("write/file"), 0),
    "create in write": lambda: os.mkdir(at("write/new")),
    "fifo in write": lambda: os.mkfifo(at("write/fifo")),
    "symlink in write": lambda: os.symlink("file", at("write/symlink")),
    "remove from write": lambda: os.rmdir(at("write/new")),
    "move within write": lambda: os.rename(at("write/file"), at("write/file2")),
    "move between directories": lambda: os.rename(at("write/file2"), at("write/deeper/file")),
    "execute write": lambda: run(at("write/program")),
    "execute write_exec": lambda: run(at("write_exec/program")),
    "read one file": lambda: read("one/file"),
    "read beside one file": lambda: read("one/other"),
    "write device": lambda: write("/dev/null"),
    "ioctl unlisted device": pty_ioctl,
    "signal outside": lambda: os.kill(SPEC["outside"], signal.SIGCONT),
    "signal own child": lambda: os.kill(STATE["child"], signal.SIGCONT),
    "abstract socket outside": lambda: connect(socket.AF_UNIX, SPEC["abstract"]),
    "connect tcp": lambda: connect(socket.AF_INET, ("127.0.0.1", SPEC["port"])),
    "bind tcp": bind_tcp,
}


def attempt(what: Callable[[], object]) -> int:
    try:
        what()
    except OSError as error:
        return error.errno or -1
    except subprocess.CalledProcessError:
        return -1
    return 0


enforcement = None
SPEC["abstract"] = "\0" + SPEC["abstract"]
_master, _slave = pty.openpty()
SPEC["terminal"] = os.ttyname(_slave)
if SPEC["max_abi"] is not None:
    rules = [Rule(rule["path"], Access(rule["access"]), rule.get("optional", False)) for rule in SPEC["rules"]]
    enforcement = restrict(rules, scope=SPEC["scope"], net=SPEC["net"], max_abi=SPEC["max_abi"])
STATE["child"] = os.fork()
if STATE["child"] == 0:
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    os._exit(0)
did = {name: attempt(what) for name, what in ATTEMPTS.items()}
os.kill(STATE["child"], signal.SIGKILL)
os.waitpid(STATE["child"], 0)
sys.stdout.write(json.dumps({"enforcement": None if enforcement is None else enforcement.to_json(), "did": did}))
