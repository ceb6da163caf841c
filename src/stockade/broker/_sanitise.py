"""From a client's wish to a request that the node agent may act on: rebuilt from known fields, never filtered.

A client is the learning side: trusted to train, not to choose what its sandboxes may do. Volumes, platforms
and privileges have no field here at all; sizes can only be lowered.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from stockade.broker._errors import Code, Refusal
from stockade.broker._wire import CreateBody, ExecBody, PeerBody, Resources, Role
from stockade.policy import SandboxLimits

HOST_IMAGE = "host"
MAX_TTL_S, DEFAULT_TTL_S = 3600.0, 300.0
MAX_EXEC_S, DEFAULT_EXEC_S = 1800.0, 180.0
_RESERVED_METADATA, _RESERVED_ENV = "nemo-rl-", "NEMO_RL_"
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_ID_TEXT = re.compile(r"[ -~]{1,256}")
_MIB, _GIB = 1 << 20, 1 << 30
# Each request becomes a line of the record, and a line has an end.
_MAX_VARIABLES, _MAX_NAME_BYTES, _MAX_LABELS, _MAX_LABEL_TEXT, _MAX_PATH = 1024, 1 << 16, 64, 1024, 4095


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A checked wish for an episode."""

    role: Role
    workdir: str | None
    env: Mapping[str, str]
    metadata: Mapping[str, str]
    files: Mapping[str, bytes]
    ttl_s: float
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    cpus: float | None = None
    task_id: str | None = None
    group_id: str | None = None
    train_step: int | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """A checked command."""

    argv: tuple[str, ...]
    cwd: str | None
    env: Mapping[str, str]
    stdin: bytes
    via: str = "exec"


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """A checked wish for a command, or for two that are joined by pipes."""

    command: Command
    timeout_s: float
    peer_id: str | None = None
    peer: Command | None = field(default=None)


def check_create(body: CreateBody, caps: SandboxLimits, *, ttl_s: float) -> CreateRequest:
    """Return the request, or raise :class:`Refusal` as the API prescribes. ``ttl_s`` caps every episode's life."""
    if body.provider_options:
        raise Refusal(Code.FIELD_NOT_ALLOWED, f"provider_options: {', '.join(sorted(body.provider_options))}")
    if not body.image or any(char.isspace() for char in body.image):
        raise Refusal(Code.INVALID_REQUEST, "image must be a name without blanks")
    if body.image != HOST_IMAGE:
        raise Refusal(Code.IMAGE_NOT_APPROVED, f"image {body.image!r} is not approved; this backend offers 'host'")
    if body.entrypoint is not None:
        raise Refusal(Code.UNSUPPORTED_OPERATION, "this backend runs no entrypoint; use exec")
    asked = DEFAULT_TTL_S if body.ttl_s is None else body.ttl_s
    for name, value in (("ttl_s", asked), ("ready_timeout_s", body.ready_timeout_s or 1.0)):
        if not value > 0:
            raise Refusal(Code.INVALID_REQUEST, f"{name} must be above 0")
    ext = body.ext
    for name, text in (("task_id", ext.task_id), ("group_id", ext.group_id)):
        if text is not None and not _ID_TEXT.fullmatch(text):
            raise Refusal(Code.INVALID_REQUEST, f"ext.{name} must be 1 to 256 printable ASCII characters")
    memory, disk = _resources(body.resources, caps)
    return CreateRequest(
        role=ext.role,
        workdir=None if body.workdir is None else check_path(body.workdir, "workdir"),
        env=check_env(body.env),
        metadata=_metadata(body.metadata),
        files={check_path(path, "files_b64"): decode(text, path) for path, text in body.files_b64.items()},
        ttl_s=min(asked if body.ttl_s is not None else ttl_s, ttl_s, MAX_TTL_S),
        memory_bytes=memory,
        disk_bytes=disk,
        cpus=body.resources.cpu,
        task_id=ext.task_id,
        group_id=ext.group_id,
        train_step=ext.train_step,
        attempt=ext.attempt,
    )


def _resources(asked: Resources, caps: SandboxLimits) -> tuple[int | None, int | None]:
    memory = None if asked.memory_mib is None else asked.memory_mib * _MIB
    disk = None if asked.disk_gib is None else int(max(-1.0, min(asked.disk_gib, float(_GIB))) * _GIB)
    table = (
        ("cpu", asked.cpu, caps.cpus),
        ("memory_mib", memory, caps.memory),
        ("disk_gib", disk, caps.disk),
        ("gpu", asked.gpu or None, 0),
    )
    for name, value, cap in table:
        if value is not None and not value > 0:
            raise Refusal(Code.INVALID_REQUEST, f"resources.{name} must be above 0")
        if value is not None and value > cap:
            raise Refusal(Code.QUOTA_EXCEEDED, f"resources.{name} is above what the policy allows", status=400)
    if asked.gpu_type is not None:
        raise Refusal(Code.QUOTA_EXCEEDED, "resources.gpu_type: this backend offers no GPU", status=400)
    return memory, disk


def _metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    if len(metadata) > _MAX_LABELS or any(len(text) > _MAX_LABEL_TEXT for text in metadata.values()):
        raise Refusal(Code.INVALID_REQUEST, f"metadata: at most {_MAX_LABELS} labels of {_MAX_LABEL_TEXT} characters")
    for name in metadata:
        if name.startswith(_RESERVED_METADATA):
            raise Refusal(Code.FIELD_NOT_ALLOWED, f"metadata: {name!r} is reserved")
        if not _LABEL.fullmatch(name):
            raise Refusal(Code.INVALID_REQUEST, f"metadata: {name!r} is not a label key")
    return dict(metadata)


def check_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, or refuse a name or a value that a process could not have."""
    if len(env) > _MAX_VARIABLES or sum(len(name.encode()) for name in env) > _MAX_NAME_BYTES:
        limits = f"{_MAX_VARIABLES} variables, with {_MAX_NAME_BYTES} bytes of names"
        raise Refusal(Code.INVALID_REQUEST, f"env: at most {limits}")
    for name, value in env.items():
        if name.startswith(_RESERVED_ENV):
            raise Refusal(Code.FIELD_NOT_ALLOWED, f"env: {name!r} is reserved")
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise Refusal(Code.INVALID_REQUEST, f"env: {name!r} cannot be set")
    return dict(env)


def check_path(path: str, name: str) -> str:
    """Return an absolute path without NUL and ``..``."""
    pure = PurePosixPath(path)
    if len(path) > _MAX_PATH:
        raise Refusal(Code.INVALID_REQUEST, f"{name}: longer than {_MAX_PATH} characters")
    if not pure.is_absolute() or "\0" in path or ".." in pure.parts:
        raise Refusal(Code.INVALID_REQUEST, f"{name}: {path!r} is not an absolute path without '..'")
    return path


def decode(text: str, name: str) -> bytes:
    """Decode base64 strictly."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal(Code.INVALID_REQUEST, f"{name}: not base64") from error


def check_exec(body: ExecBody) -> ExecRequest:
    """Return the request, or raise :class:`Refusal`."""
    if body.user is not None and str(body.user) not in ("1000", "sandbox"):
        raise Refusal(Code.UNSUPPORTED_OPERATION, "user: a sandbox has one user, uid 1000")
    timeout_s = DEFAULT_EXEC_S if body.timeout_s is None else body.timeout_s
    if not timeout_s > 0:
        raise Refusal(Code.INVALID_REQUEST, "timeout_s must be above 0")
    ext = body.ext
    if ext.argv is None:
        if not body.command:
            raise Refusal(Code.INVALID_REQUEST, "command is empty", status=422)
        words: tuple[str, ...] = ("/bin/sh", "-c", body.command)
        via = "shell"
    else:
        words, via = tuple(ext.argv), "argv"
    command = _command(words, body.cwd, body.env, ext.stdin_b64, via)
    if ext.peer is None:
        return ExecRequest(command, min(timeout_s, MAX_EXEC_S))
    peer: PeerBody = ext.peer
    joined = _command(tuple(peer.argv), peer.cwd, peer.env, peer.stdin_b64, "peer")
    return ExecRequest(command, min(timeout_s, MAX_EXEC_S), peer.episode_id, joined)


def _command(argv: tuple[str, ...], cwd: str | None, env: Mapping[str, str], stdin_b64: str, via: str) -> Command:
    if not argv or not argv[0] or any("\0" in word for word in argv):
        raise Refusal(Code.INVALID_REQUEST, "argv must name a program, without NUL bytes")
    return Command(
        argv=argv,
        cwd=None if cwd is None else check_path(cwd, "cwd"),
        env=check_env(env),
        stdin=decode(stdin_b64, "stdin_b64"),
        via=via,
    )
