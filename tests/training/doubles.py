"""Doubles of the broker's client: one that plays scripts, one that runs programs through the local daemon."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stockade.client import ClosedEpisode, ExecReply, UsageReply
from stockade.errors import BrokerError

Fields = dict[str, Any]


def reply(
    *,
    fault: str | None = None,
    exit_kind: str = "exited",
    stdout: bytes = b"",
    code: int = 0,
    peer: ExecReply | None = None,
) -> ExecReply:
    return ExecReply(
        stdout=stdout,
        stderr=b"",
        return_code=code,
        error_type=None,
        exit=exit_kind,
        fault=fault,
        evidence="",
        truncated_stdout=False,
        truncated_stderr=False,
        usage=UsageReply(),
        peer=peer,
    )


@dataclass
class Script:
    """What a scripted episode does, by stage. An exception is raised; anything else is the answer."""

    create: Exception | None = None
    exec: ExecReply | Exception = field(default_factory=reply)
    files: Mapping[str, bytes] | None = None
    """Left in the workspace, by path; ``None``: what was put there."""
    close: ClosedEpisode | Exception = field(default_factory=lambda: ClosedEpisode("exited", "", None))


class ScriptedEpisode:
    def __init__(self, client: ScriptedClient, script: Script, fields: Fields) -> None:
        self.id = f"ep_{len(client.created)}"
        self._client = client
        self._script = script
        self._fields = fields

    async def exec(self, argv: Sequence[str], **_: object) -> ExecReply:
        await asyncio.sleep(0)
        return _answer(self._script.exec)

    async def read_file(self, path: str) -> bytes:
        files = self._fields["files"] if self._script.files is None else self._script.files
        if path not in files:
            raise BrokerError("invalid_request", 400, f"{path}: no regular file")
        return files[path]

    async def close(self) -> ClosedEpisode:
        self._client.open -= 1
        return _answer(self._script.close)


def _answer(value):
    if isinstance(value, Exception):
        raise value
    return value


@dataclass
class ScriptedClient:
    """Plays one script per episode, chosen from the fields of ``create``. One client serves every batch of a test."""

    choose: Callable[[Fields], Script] = lambda _fields: Script()
    created: list[Fields] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def create(self, **fields: Any) -> ScriptedEpisode:
        self.created.append(fields)
        script = self.choose(fields)
        await asyncio.sleep(0)
        if script.create is not None:
            raise script.create
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        return ScriptedEpisode(self, script, fields)

    def count(self, role: str) -> int:
        return sum(fields["role"] == role for fields in self.created)


@dataclass
class LocalClient:
    """Runs every program for real through the daemon at ``path``; ``fault`` injects faults by the fields of create."""

    path: str
    fault: Callable[[Fields], str | None] = lambda _fields: None
    counts: Counter[str] = field(default_factory=Counter)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def create(self, **fields: Any) -> LocalEpisode:
        self.counts[str(fields["role"])] += 1
        return LocalEpisode(self, fields)

    async def ask(self, sides: list[dict], timeout_s: float) -> list[dict]:
        reader, writer = await asyncio.open_unix_connection(self.path, limit=1 << 22)
        writer.write(json.dumps({"sides": sides, "timeout_s": timeout_s}).encode() + b"\n")
        answer = json.loads(await reader.readline())
        writer.close()
        return answer["sides"]


class LocalEpisode:
    def __init__(self, client: LocalClient, fields: Fields) -> None:
        self.id = f"ep_{client.counts.total():022d}"
        self._client = client
        self._fields = fields
        self.files: dict[str, bytes] = dict(fields["files"] or {})

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float = 10.0,
        peer: Any = None,
    ) -> ExecReply:
        sides = [self.side(argv, stdin)]
        if peer is not None:
            sides.append(peer.episode.side(peer.argv, peer.stdin))
        answers = await self._client.ask(sides, timeout_s)
        self.files = {path: base64.b64decode(data) for path, data in answers[0]["files"].items()}
        replies = [reply(stdout=base64.b64decode(one["stdout"]), code=one["code"]) for one in answers]
        fault = self._client.fault(self._fields)
        return reply(
            fault=fault,
            exit_kind="stopped" if fault == "stopped" else "exited",
            stdout=replies[0].stdout,
            code=replies[0].return_code,
            peer=replies[1] if peer else None,
        )

    def side(self, argv: Sequence[str], stdin: bytes) -> dict:
        encoded = {path: base64.b64encode(data).decode() for path, data in self.files.items()}
        return {"files": encoded, "argv": list(argv), "stdin": base64.b64encode(stdin).decode()}

    async def read_file(self, path: str) -> bytes:
        if path not in self.files:
            raise BrokerError("invalid_request", 400, f"{path}: no regular file")
        return self.files[path]

    async def close(self) -> ClosedEpisode:
        return ClosedEpisode("exited", "", None)
