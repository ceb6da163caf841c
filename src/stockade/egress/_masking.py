"""Known secrets on record: a record is read by more people than its secrets are meant for (egress case 99)."""

from __future__ import annotations

from collections.abc import Callable

from stockade.egress.gate import Scanner
from stockade.events import Value

Mask = Callable[[dict[str, Value]], None]
MASKED = "[secret]"
_TEXTS = ("url.path", "detail", "server.address", "dns.question.name", "tls.client.server_name")
"""Fields whose text is the client's, or holds some of it."""


def masking(scanner: Scanner | None) -> Mask | None:
    """Return what takes known secrets out of an event's fields, in place; None where none are known."""
    if scanner is None:
        return None

    def mask(fields: dict[str, Value]) -> None:
        for name in _TEXTS:
            text = fields.get(name)
            # The newline ends what might be an unfinished escape.
            if isinstance(text, str) and scanner.start().feed(text.encode("utf-8", "replace") + b"\n") is not None:
                fields[name] = MASKED

    return mask
