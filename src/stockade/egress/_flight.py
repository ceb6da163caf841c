"""The first flight of a tunnel: what is judged of it, and what the record says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade.egress.gate import HELLO_MAX, Hello, NeedMore, NotTls, Verdict, client_hello, judge_hello, safe_text

if TYPE_CHECKING:
    from stockade.egress._decision import Decision

_SNI_CHARS = 253


def judge_flight(decision: Decision, buffer: bytearray) -> Verdict | None:
    """Return the verdict on the ClientHello in ``buffer``, None while it is not whole (cases 74 to 77)."""
    hello = client_hello(buffer)
    if isinstance(hello, NeedMore):
        if len(buffer) < HELLO_MAX:
            return None
        hello = NotTls("first flight too large")
    if isinstance(hello, Hello) and hello.sni:
        decision.ended["tls.client.server_name"] = safe_text(hello.sni[0], limit=_SNI_CHARS)
    if isinstance(hello, NotTls):
        decision.ended["detail"] = safe_text(hello.detail)
    elif hello.ech:
        decision.ended["detail"] = "encrypted client hello offered"
    grant = decision.grant
    return judge_hello(
        hello,
        decision.head.request.destination.host,
        wildcard=grant is None or grant.wildcard,
        ech="" if grant is None else grant.ech,
    )
