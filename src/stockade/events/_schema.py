"""The closed vocabulary of the record: producers, kinds, and the type of every field.

``stockade.event/1`` is one flat JSON object per event. A name means the same thing, with the same
type, in every kind; names follow the OpenTelemetry semantic conventions where those have one
(``process.command_args``, ``url.path``, ``server.address``, …) and are plain words where they do
not. There are no floats: RFC 8785 writes numbers the way ECMAScript does, which two programs rarely
do alike, so times are decimal strings of nanoseconds and every other quantity is an integer below
2**53.

The table is closed on purpose. A writer that invents a field would slip past every rule that reads
the record; here it is refused, and a reader that meets one has found a forgery or a newer stockade.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType, NoneType

VERSION = 1
"""The value of ``v`` on every line."""

MAX_INT = 2**53 - 1
"""Largest magnitude of an integer field: beyond it, RFC 8785 numbers lose digits."""

MAX_SEVERITY = 6
"""Severity runs from 0 to this (OCSF ``severity_id``)."""

Value = str | int | bool | list[str] | None
"""What a field of an event may hold."""

Event = dict[str, Value]
"""One event, as written and as read back."""


class Producer(StrEnum):
    """Who wrote a chain. Each (rollout, producer) pair is one file with one writer."""

    BROKER = "broker"
    EGRESS = "egress"
    SANDBOX = "sandbox"
    FSDIFF = "fsdiff"
    CONTROL = "control"


RUN_PRODUCER = Producer.CONTROL
"""The producer of a node's run chain, ``_run.control.jsonl``, which names every other chain of that node."""


class Trust(StrEnum):
    """Where the facts of an event come from."""

    OBSERVED = "observed"
    """Measured from outside the sandbox."""
    REPORTED = "reported"
    """Told by something inside it, which may lie."""


class EventVerdict(StrEnum):
    """What was done about it (OCSF dispositions 1, 2 and 17)."""

    ALLOWED = "allowed"
    DENIED = "denied"
    OBSERVED = "observed"


_INT: frozenset[type] = frozenset({int})
_STR: frozenset[type] = frozenset({str})
_BOOL: frozenset[type] = frozenset({bool})
_LIST: frozenset[type] = frozenset({list})
_INT_OR_NONE: frozenset[type] = frozenset({int, NoneType})
_STR_OR_NONE: frozenset[type] = frozenset({str, NoneType})

ENVELOPE: dict[str, frozenset[type]] = {
    "v": _INT,
    "id": _STR,
    "time": _STR,
    "observed": _STR,
    "run_id": _STR,
    "rollout_id": _STR,
    "seq": _INT,
    "producer": _STR,
    "trust": _STR,
    "policy_digest": _STR,
    "kind": _STR,
    "severity": _INT,
    "verdict": _STR,
    "prev": _STR,
    "hash": _STR,
}
CONTEXT: dict[str, frozenset[type]] = {
    "task_id": _STR,
    "group_id": _STR,
    "train_step": _INT,
    "attempt": _INT,
    "stage": _INT,
}
_FIELDS: dict[str, frozenset[type]] = {
    # any kind
    "rule": _STR_OR_NONE,
    "truncated": _BOOL,
    "full_bytes": _INT,
    "detail": _STR,
    # life cycle
    "manifest_digest": _STR,
    "version": _STR,
    "backend": _STR,
    "node": _STR,
    "role": _STR,
    "image": _STR,
    "network": _BOOL,
    "limits": _LIST,
    "unsafe": _LIST,
    "trainer_isolation": _STR,
    "metadata": _LIST,
    "uid": _INT,
    "exit": _STR,
    "fault": _STR_OR_NONE,
    "outcome": _STR,
    "evidence": _STR,
    "reason": _STR,
    "person": _STR_OR_NONE,
    "rollouts": _INT,
    "commands": _INT,
    "requests": _INT,
    "requests_denied": _INT,
    "duration_ns": _INT,
    "count": _INT,
    "heads": _LIST,
    "sealed_rollout_id": _STR,
    # commands
    "exec_id": _INT,
    "via": _STR,
    "peer_rollout_id": _STR,
    "process.command_args": _LIST,
    "process.executable.path": _STR,
    "process.working_directory": _STR,
    "process.pid": _INT,
    "process.parent_pid": _INT,
    "process.exit.code": _INT_OR_NONE,
    "env_names": _LIST,
    "stdin_bytes": _INT,
    "timeout_ns": _INT_OR_NONE,
    "signal": _INT_OR_NONE,
    "cpu_ns": _INT,
    "max_rss_bytes": _INT,
    "stdout_bytes": _INT,
    "stderr_bytes": _INT,
    "stdout_truncated": _BOOL,
    "stderr_truncated": _BOOL,
    "stdout_head": _STR,
    "stderr_head": _STR,
    # files
    "file.path": _STR,
    "change": _STR,
    "purpose": _STR,
    "exists": _BOOL,
    "file_type": _STR,
    "files": _INT,
    "size_bytes": _INT_OR_NONE,
    "sha256": _STR_OR_NONE,
    # network
    "http.request.method": _STR_OR_NONE,
    "http.response.status_code": _INT_OR_NONE,
    "server.address": _STR_OR_NONE,
    "server.port": _INT_OR_NONE,
    "url.scheme": _STR,
    "url.path": _STR_OR_NONE,
    "query_bytes": _INT,
    "query_sha256": _STR,
    "network.peer.address": _STR_OR_NONE,
    "network.peer.port": _INT_OR_NONE,
    "tls.client.server_name": _STR_OR_NONE,
    "tls_ech": _BOOL,
    "service": _STR_OR_NONE,
    "way": _STR,
    "handling": _STR,
    "dns.question.name": _STR_OR_NONE,
    "dns.question.type": _STR,
    "connection_id": _INT,
    "request_id": _STR,
    "request_headers_bytes": _INT,
    "response_headers_bytes": _INT,
    "bytes_out": _INT,
    "bytes_in": _INT,
    "dns_ns": _INT,
    "connect_ns": _INT,
    # isolation, control, exemptions
    "what": _STR,
    "component": _STR,
    "limit": _STR,
    "syscall": _STR,
    "errno": _INT,
    "source": _STR,
    "scope": _STR,
    "target": _STR,
    "latency_ns": _INT,
    "waives": _STR,
    "expires": _STR,
    "values": _LIST,
    "stream": _STR,
    "lost": _INT_OR_NONE,
    "expected_seq": _INT,
    "found_seq": _INT,
}

_ANY_KIND = "rule truncated full_bytes detail"
_REQUEST = (
    "url.scheme query_bytes query_sha256 network.peer.address network.peer.port tls.client.server_name "
    "tls_ech service way handling source connection_id request_headers_bytes bytes_out bytes_in dns_ns count"
)
_CONTROL = "person source scope target latency_ns rollouts evidence"

# Kind, the names it must carry, the names it may carry.
_TABLE: dict[str, tuple[str, str]] = {
    "run.start": (
        "manifest_digest",
        "version backend node limits unsafe trainer_isolation metadata role source",
    ),
    "run.end": ("reason", "rollouts commands requests requests_denied duration_ns person outcome"),
    "run.sealed": ("count", "heads"),
    "rollout.start": (
        "backend role",
        "image network limits unsafe metadata uid node process.working_directory files process.pid source",
    ),
    "rollout.end": (
        "exit",
        "reason evidence fault outcome commands requests requests_denied duration_ns cpu_ns max_rss_bytes "
        "bytes_out bytes_in files signal process.exit.code",
    ),
    "rollout.sealed": (
        "count",
        "heads sealed_rollout_id bytes_out bytes_in requests requests_denied",
    ),
    "process.exec": (
        "process.command_args",
        "process.executable.path process.working_directory process.pid process.parent_pid exec_id via "
        "env_names stdin_bytes timeout_ns peer_rollout_id",
    ),
    "process.exit": (
        "exit",
        "process.exit.code signal exec_id process.pid duration_ns cpu_ns max_rss_bytes stdout_bytes "
        "stderr_bytes stdout_truncated stderr_truncated stdout_head stderr_head evidence fault",
    ),
    "file.read": ("file.path", "size_bytes sha256 exists purpose file_type files reason"),
    "file.write": ("file.path", "size_bytes sha256 exists purpose file_type files reason"),
    "file.changed": ("file.path change", "size_bytes sha256 file_type reason"),
    "net.request": (
        "http.request.method server.address server.port url.path reason",
        _REQUEST,
    ),
    "net.connect": ("server.address server.port reason", _REQUEST),
    "net.dns": ("dns.question.name reason", "dns.question.type network.peer.address count"),
    "net.end": (
        "reason",
        "request_id connection_id server.address server.port network.peer.address http.response.status_code "
        "tls.client.server_name bytes_out bytes_in response_headers_bytes duration_ns dns_ns connect_ns",
    ),
    "sandbox.violation": (
        "what",
        "evidence limit syscall errno file.path process.pid component exec_id reason",
    ),
    "sandbox.crash": ("what", "evidence component signal process.pid reason"),
    "control.stop": ("reason", _CONTROL),
    "control.freeze": ("reason", _CONTROL),
    "control.kill": ("reason", _CONTROL),
    "stage.waiver": ("waives person reason expires", "source"),
    "monitor.gap": ("reason", "stream lost expected_seq found_seq component"),
    "operator.exemption": ("what", "values source reason person expires"),
}

ENUMS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "producer": frozenset(item.value for item in Producer),
        "trust": frozenset(item.value for item in Trust),
        "verdict": frozenset(item.value for item in EventVerdict),
        "change": frozenset({"added", "modified", "removed"}),
    }
)
"""Fields whose text comes from a closed list."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What one kind of event must and may carry beside the envelope.

    Both map field names to Python types.
    """

    required: Mapping[str, frozenset[type]]
    optional: Mapping[str, frozenset[type]]


def _kind(required: str, optional: str) -> Kind:
    return Kind(
        MappingProxyType({name: _FIELDS[name] for name in required.split()}),
        MappingProxyType({name: _FIELDS[name] for name in f"{optional} {_ANY_KIND}".split()}),
    )


SCHEMA: Mapping[str, Kind] = MappingProxyType({name: _kind(*row) for name, row in _TABLE.items()})
"""Every kind with the types of its own fields."""

KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {name: frozenset(kind.required) for name, kind in SCHEMA.items()}
)
"""Every kind with the names of the fields it must carry."""
