"""The broker's HTTP client: episodes, commands and files, all async, over the agent's UNIX socket."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import httpx

from stockade.errors import AgentGone, BrokerError

AUTH_HEADER = "OPENSANDBOX-EPISODE-BROKER-AUTH"
SOCKET_VARIABLE = "STOCKADE_BROKER_SOCKET"
TOKEN_VARIABLE = "STOCKADE_BROKER_TOKEN"  # noqa: S105 - the name of a variable
_GRACE_S = 30.0

Role = Literal["rollout", "grading"]


@dataclass(frozen=True, slots=True)
class UsageReply:
    """What a command used: nanoseconds of wall clock and CPU, bytes of memory at most."""

    wall_ns: int = 0
    cpu_ns: int = 0
    max_rss_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExecReply:
    """What came of a command. ``fault`` is None, ``candidate``, ``infrastructure`` or ``stopped``.

    It has no truth value: a ``return_code`` of 0 is what the program said of itself and proves nothing.
    """

    stdout: bytes
    stderr: bytes
    return_code: int
    error_type: str | None
    exit: str
    fault: str | None
    evidence: str
    truncated_stdout: bool
    truncated_stderr: bool
    usage: UsageReply
    peer: ExecReply | None = None

    def __bool__(self) -> NoReturn:
        raise TypeError("an ExecReply has no truth value; look at .exit and .return_code")


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A name that was not collected, and the fixed word that says why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CollectedFiles:
    """The regular files below a directory of the sandbox, by relative path."""

    files: Mapping[str, bytes]
    skipped: Sequence[SkippedFile] = ()


@dataclass(frozen=True, slots=True)
class ClosedEpisode:
    """How an episode had ended when it was closed."""

    exit: str
    evidence: str
    fault: str | None


@dataclass(frozen=True, slots=True)
class Peer:
    """The other command of a joined pair: its descriptor 3 reads what the first writes on 4, and back."""

    episode: Episode
    argv: Sequence[str]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""


class BrokerClient:
    """One connection pool to one node agent. Use as an async context manager, or call :meth:`aclose`."""

    def __init__(self, socket: str, token: str) -> None:
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None))
        # trust_env=False: a proxy variable of the trainer must not carry the token elsewhere.
        self._http = httpx.AsyncClient(
            transport=transport,
            base_url="http://broker",
            headers={AUTH_HEADER: token},
            timeout=httpx.Timeout(_GRACE_S),
            trust_env=False,
        )
        self.socket = socket

    @classmethod
    def from_environment(cls) -> BrokerClient:
        """Return a client for the agent that :data:`SOCKET_VARIABLE` and :data:`TOKEN_VARIABLE` name."""
        socket, token = os.environ.get(SOCKET_VARIABLE), os.environ.get(TOKEN_VARIABLE)
        if not socket or not token:
            missing = SOCKET_VARIABLE if not socket else TOKEN_VARIABLE
            raise AgentGone(
                f"{missing} is not set", hint="start this through stockade train, or use stockade.connect()"
            )
        return cls(socket, token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; episodes stay."""
        await self._http.aclose()

    async def request(
        self,
        method: str,
        route: str,
        body: object = None,
        *,
        timeout_s: float = _GRACE_S,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """Send one request; returns the parsed answer. Raises BrokerError, AgentGone."""
        content = None if body is None else json.dumps(body).encode()
        try:
            answer = await self._http.request(method, route, content=content, params=query, timeout=timeout_s)
        except (httpx.TransportError, OSError) as error:
            hint = "it ended, or the run was closed; start the run again"
            raise AgentGone(
                f"the node agent at {self.socket} does not answer: {str(error) or type(error).__name__}", hint=hint
            ) from error
        if answer.status_code == 204:
            return None
        try:
            parsed = answer.json()
        except ValueError as error:
            raise BrokerError("backend_error", answer.status_code, "the broker's answer is no JSON") from error
        if answer.status_code >= 400:
            code, text = str(parsed.get("code", "backend_error")), str(parsed.get("error", ""))
            raise BrokerError(code, answer.status_code, text)
        return parsed

    async def health(self) -> Mapping[str, str]:
        """Return ``{status, job_id, protocol_version}``."""
        answer: Mapping[str, str] = await self.request("GET", "/health")
        return answer

    async def create(
        self,
        *,
        role: Role = "rollout",
        task_id: str | None = None,
        group_id: str | None = None,
        train_step: int | None = None,
        attempt: int | None = None,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
        workdir: str | None = None,
        ttl_s: float | None = None,
    ) -> Episode:
        """Make an episode; ``files`` (absolute path → content) are in it before anything runs."""
        ext: dict[str, object] = {"role": role}
        named = {"task_id": task_id, "group_id": group_id, "train_step": train_step, "attempt": attempt}
        ext.update({name: value for name, value in named.items() if value is not None})
        body: dict[str, object] = {"image": "host", "env": dict(env or {}), "ext": ext}
        body["files_b64"] = {path: _encode(data) for path, data in (files or {}).items()}
        body.update({name: value for name, value in (("workdir", workdir), ("ttl_s", ttl_s)) if value is not None})
        answer = await self.request("POST", "/episodes", body, timeout_s=60.0)
        return Episode(self, answer["episode_id"])


class Episode:
    """One sandbox, by its ID. As an async context manager it is closed at the end of the block."""

    def __init__(self, client: BrokerClient, episode_id: str) -> None:
        self._client = client
        self.id = episode_id
        self.closed: ClosedEpisode | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokerError):  # the agent ends what it cannot be asked to end
            await self.close()

    async def exec(
        self,
        argv: Sequence[str] | None = None,
        *,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        peer: Peer | None = None,
    ) -> ExecReply:
        """Run ``argv``, or ``command`` by ``/bin/sh -c``, and wait for its end."""
        if (argv is None) == (command is None):
            raise ValueError("give either argv or command")
        body: dict[str, object] = {"env": dict(env or {})}
        ext: dict[str, object] = {}
        if argv is not None:
            ext["argv"] = list(argv)
        else:
            body["command"] = command
        if stdin:
            ext["stdin_b64"] = _encode(stdin)
        if peer is not None:
            ext["peer"] = {
                "episode_id": peer.episode.id,
                "argv": list(peer.argv),
                "env": dict(peer.env),
                "stdin_b64": _encode(peer.stdin),
                **({} if peer.cwd is None else {"cwd": peer.cwd}),
            }
        body.update({name: value for name, value in (("cwd", cwd), ("timeout_s", timeout_s)) if value is not None})
        body["ext"] = ext
        wait_s = (1800.0 if timeout_s is None else timeout_s) + _GRACE_S
        return _exec_reply(await self._client.request("POST", f"/episodes/{self.id}/exec", body, timeout_s=wait_s))

    async def status(self) -> str:
        """Return ``starting``, ``running``, ``stopped``, ``error`` or ``unknown``."""
        answer = await self._client.request("GET", f"/episodes/{self.id}")
        return str(answer["status"])

    async def read_file(self, path: str) -> bytes:
        """Return a regular file's content."""
        answer = await self._client.request("GET", f"/episodes/{self.id}/files", query={"path": path})
        return base64.b64decode(answer["content_b64"])

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, making its parents."""
        await self._client.request("PUT", f"/episodes/{self.id}/files", {"path": path, "content_b64": _encode(data)})

    async def put_dir(self, path: str, files: Mapping[str, bytes]) -> None:
        """Write several files below ``path``."""
        body = {"path": path, "archive_b64": _encode(_pack(files))}
        await self._client.request("PUT", f"/episodes/{self.id}/dirs", body)

    async def get_dir(self, path: str) -> CollectedFiles:
        """Collect the regular files below ``path``."""
        answer = await self._client.request("GET", f"/episodes/{self.id}/dirs", query={"path": path})
        skipped = [SkippedFile(item["path"], item["reason"]) for item in answer["ext"]["skipped"]]
        return CollectedFiles(_unpack(base64.b64decode(answer["archive_b64"])), tuple(skipped))

    async def close(self) -> ClosedEpisode:
        """End the episode and forget its files; a second call returns the first answer."""
        if self.closed is None:
            answer = await self._client.request("DELETE", f"/episodes/{self.id}")
            ext = answer["ext"]
            self.closed = ClosedEpisode(ext["exit"], ext["evidence"], ext["fault"])
        return self.closed


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _exec_reply(answer: Mapping[str, Any]) -> ExecReply:
    ext = answer["ext"]
    return ExecReply(
        stdout=_bytes(answer["stdout"], ext.get("stdout_b64")),
        stderr=_bytes(answer["stderr"], ext.get("stderr_b64")),
        return_code=answer["return_code"],
        error_type=answer["error_type"],
        exit=ext["exit"],
        fault=ext.get("fault"),
        evidence=ext.get("evidence", ""),
        truncated_stdout=ext["truncated"]["stdout"],
        truncated_stderr=ext["truncated"]["stderr"],
        usage=UsageReply(**ext["usage"]),
        peer=None if ext.get("peer") is None else _exec_reply(ext["peer"]),
    )


def _bytes(text: str, encoded: str | None) -> bytes:
    return text.encode() if encoded is None else base64.b64decode(encoded)


def _pack(files: Mapping[str, bytes]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w:") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), compresslevel=1)


def _unpack(archive: bytes) -> dict[str, bytes]:
    """Read the broker's archive into memory; nothing is unpacked to disk, and anything but a file is ignored."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            if content is not None:
                files[member.name] = content.read()
    return files
