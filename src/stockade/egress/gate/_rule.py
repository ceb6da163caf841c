"""Rules as plain values: what crosses from the agent to the worker, before it is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.egress.gate._budget import RuleLimits

if TYPE_CHECKING:
    from stockade.egress.gate._address import Address


class Mode(StrEnum):
    """Where answers come from: the internet (kept or not), the store alone, or nowhere."""

    LIVE = "live"
    RECORD = "record"
    REPLAY = "replay"
    OFF = "off"


Pairs = tuple[tuple[str, str], ...]
RunLimits = RuleLimits
"""What all rollouts of a run may use together is said in the same words."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A host rule. None means any: methods, paths, query, and (deny rules only) ports.

    ``query`` are parameters that a request must have (deny rules: may have been read to have). ``tls``: ``inspect``
    looks inside every tunnel, ``opaque`` inside none, ``auto`` where the rule says something that only a look inside
    can hold. ``tcp`` lets any bytes through and no parsed request. ``ech`` ``""`` means ``log`` for an exact host and
    ``deny`` for a wildcard (case 76). ``credential`` names one of ``Rules.credentials``. ``query_bytes`` is the longest
    query (None: that of ``Limits``). ``source`` says where a rule came from that is not the policy's own. Deny rules
    have a host, methods, paths, ports, query, line and source only.
    """

    host: str
    methods: tuple[str, ...] | None
    paths: tuple[str, ...] | None
    ports: tuple[int, ...] | None
    line: int
    source: str = ""
    query: Pairs | None = None
    tls: Literal["auto", "opaque", "inspect"] = "auto"
    tcp: bool = False
    read_only: bool = False
    websocket: bool = False
    ech: Literal["", "allow", "log", "deny"] = ""
    credential: str | None = None
    strip_credentials: bool = False
    store: bool = False
    encoded_slash: bool = False
    query_bytes: int | None = None
    limits: RuleLimits | None = None


@dataclass(frozen=True, slots=True)
class ServiceRule:
    """An internal endpoint: reached as ``http://<name>.stockade.internal:<port>``, dialled at ``address:port``."""

    name: str
    address: Address
    port: int
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    line: int


class Credential(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A header that is added to the requests of rules that name it; the sandbox never sees ``value``."""

    name: str
    header: str
    value: str

    @property
    def field(self) -> tuple[bytes, bytes]:
        """The header line's two parts, for :func:`render_request_head`."""
        return self.header.encode("ascii"), self.value.encode("latin-1")

    def __repr__(self) -> str:
        """Leave the value out: a repr ends up in logs."""
        return f"Credential(name={self.name!r}, header={self.header!r})"


class Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that must never leave a sandbox, whatever the rules say (see :class:`Scanner`)."""

    name: str
    value: str

    def __repr__(self) -> str:
        """Leave the value out: a repr ends up in logs."""
        return f"Secret(name={self.name!r})"


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_VALUE = re.compile(r"[!-~\x80-\xff](?:[ -~\x80-\xff]{0,8190}[!-~\x80-\xff])?")
_NOT_ADDED = re.compile(
    r"host|content-length|transfer-encoding|connection|keep-alive|te|trailer|upgrade|expect|via|forwarded"
    r"|(?:proxy|x-forwarded|x-stockade|sec)-.*",
    re.IGNORECASE,
)


def check_credentials(rules: Iterable[Rule], credentials: Iterable[Credential]) -> None:
    """Raise ValueError unless each credential is one header line, and each that rules name is there; no text shows a value."""
    names: set[str] = set()
    for one in credentials:
        if one.name in names:
            raise ValueError(f"the credential {one.name!r} is given twice")
        names.add(one.name)
        if not _TOKEN.fullmatch(one.header) or _NOT_ADDED.fullmatch(one.header):
            raise ValueError(f"the credential {one.name!r} has no header that may be added")
        if not _VALUE.fullmatch(one.value):
            raise ValueError(f"the value of the credential {one.name!r} is no header value")
    for rule in rules:
        if rule.credential is not None and rule.credential not in names:
            raise ValueError(f"the rule for {rule.host} names the credential {rule.credential!r}, which is not given")
