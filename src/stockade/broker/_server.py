"""Serving the application on a UNIX socket, with the identity of the process at the other end.

The kernel says who connected (SO_PEERCRED, unix(7)); the pid goes into the request's scope, so that the node
agent can watch that very process and end what it made when it dies. A client cannot claim another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from stockade.errors import NodeError

_PATH_LIMIT = 107  # sun_path, with its final NUL


class _PeerProtocol(H11Protocol):
    """Uvicorn's HTTP protocol, plus the peer's pid in ``scope["state"]``."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        pid = None
        if sock is not None and sock.family == socket.AF_UNIX:
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid = struct.unpack("3i", raw)[0] or None
        self.app_state: dict[str, Any] = {**self.app_state, "peer_pid": pid}


def check_socket_path(path: Path) -> None:
    """Raise NodeError if no socket can have this path (unix(7))."""
    if len(os.fsencode(path)) > _PATH_LIMIT:
        raise NodeError(f"the socket path {path} is too long", hint="set STOCKADE_STATE to a short path")


def bind(path: Path) -> socket.socket:
    """Return a listening UNIX socket of mode 0600 at ``path``; a dead one there is replaced."""
    check_socket_path(path)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # mode 0600 from the first instant, not after a chmod
    try:
        sock.bind(str(path))
    finally:
        os.umask(before)
    sock.listen(512)
    sock.setblocking(False)
    return sock


@contextlib.asynccontextmanager
async def serving(app: Starlette, sock: socket.socket) -> AsyncIterator[None]:
    """Serve ``app`` on ``sock`` for as long as the block runs; requests in flight get two seconds to end."""
    config = uvicorn.Config(
        app,
        http=_PeerProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=3600,
        server_header=False,
        h11_max_incomplete_event_size=1 << 16,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]  # the agent has its own
    task = asyncio.create_task(server.serve(sockets=[sock]), name="broker")
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
