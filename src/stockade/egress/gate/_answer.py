"""The proxy's own answers: small, canonical, and never a 407 (case 104)."""

from __future__ import annotations

from typing import Final

from stockade.egress.gate._reason import Reason, safe_text

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Sent when ``expect_continue`` and the request was allowed and recorded."""

ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
"""Sent for an allowed and dialled CONNECT."""

TLS_ACCESS_DENIED: Final = b"\x15\x03\x03\x00\x02\x02\x31"
"""A fatal ``access_denied`` alert (RFC 8446 section 6.2) in a record of its own: all that a TLS client understands
before its handshake."""

_PHRASES: Final = {
    400: "Bad Request",
    403: "Forbidden",
    408: "Request Timeout",
    413: "Content Too Large",
    414: "URI Too Long",
    417: "Expectation Failed",
    421: "Misdirected Request",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
# What is not listed is a refusal: 403.
_STATUS: Final = {
    Reason.MALFORMED_REQUEST: 400,
    Reason.MALFORMED_HOST: 400,
    Reason.MALFORMED_PATH: 400,
    Reason.MALFORMED_BODY: 400,
    Reason.UNSUPPORTED_SCHEME: 400,
    Reason.UNSUPPORTED_CODING: 501,
    Reason.UNSUPPORTED_COMMAND: 501,
    Reason.HOST_MISMATCH: 421,
    Reason.QUERY_TOO_LARGE: 414,
    Reason.HEADER_TOO_LARGE: 431,
    Reason.TOO_MANY_HEADERS: 431,
    Reason.HEADER_TIMEOUT: 408,
    Reason.IDLE_TIMEOUT: 504,
    Reason.TOTAL_TIMEOUT: 504,
    Reason.RATE_LIMITED: 429,
    Reason.TOO_MANY_CONNECTIONS: 429,
    Reason.REQUEST_TOO_LARGE: 413,
    Reason.RESOLVE_FAILED: 502,
    Reason.UPSTREAM_FAILED: 502,
    Reason.UPSTREAM_MALFORMED: 502,
    Reason.UPSTREAM_CLOSED: 502,
    Reason.UPSTREAM_TLS: 502,
    Reason.NOT_RECORDED: 504,
    Reason.STORE_FULL: 503,
    Reason.STORE_FAILED: 503,
    Reason.RECORD_FAILED: 503,
    Reason.INTERNAL_ERROR: 500,
}
_BYTES_SPENT: Final = (Reason.BYTES_OUT_EXCEEDED, Reason.BYTES_IN_EXCEEDED)
_RETRY_DEFAULT_S: Final = 60


def status_of(reason: Reason) -> int:
    """Return the HTTP status that tells a client ``reason``; 403 unless it is no refusal by rule."""
    if reason in _BYTES_SPENT:  # spent for good: a Retry-After would be a lie, so no 429
        return 403
    return _STATUS.get(reason, 403)


def error_response(
    status: int,
    reason: Reason,
    detail: str = "",
    *,
    retry_after_s: int | None = None,
    close: bool = True,
    body: bool = True,
) -> bytes:
    """Return a small complete answer with ``X-Stockade-Reason`` and a text body.

    429 always has Retry-After. ``body=False`` leaves the body out (for HEAD). ``status`` is one of 400, 403, 408,
    413, 414, 417, 421, 429, 431, 500-504; anything else is a ValueError, so 407 cannot be sent.
    """
    if status not in _PHRASES:
        raise ValueError(f"{status} is not a status of this proxy")
    text = f"stockade: {reason.value}: {safe_text(detail)}\n" if detail else f"stockade: {reason.value}\n"
    lines = [
        f"HTTP/1.1 {status} {_PHRASES[status]}",
        "Content-Type: text/plain; charset=us-ascii",
        f"Content-Length: {len(text)}",
        f"X-Stockade-Reason: {reason.value}",
        "Cache-Control: no-store",
    ]
    if status == 429:
        lines.append(f"Retry-After: {max(1, retry_after_s or _RETRY_DEFAULT_S)}")
    if close:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n" + (text if body else "")).encode("ascii")
