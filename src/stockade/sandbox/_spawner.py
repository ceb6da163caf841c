"""The spawner: a process small enough to be forked once per sandbox.

The node agent serves HTTP, runs threads and holds megabytes; forking *it* would copy its page tables and
whatever lock a thread held. So it starts this process first, which imports the standard library only, stays
single-threaded, and does nothing but fork holders (:mod:`stockade.sandbox._holder`) and reap them.

Wire: one SOCK_SEQPACKET socket. A request is a JSON object (the fields of ``Plan``) with seven or eight
descriptors (``HolderFds``); the child answers on its own report socket. The spawner itself only says
``{"exited": pid, "status": wait-status}``. If the agent dies the kernel kills the spawner, and then, through
bubblewrap's ``--die-with-parent``, every sandbox.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from stockade.sandbox import _etc
from stockade.sandbox import _syscalls as sys_
from stockade.sandbox._holder import Files, HolderFds, Plan, run

REQUEST_BYTES = 1 << 17
_GUEST = Path(__file__).with_name("_guest.py")


def main() -> None:
    """Serve the socket on descriptor 3 until it closes (``argv``: the agent's pid)."""
    sys_.die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's business: it must seal the record
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    agent = socket.socket(fileno=3)
    agent.set_inheritable(False)
    files = Files(_etc.content(), _GUEST.read_bytes())
    gc.disable()
    gc.freeze()  # the collector would touch, and so copy, every page shared with the children
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    with contextlib.suppress(ConnectionError):  # the agent closed its end with answers unread
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if wake_read in ready:
                _drain(wake_read)
                _reap(agent)
            if agent.fileno() in ready and not _serve(agent, files):
                return


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 512):
            pass
    except BlockingIOError:
        return


def _reap(agent: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        agent.send(json.dumps({"exited": pid, "status": status}).encode())


def _serve(agent: socket.socket, files: Files) -> bool:
    expected = len(HolderFds._fields)
    data, raw, flags, _ = socket.recv_fds(agent, REQUEST_BYTES, expected)
    if not data:
        return False
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(raw) not in (expected - 1, expected):
        raise OSError(errno.EPROTO, "malformed request")
    fds = HolderFds(*raw)
    try:
        child = os.fork()
    except OSError as error:  # the node's limit on processes: this start fails, not every sandbox that lives
        _decline(raw, error)
        return True
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        agent.close()
        run(_plan(json.loads(data)), fds, files)
    for fd in raw:
        os.close(fd)
    return True


def _decline(fds: list[int], error: OSError) -> None:
    with socket.socket(fileno=fds[0]) as report, contextlib.suppress(OSError):
        report.send(json.dumps({"error": f"fork: {error}"}).encode())
    for fd in fds[1:]:
        os.close(fd)


def _plan(request: dict[str, Any]) -> Plan:
    request["listeners"] = tuple((address, port) for address, port in request["listeners"])
    request["mounts"] = tuple((source, target) for source, target in request["mounts"])
    request["trust"] = tuple((name, size) for name, size in request["trust"])
    for name in ("cpus", "command", "transparent_ports"):
        request[name] = tuple(request[name])
    return Plan(**request)
