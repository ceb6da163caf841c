"""Why something was allowed, refused or ended: one closed list, and how bytes that nobody may interpret are told."""

from __future__ import annotations

from enum import StrEnum

from stockade.errors import StockadeError

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
    QUERY_NOT_ALLOWED = "query_not_allowed"
    QUERY_TOO_LARGE = "query_too_large"
    BODY_NOT_ALLOWED = "body_not_allowed"
    UPGRADE_NOT_ALLOWED = "upgrade_not_allowed"
    FOREIGN_CREDENTIAL = "foreign_credential"
    SECRET_FOUND = "secret_found"  # noqa: S105  a reason, no secret
    EGRESS_OFF = "egress_off"
    # names
    LABEL_TOO_LONG = "label_too_long"
    TOO_MANY_NAMES = "too_many_names"
    # addresses
    INTERNAL_ADDRESS = "internal_address"
    METADATA_ADDRESS = "metadata_address"
    OWN_ADDRESS = "own_address"
    DENIED_ADDRESS = "denied_address"
    MIXED_ANSWER = "mixed_answer"
    RESOLVE_FAILED = "resolve_failed"
    # TLS
    SNI_MISSING = "sni_missing"
    SNI_MISMATCH = "sni_mismatch"
    ECH_NOT_ALLOWED = "ech_not_allowed"
    NOT_TLS = "not_tls"
    CLIENT_TLS = "client_tls"
    UPSTREAM_TLS = "upstream_tls"
    # grammar
    MALFORMED_REQUEST = "malformed_request"
    MALFORMED_HOST = "malformed_host"
    MALFORMED_PATH = "malformed_path"
    MALFORMED_BODY = "malformed_body"
    HOST_MISMATCH = "host_mismatch"
    UNSUPPORTED_COMMAND = "unsupported_command"
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
    # the store
    NOT_RECORDED = "not_recorded"
    NOT_REPLAYABLE = "not_replayable"
    STORE_FULL = "store_full"
    STORE_FAILED = "store_failed"
    # the world
    UPSTREAM_FAILED = "upstream_failed"
    UPSTREAM_MALFORMED = "upstream_malformed"
    RECORD_FAILED = "record_failed"
    REVOKED = "revoked"
    INTERNAL_ERROR = "internal_error"
    # ordinary ends of something that was allowed
    COMPLETED = "completed"
    INSPECTED = "inspected"
    CLIENT_CLOSED = "client_closed"
    UPSTREAM_CLOSED = "upstream_closed"


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
