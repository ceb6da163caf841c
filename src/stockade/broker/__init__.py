"""The door between custody and learning: the episode API over HTTP."""

from __future__ import annotations

from stockade.broker._app import MAX_REQUEST_BYTES, MAX_UNPACKED_BYTES, create_app
from stockade.broker._errors import Code, Refusal
from stockade.broker._metrics import METRICS_PATH, metrics_app, metrics_route
from stockade.broker._sanitise import Command, CreateRequest, ExecRequest
from stockade.broker._server import bind, check_socket_path, serving
from stockade.broker._service import EpisodeService
from stockade.broker._wire import AUTH_HEADER, PROTOCOL_VERSION

__all__ = [
    "AUTH_HEADER",
    "MAX_REQUEST_BYTES",
    "MAX_UNPACKED_BYTES",
    "METRICS_PATH",
    "PROTOCOL_VERSION",
    "Code",
    "Command",
    "CreateRequest",
    "EpisodeService",
    "ExecRequest",
    "Refusal",
    "bind",
    "check_socket_path",
    "create_app",
    "metrics_app",
    "metrics_route",
    "serving",
]
