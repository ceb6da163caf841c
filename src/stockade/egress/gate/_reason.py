"""Why something was allowed, refused or ended: one closed list, and the two ways to say it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

import msgspec

from stockade.errors import StockadeError

if TYPE_CHECKING:
    from stockade.egress.gate._address import Address

DETAIL_MAX = 200
"""Most characters of a ``detail``: what the guest sent never floods a record (case 101)."""


class Reason(StrEnum):
    """Every reason that a record, a response header or a verdict may carry; nothing else exists."""

    ALLOWED = "allowed"
    # rules
    HOST_NOT_ALLOWED = "host_not_allowed"
    PORT_NOT_ALLOWED = "port_not_allowed"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    PATH_NOT_ALLOWED = "path_not_allowed"
    DENIED_BY_RULE = "denied_by_rule"
    INSPECTION_REQUIRED = "inspection_required"
    # addresses
    INTERNAL_ADDRESS = "internal_address"
    METADATA_ADDRESS = "metadata_address"
    OWN_ADDRESS = "own_address"
    DENIED_ADDRESS = "denied_address"
    MIXED_ANSWER = "mixed_answer"
    RESOLVE_FAILED = "resolve_failed"
    # TLS first flight
    SNI_MISSING = "sni_missing"
    SNI_MISMATCH = "sni_mismatch"
    ECH_NOT_ALLOWED = "ech_not_allowed"
    NOT_TLS = "not_tls"
    # grammar
    MALFORMED_REQUEST = "malformed_request"
    MALFORMED_HOST = "malformed_host"
    MALFORMED_PATH = "malformed_path"
    MALFORMED_BODY = "malformed_body"
    UNSUPPORTED_SCHEME = "unsupported_scheme"
    UNSUPPORTED_CODING = "unsupported_coding"
    HEADER_TOO_LARGE = "header_too_large"
    TOO_MANY_HEADERS = "too_many_headers"
    # budgets
    RATE_LIMITED = "rate_limited"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    BYTES_OUT_EXCEEDED = "bytes_out_exceeded"
    BYTES_IN_EXCEEDED = "bytes_in_exceeded"
    REQUEST_TOO_LARGE = "request_too_large"
    HEADER_TIMEOUT = "header_timeout"
    IDLE_TIMEOUT = "idle_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    # the world
    UPSTREAM_FAILED = "upstream_failed"
    UPSTREAM_MALFORMED = "upstream_malformed"
    RECORD_FAILED = "record_failed"
    REVOKED = "revoked"
    INTERNAL_ERROR = "internal_error"
    # ordinary ends of something that was allowed
    COMPLETED = "completed"
    CLIENT_CLOSED = "client_closed"
    UPSTREAM_CLOSED = "upstream_closed"


class Verdict(msgspec.Struct, frozen=True):
    """An answer of the gate. It has no truth value: ask ``.allowed``.

    ``rule`` names the rule that decided (``allow *.x.example:443 line 7``), if one did. ``wildcard``
    says that this rule names its hosts by a pattern (see :func:`judge_hello`). ``pinned`` is the
    fixed address of a service: dial it, resolve nothing.
    """

    allowed: bool
    reason: Reason
    rule: str | None = None
    wildcard: bool = False
    pinned: Address | None = None

    def __bool__(self) -> NoReturn:
        """Refuse: ``if verdict:`` would read a denial as consent."""
        raise TypeError("a Verdict has no truth value: use .allowed")


class Malformed(StockadeError, ValueError):
    """Bytes that nobody may interpret: answer with ``status``, record ``reason``, close.

    ``detail`` is printable ASCII of at most :data:`DETAIL_MAX` characters.
    """

    def __init__(self, reason: Reason, detail: str, *, status: int = 400) -> None:
        self.reason = reason
        self.status = status
        self.detail = safe_text(detail)
        super().__init__(f"{reason.value}: {self.detail}")


def safe_text(raw: bytes | str, *, limit: int = DETAIL_MAX) -> str:
    r"""Return ``raw`` as printable ASCII of at most ``limit`` characters (case 101).

    Everything else, and the backslash itself, becomes an escape (``\x1b``); a cut ends in ``...``.
    """
    text = raw.decode("latin-1") if isinstance(raw, bytes) else raw
    cut = text[:limit]
    if not (cut.isascii() and cut.isprintable() and "\\" not in cut):
        cut = "".join(c if " " <= c <= "~" and c != "\\" else c.encode("unicode_escape").decode("ascii") for c in cut)
    if len(cut) > limit or len(text) > limit:
        cut = cut[: max(limit - 3, 0)] + "..."[:limit]
    return cut
