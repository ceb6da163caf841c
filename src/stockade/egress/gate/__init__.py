"""The gate: bytes and values in, values out. No sockets, no clock, no logging.

The shell around it does, for every request::

    end = find_head(buffer, limits)              # None: read more
    head = parse_head(bytes(buffer[:end]), limits)
    budget.take_request(now)                     # Reason: error_response(429, …)
    verdict = decide(head.request, rules)        # denied: nothing is resolved (case 42)
    …resolve, unless verdict.pinned or head.request.destination.host.address…
    verdict = judge_addresses(answers, rules)    # the checked addresses are the dialled ones
    …record…, then dial and send render_request_head(head)

and for CONNECT, after the 200: ``client_hello(buffer)`` until it is not NeedMore, then
``judge_hello(hello, host, wildcard=verdict.wildcard)`` before the first byte goes upstream.
Every parser raises only :class:`Malformed`; every judge returns a :class:`Verdict`.
Case numbers in this room are those of the bypass table in the project's documentation.
"""

from __future__ import annotations

from stockade.egress.gate._address import Address, Cidr
from stockade.egress.gate._answer import CONTINUE, ESTABLISHED, error_response, status_of
from stockade.egress.gate._budget import Budget, Meter
from stockade.egress.gate._chunked import LAST_CHUNK, ChunkedReader, render_chunk
from stockade.egress.gate._classify import AddressClass, classify, judge_addresses
from stockade.egress.gate._head import Framing, Headers, HeadLimits
from stockade.egress.gate._host import Authority, Host, parse_authority, parse_host
from stockade.egress.gate._index import Rule, ServiceRule
from stockade.egress.gate._reason import DETAIL_MAX, Malformed, Reason, Verdict, safe_text
from stockade.egress.gate._request import (
    Destination,
    Request,
    RequestHead,
    Way,
    find_head,
    parse_head,
    render_request_head,
)
from stockade.egress.gate._response import (
    ResponseHead,
    closes_after,
    find_response_head,
    parse_response_head,
    render_response_head,
)
from stockade.egress.gate._rules import Limits, Rules, decide
from stockade.egress.gate._tls import HELLO_MAX, Hello, NeedMore, NotTls, client_hello, judge_hello

__all__ = [
    "CONTINUE",
    "DETAIL_MAX",
    "ESTABLISHED",
    "HELLO_MAX",
    "LAST_CHUNK",
    "Address",
    "AddressClass",
    "Authority",
    "Budget",
    "ChunkedReader",
    "Cidr",
    "Destination",
    "Framing",
    "HeadLimits",
    "Headers",
    "Hello",
    "Host",
    "Limits",
    "Malformed",
    "Meter",
    "NeedMore",
    "NotTls",
    "Reason",
    "Request",
    "RequestHead",
    "ResponseHead",
    "Rule",
    "Rules",
    "ServiceRule",
    "Verdict",
    "Way",
    "classify",
    "client_hello",
    "closes_after",
    "decide",
    "error_response",
    "find_head",
    "find_response_head",
    "judge_addresses",
    "judge_hello",
    "parse_authority",
    "parse_head",
    "parse_host",
    "parse_response_head",
    "render_chunk",
    "render_request_head",
    "render_response_head",
    "safe_text",
    "status_of",
]
