"""The gate: bytes and values in, values out. No sockets, no clock, no logging.

One canonical :class:`Request` for every way in, and one function that decides on it. The shell around it does::

    end = find_head(buffer, limits)                       # None: read more; SOCKS5: socks_greeting, socks_request
    head = parse_head(bytes(buffer[:end]), limits, origin)  # origin: what the connection is bound to already
    budget.take_request(now)                              # Reason: error_response(429, …)
    verdict = decide(head.request, rules, body=head.body) # denied: nothing is resolved (case 42)
    judge_credentials(head, verdict.grant), judge_upgrade(head, verdict.grant), rules.scanner.scan(head)
    …resolve, unless verdict.pinned or head.request.destination.host.address…
    judge_addresses(answers, rules)                       # the checked addresses are the dialled ones
    …record…, then dial and send render_request_head(head, …)

A tunnel request says by ``verdict.handling`` what becomes of it. ``OPAQUE``: ``client_hello(buffer)`` until it is not
NeedMore, then ``judge_hello(hello, host, wildcard=grant.wildcard, ech=grant.ech)`` before the first byte goes upstream.
``INSPECT``: nothing is dialled; what is inside is read as requests bound to an :class:`Origin`. ``RAW``: as it is.
Where the sandbox asks for names: ``parse_query``, ``judge_name``, then ``answer`` or ``refuse``.

Every parser raises only :class:`Malformed`; every judge returns a :class:`Verdict`.
Case numbers in this room are those of the bypass table in the project's documentation.
"""

from __future__ import annotations

from stockade.egress.gate._address import Address, Cidr
from stockade.egress.gate._answer import CONTINUE, ESTABLISHED, TLS_ACCESS_DENIED, error_response, status_of
from stockade.egress.gate._budget import BUDGET_CELLS, Account, Budget, Cells, Meter, RuleLimits
from stockade.egress.gate._chunked import LAST_CHUNK, ChunkedReader, render_chunk
from stockade.egress.gate._classify import AddressClass, classify, judge_addresses
from stockade.egress.gate._destination import Destination, Origin, Request, Way
from stockade.egress.gate._dns import (
    CLASS_IN,
    DNS_FAILED,
    DNS_MALFORMED,
    DNS_MAX,
    DNS_NO_NAME,
    DNS_REFUSED,
    DNS_UNSUPPORTED,
    TYPE_A,
    TYPE_AAAA,
    Query,
    answer,
    parse_query,
    refuse,
)
from stockade.egress.gate._head import Framing, Headers, HeadLimits
from stockade.egress.gate._host import Authority, Host, parse_authority, parse_host
from stockade.egress.gate._judge import judge_credentials, judge_upgrade
from stockade.egress.gate._reason import DETAIL_MAX, Malformed, Reason, safe_text
from stockade.egress.gate._render import render_request_head
from stockade.egress.gate._request import RequestHead, find_head, parse_head
from stockade.egress.gate._response import (
    ResponseHead,
    closes_after,
    find_response_head,
    parse_response_head,
    render_response_head,
)
from stockade.egress.gate._rule import Credential, Mode, Rule, RunLimits, Secret, ServiceRule
from stockade.egress.gate._rules import Limits, Rules, decide, judge_name
from stockade.egress.gate._secrets import SECRET_MIN, Scan, Scanner
from stockade.egress.gate._socks import (
    SOCKS_METHOD_REFUSED,
    SOCKS_METHOD_REPLY,
    socks_greeting,
    socks_reply,
    socks_request,
)
from stockade.egress.gate._tls import HELLO_MAX, Hello, NeedMore, NotTls, client_hello, judge_hello
from stockade.egress.gate._verdict import Grant, Handling, Verdict

__all__ = [
    "BUDGET_CELLS",
    "CLASS_IN",
    "CONTINUE",
    "DETAIL_MAX",
    "DNS_FAILED",
    "DNS_MALFORMED",
    "DNS_MAX",
    "DNS_NO_NAME",
    "DNS_REFUSED",
    "DNS_UNSUPPORTED",
    "ESTABLISHED",
    "HELLO_MAX",
    "LAST_CHUNK",
    "SECRET_MIN",
    "SOCKS_METHOD_REFUSED",
    "SOCKS_METHOD_REPLY",
    "TLS_ACCESS_DENIED",
    "TYPE_A",
    "TYPE_AAAA",
    "Account",
    "Address",
    "AddressClass",
    "Authority",
    "Budget",
    "Cells",
    "ChunkedReader",
    "Cidr",
    "Credential",
    "Destination",
    "Framing",
    "Grant",
    "Handling",
    "HeadLimits",
    "Headers",
    "Hello",
    "Host",
    "Limits",
    "Malformed",
    "Meter",
    "Mode",
    "NeedMore",
    "NotTls",
    "Origin",
    "Query",
    "Reason",
    "Request",
    "RequestHead",
    "ResponseHead",
    "Rule",
    "RuleLimits",
    "Rules",
    "RunLimits",
    "Scan",
    "Scanner",
    "Secret",
    "ServiceRule",
    "Verdict",
    "Way",
    "answer",
    "classify",
    "client_hello",
    "closes_after",
    "decide",
    "error_response",
    "find_head",
    "find_response_head",
    "judge_addresses",
    "judge_credentials",
    "judge_hello",
    "judge_name",
    "judge_upgrade",
    "parse_authority",
    "parse_head",
    "parse_host",
    "parse_query",
    "parse_response_head",
    "refuse",
    "render_chunk",
    "render_request_head",
    "render_response_head",
    "safe_text",
    "socks_greeting",
    "socks_reply",
    "socks_request",
    "status_of",
]
