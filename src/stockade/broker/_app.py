"""The episode API as an ASGI application: routes, authentication, size limits, answers."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from stockade.broker import _archive
from stockade.broker._errors import Code, Refusal
from stockade.broker._sanitise import check_create, check_exec, check_path, decode
from stockade.broker._service import EpisodeService
from stockade.broker._wire import (
    AUTH_HEADER,
    PROTOCOL_VERSION,
    Closed,
    ClosedExt,
    CreateBody,
    Created,
    DirBody,
    DirReply,
    ExecBody,
    ExecReply,
    ExecReplyExt,
    FileBody,
    SkippedReply,
    TruncatedReply,
    UsageReply,
)
from stockade.errors import SandboxFault
from stockade.sandbox import WORKSPACE, ExecResult, ExitKind, PathRefused

MAX_REQUEST_BYTES = 32 << 20
MAX_UNPACKED_BYTES = 256 << 20

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Handler = Callable[[Request], Awaitable[Response]]


def _reply(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _refused(refusal: Refusal) -> Response:
    return _reply({"error": refusal.message, "code": refusal.code.value}, refusal.status)


async def _body(request: Request, kind: type[_T]) -> _T:
    """Read and parse a body; the size is checked on the header and again while reading, which may lie."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_REQUEST_BYTES:
        raise Refusal(Code.PAYLOAD_TOO_LARGE, f"more than {MAX_REQUEST_BYTES} bytes")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_REQUEST_BYTES:
            raise Refusal(Code.PAYLOAD_TOO_LARGE, f"more than {MAX_REQUEST_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(Code.INVALID_REQUEST, str(error), status=422) from error


async def _left(request: Request) -> None:
    """Return when the client has closed its connection; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _path_parameter(request: Request) -> str:
    path = request.query_params.get("path")
    if path is None:
        raise Refusal(Code.INVALID_REQUEST, "the query parameter path is missing", status=422)
    return check_path(path, "path")


def _error_type(kind: ExitKind) -> str | None:
    if kind in (ExitKind.EXITED, ExitKind.SIGNALED, ExitKind.NOT_STARTED):
        return None
    if kind in (ExitKind.TIMEOUT, ExitKind.WALL_LIMIT):
        return "timeout"
    if kind in (ExitKind.CPU_LIMIT, ExitKind.MEMORY_LIMIT, ExitKind.PIDS_LIMIT, ExitKind.OUTPUT_LIMIT):
        return "limit"
    return "sandbox"


def _text(data: bytes) -> tuple[str, str | None]:
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace"), base64.b64encode(data).decode("ascii")


def _spelled(path: str) -> str:
    r"""A name that is not UTF-8, which JSON cannot hold, as text: its odd bytes as ``\udcXX`` spelled out."""
    return path.encode("utf-8", "backslashreplace").decode("utf-8")


def _exec_reply(result: ExecResult, peer: ExecReply | None = None) -> ExecReply:
    stdout, stdout_b64 = _text(result.stdout)
    stderr, stderr_b64 = _text(result.stderr)
    usage = result.usage
    exit_ = result.exit
    return ExecReply(
        stdout,
        stderr,
        exit_.return_code,
        _error_type(exit_.kind),
        ExecReplyExt(
            truncated=TruncatedReply(result.stdout_truncated, result.stderr_truncated),
            usage=UsageReply(usage.wall_ns, usage.cpu_ns, usage.max_rss_bytes),
            exit=exit_.kind.value,
            evidence=exit_.evidence,
            fault=exit_.fault.value if exit_.fault else None,
            stdout_b64=stdout_b64,
            stderr_b64=stderr_b64,
            peer=peer,
        ),
    )


class _Routes:
    def __init__(self, service: EpisodeService, token: str, ttl_s: float) -> None:
        self._service = service
        self._token = token.encode()
        self._ttl_s = ttl_s

    def guard(self, handler: _Handler) -> _Handler:
        """Authenticate, and turn every failure into one of the closed codes: no other answer leaves."""

        async def guarded(request: Request) -> Response:
            try:
                given = request.headers.get(AUTH_HEADER, "").encode()
                if not hmac.compare_digest(given, self._token):
                    raise Refusal(Code.UNAUTHORIZED, f"the header {AUTH_HEADER} is missing or wrong")
                return await handler(request)
            except Refusal as refusal:
                return _refused(refusal)
            except PathRefused as error:
                return _refused(Refusal(Code.INVALID_REQUEST, error.message))
            except (FileNotFoundError, IsADirectoryError) as error:
                return _refused(Refusal(Code.INVALID_REQUEST, str(error)))
            except ClientDisconnect:
                return _refused(Refusal(Code.INVALID_REQUEST, "the client left"))
            except SandboxFault as error:
                _log.exception("sandbox fault")
                return _refused(Refusal(Code.BACKEND_ERROR, error.message))
            except Exception:  # noqa: BLE001
                # The client gets a fixed text: a message could carry a host path or a secret to the learner.
                _log.exception("unexpected failure while serving %s", request.url.path)
                return _refused(Refusal(Code.BACKEND_ERROR, "the node agent failed; its log has the details"))

        return guarded

    async def health(self, _: Request) -> Response:
        return _reply({"status": "ok", "job_id": self._service.run_id, "protocol_version": PROTOCOL_VERSION})

    async def create(self, request: Request) -> Response:
        wish = check_create(await _body(request, CreateBody), self._service.caps, ttl_s=self._ttl_s)
        owner = request.scope.get("state", {}).get("peer_pid")
        episode_id = await self._service.create(wish, owner=owner)
        if await request.is_disconnected():  # nobody learns this ID: it would live until its time is over
            await self._service.close(episode_id)
        return _reply(Created(episode_id, "running", {"workspace": WORKSPACE}), 201)

    async def status(self, request: Request) -> Response:
        return _reply({"status": self._service.status(request.path_params["id"])})

    async def close(self, request: Request) -> Response:
        exit_ = await self._service.close(request.path_params["id"])
        fault = exit_.fault.value if exit_.fault else None
        return _reply(Closed(closed=True, ext=ClosedExt(exit_.kind.value, exit_.evidence, fault)))

    async def exec(self, request: Request) -> Response:
        wish = check_exec(await _body(request, ExecBody))
        running = asyncio.ensure_future(self._service.exec(request.path_params["id"], wish))
        leaving = asyncio.ensure_future(_left(request))
        try:
            # A command whose client has gone must not go on to its time-out with nobody to read what it does.
            await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ClientDisconnect
            result, peer = running.result()
        finally:
            running.cancel()
            leaving.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)
        return _reply(_exec_reply(result, None if peer is None else _exec_reply(peer)))

    async def put_file(self, request: Request) -> Response:
        body = await _body(request, FileBody)
        data = decode(body.content_b64, "content_b64")
        await self._service.write_file(request.path_params["id"], check_path(body.path, "path"), data)
        return Response(status_code=204)

    async def get_file(self, request: Request) -> Response:
        data = await self._service.read_file(request.path_params["id"], _path_parameter(request))
        return _reply({"content_b64": base64.b64encode(data).decode("ascii")})

    async def put_dir(self, request: Request) -> Response:
        body = await _body(request, DirBody)
        archive = decode(body.archive_b64, "archive_b64")
        files = await asyncio.to_thread(_archive.unpack, archive, limit_bytes=MAX_UNPACKED_BYTES)
        await self._service.put_dir(request.path_params["id"], check_path(body.path, "path"), files)
        return Response(status_code=204)

    async def get_dir(self, request: Request) -> Response:
        found = await self._service.get_dir(request.path_params["id"], _path_parameter(request))
        archive = base64.b64encode(await asyncio.to_thread(_archive.pack, found.files)).decode("ascii")
        skipped = [SkippedReply(_spelled(item.path), item.reason) for item in found.skipped]
        return _reply(DirReply(archive, {"skipped": skipped}))


async def _unknown(request: Request, error: Exception) -> Response:
    status, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "unexpected")
    return _refused(Refusal(Code.INVALID_REQUEST, f"{request.method} {request.url.path}: {detail}", status=status))


def create_app(
    service: EpisodeService, token: str, *, ttl_s: float = 3600.0, metrics: Route | None = None
) -> Starlette:
    """Return the application; every route wants ``token`` in the header, the socket's mode notwithstanding.

    ``metrics`` is a route beside them that looks after itself (:func:`metrics_route`).
    """
    routes = _Routes(service, token, ttl_s)
    table: list[tuple[str, str, _Handler]] = [
        ("GET", "/health", routes.health),
        ("POST", "/episodes", routes.create),
        ("GET", "/episodes/{id}", routes.status),
        ("DELETE", "/episodes/{id}", routes.close),
        ("POST", "/episodes/{id}/exec", routes.exec),
        ("PUT", "/episodes/{id}/files", routes.put_file),
        ("GET", "/episodes/{id}/files", routes.get_file),
        ("PUT", "/episodes/{id}/dirs", routes.put_dir),
        ("GET", "/episodes/{id}/dirs", routes.get_dir),
    ]
    own = [Route(path, routes.guard(handler), methods=[method]) for method, path, handler in table]
    return Starlette(
        routes=own if metrics is None else [*own, metrics],
        exception_handlers={HTTPException: _unknown},
    )
