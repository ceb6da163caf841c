"""``GET /metrics``: counts for a Prometheus server, with a token of their own or on a socket of their own."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from stockade.broker._wire import AUTH_HEADER
from stockade.errors import NodeError

Render = Callable[[], Awaitable[bytes]]
METRICS_PATH = "/metrics"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger(__name__)


def metrics_route(render: Render, token: str | None) -> Route:
    """Return the route; ``token`` None is for sockets where everybody who gets there may read."""

    async def answer(request: Request) -> Response:
        given = request.headers.get(AUTH_HEADER, "").encode()
        if token is not None and not hmac.compare_digest(given, token.encode()):
            return PlainTextResponse(f"the header {AUTH_HEADER} is missing or wrong\n", 401)
        try:
            data = await render()
        except NodeError as error:
            return PlainTextResponse(f"{error.message} ({error.hint})\n", 503)
        except Exception:  # noqa: BLE001 - whoever asks gets a fixed text; the log has the rest
            _log.exception("unexpected failure while counting")
            return PlainTextResponse("the agent failed; its log has the details\n", 500)
        return Response(data, media_type=METRICS_TYPE)

    return Route(METRICS_PATH, answer, methods=["GET"])


def metrics_app(render: Render, *, token: str | None = None) -> Starlette:
    """Return an application that has this one route."""
    return Starlette(routes=[metrics_route(render, token)])
