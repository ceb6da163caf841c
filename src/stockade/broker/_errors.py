"""The closed list of refusals, each with its status; the body is always ``{"error": text, "code": code}``."""

from __future__ import annotations

from enum import StrEnum

from stockade.errors import StockadeError


class Code(StrEnum):
    """Codes of the episode API."""

    UNAUTHORIZED = "unauthorized"
    INVALID_REQUEST = "invalid_request"
    FIELD_NOT_ALLOWED = "field_not_allowed"
    IMAGE_NOT_APPROVED = "image_not_approved"
    EPISODE_NOT_FOUND = "episode_not_found"
    QUOTA_EXCEEDED = "quota_exceeded"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED_OPERATION = "unsupported_operation"
    BACKEND_ERROR = "backend_error"
    SHUTTING_DOWN = "shutting_down"


_STATUS = {
    Code.UNAUTHORIZED: 401,
    Code.INVALID_REQUEST: 400,
    Code.FIELD_NOT_ALLOWED: 400,
    Code.IMAGE_NOT_APPROVED: 403,
    Code.EPISODE_NOT_FOUND: 404,
    Code.QUOTA_EXCEEDED: 429,
    Code.PAYLOAD_TOO_LARGE: 413,
    Code.UNSUPPORTED_OPERATION: 501,
    Code.BACKEND_ERROR: 502,
    Code.SHUTTING_DOWN: 503,
}


class Refusal(StockadeError):
    """An answer other than success. ``status`` differs from the code's own only where the API says so."""

    def __init__(self, code: Code, text: str, *, status: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.status = status or _STATUS[code]
