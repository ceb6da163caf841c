"""The messages of the episode API, protocol version 2, as closed types.

Field names, routes and codes are those of the platform's broker, so an unchanged client works; what stockade
adds lies under ``ext``, in requests and in answers. Unknown fields are refused everywhere. None of these types
has a field for a finding, a verdict or a review: the learning side cannot be told what the monitor thinks.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

PROTOCOL_VERSION = "2"
AUTH_HEADER = "OPENSANDBOX-EPISODE-BROKER-AUTH"

Role = Literal["rollout", "grading"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # what the record's JSON holds exactly


class Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Base of all requests."""


class Resources(Strict, frozen=True):
    """What a client asks for; refused above the policy's limits, never granted beyond them."""

    cpu: float | None = None
    memory_mib: int | None = None
    disk_gib: float | None = None
    gpu: int | None = None
    gpu_type: str | None = None


class CreateExt(Strict, frozen=True):
    """Whose attempt this is: it goes to the record of the episode, on every line."""

    role: Role = "rollout"
    task_id: str | None = None
    group_id: str | None = None
    train_step: Count | None = None
    attempt: Count | None = None


class CreateBody(Strict, frozen=True):
    """``POST /episodes``; times in seconds."""

    image: str
    ttl_s: float | None = None
    ready_timeout_s: float | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    metadata: dict[str, str] = {}
    resources: Resources = Resources()
    entrypoint: list[str] | None = None
    files_b64: dict[str, str] = {}
    provider_options: dict[str, msgspec.Raw] = {}
    ext: CreateExt = CreateExt()


class PeerBody(Strict, frozen=True):
    """The other command of a pair, in another grading episode (see docs/adr/0003)."""

    episode_id: str
    argv: list[str]
    cwd: str | None = None
    env: dict[str, str] = {}
    stdin_b64: str = ""


class ExecExt(Strict, frozen=True):
    """``argv`` replaces ``command`` and its shell."""

    argv: list[str] | None = None
    stdin_b64: str = ""
    peer: PeerBody | None = None


class ExecBody(Strict, frozen=True):
    """``POST /episodes/{id}/exec``."""

    command: str = ""
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | int | None = None
    timeout_s: float | None = None
    ext: ExecExt = ExecExt()


class FileBody(Strict, frozen=True):
    """``PUT /episodes/{id}/files``."""

    path: str
    content_b64: str


class DirBody(Strict, frozen=True):
    """``PUT /episodes/{id}/dirs``: a gzipped tar whose members are relative to ``path``."""

    path: str
    archive_b64: str


class UsageReply(msgspec.Struct, frozen=True):
    """What a command used."""

    wall_ns: int
    cpu_ns: int
    max_rss_bytes: int


class TruncatedReply(msgspec.Struct, frozen=True):
    """Which stream was cut."""

    stdout: bool
    stderr: bool


class ExecReplyExt(msgspec.Struct, frozen=True, omit_defaults=True):
    """``exit`` is an exit kind; ``fault`` is null, candidate, infrastructure or stopped."""

    truncated: TruncatedReply
    usage: UsageReply
    exit: str
    evidence: str = ""
    fault: str | None = None
    stdout_b64: str | None = None
    stderr_b64: str | None = None
    peer: ExecReply | None = None


class ExecReply(msgspec.Struct, frozen=True):
    """The answer to an exec; bytes that are no UTF-8 are replaced here and whole under ``ext``."""

    stdout: str
    stderr: str
    return_code: int
    error_type: str | None
    ext: ExecReplyExt


class Created(msgspec.Struct, frozen=True):
    """The answer to a create."""

    episode_id: str
    status: str
    ext: dict[str, str]


class ClosedExt(msgspec.Struct, frozen=True):
    """How the episode had ended before it was closed."""

    exit: str
    evidence: str
    fault: str | None


class Closed(msgspec.Struct, frozen=True):
    """The answer to a delete."""

    closed: bool
    ext: ClosedExt


class SkippedReply(msgspec.Struct, frozen=True):
    """A name that was not collected."""

    path: str
    reason: str


class DirReply(msgspec.Struct, frozen=True):
    """A directory as a gzipped tar of its regular files."""

    archive_b64: str
    ext: dict[str, list[SkippedReply]]
