"""Request heads: parsed, decided on, written for the upstream, and read again by three parsers."""

from __future__ import annotations

from fuzz._common import LIMITS, SMALL, Message, attempt, fields, h11_request, lines_are_lines, llhttp
from stockade.egress.gate import (
    Address,
    ChunkedReader,
    Credential,
    Framing,
    Grant,
    Handling,
    HeadLimits,
    Malformed,
    Origin,
    RequestHead,
    Rule,
    Rules,
    Secret,
    ServiceRule,
    Verdict,
    Way,
    decide,
    find_head,
    judge_credentials,
    judge_name,
    judge_upgrade,
    parse_authority,
    parse_head,
    parse_host,
    render_request_head,
)

_STATUSES = frozenset({400, 417, 421, 431, 501})
_KEY = (b"X-Api-Key", b"the-operators-key")

RULES = Rules(
    allow=(
        Rule("plain.test", ("GET", "POST", "HEAD"), ("/a/**", "/b/*.whl"), (80, 8080), 1),
        Rule("open.test", None, None, (80, 443, 8443), 2),
        Rule("read.test", None, None, (80, 443), 3, read_only=True),
        Rule("*.wild.test", ("GET",), None, (80, 443), 4, query=(("service", "git-upload-pack"),)),
        Rule("key.test", ("GET", "POST"), None, (443,), 5, credential="key", strip_credentials=True),
        Rule("key.test", ("PUT",), ("/own/**",), (443,), 6),
        Rule("socket.test", ("GET",), ("/ws",), (80, 443), 7, websocket=True, encoded_slash=True, query_bytes=16),
        Rule("raw.test", None, None, (22,), 8, tcp=True),
        Rule("2600:5::5", ("GET",), None, (443,), 9),
        Rule("11.0.0.5", ("GET",), None, (80,), 10),
    ),
    deny=(
        Rule("open.test", None, ("/closed/**",), None, 20),
        Rule("no.wild.test", None, None, None, 21),
        Rule("open.test", ("DELETE",), None, None, 22),
    ),
    services=(ServiceRule("model", Address.parse("10.0.0.7"), 9000, ("POST",), ("/v1/**",), 30),),
    own_names=frozenset({"node.test"}),
    inspection=True,
    credentials=(Credential("key", "X-Api-Key", "the-operators-key"),),
    secrets=(Secret("canary", "canary-5ecret-value"),),
)
ORIGINS = (
    None,
    Origin(Way.TLS, "https", parse_host(b"open.test"), 443),
    Origin(Way.TRANSPARENT, "http", parse_host(b"plain.test"), 80),
    Origin(Way.TLS, "https", parse_host(b"open.test"), 8443),
    Origin(Way.SOCKS5, "https", parse_host(b"[2600:5::5]"), 443),
    Origin(Way.TLS, "https", parse_host(b"key.test"), 443),
    Origin(Way.CONNECT, "http", parse_host(b"a.wild.test"), 80),
    Origin(Way.TRANSPARENT, "http", parse_host(b"socket.test"), 80),
)
_BODIES = {
    Framing.NONE: b"",
    Framing.LENGTH: b"x" * 64,
    Framing.CHUNKED: b"5\r\nhello\r\n0\r\n\r\n",
}
_NEVER_SENT = frozenset(
    b"te trailer upgrade keep-alive connection expect forwarded x-rollout-id x-http-method x-http-method-override "
    b"x-method-override x-original-url x-rewrite-url http2-settings".split()
)
_NEVER_SENT_PREFIXES = (b"proxy-", b"x-forwarded-", b"x-stockade-")


def check(data: bytes) -> None:
    """Take the first byte for the connection (its origin, and small limits from 0x80 on), the rest for its bytes."""
    if not data:
        return
    origin = ORIGINS[data[0] & 7]
    limits = SMALL if data[0] & 0x80 else LIMITS
    head = _parsed(data[1:], limits, origin)
    if head is None:
        return
    request, where = head.request, head.request.destination
    assert parse_authority(f"{where.host.wire}:{where.port}".encode(), default_port=None).host == where.host
    if origin is not None:
        assert (where, request.scheme, request.tunnel) == (origin.destination, origin.scheme, False)
    verdict = decide(request, RULES, body=head.body)
    _check_verdict(head, verdict)
    judge_name(where.host, RULES)
    assert RULES.scanner is not None
    found = RULES.scanner.scan(head)
    assert (found is not None) or b"canary-5ecret-value" not in b"".join(value for _, value in head.headers)
    for grant in (verdict.grant, Grant("key", credential="key", guarded=True), Grant("ws", websocket=True)):
        if grant is not None:
            own = judge_credentials(head, grant)
            assert not (own.allowed and head.credentials and grant.guarded and not grant.strip_credentials)
            judge_upgrade(head, grant)
    if request.tunnel:
        return
    _check_written(head, origin, limits)
    _check_changed(head)
    sent = data[1 : 1 + head.size_bytes]
    _ask_oracles(sent, head, None)


def _parsed(raw: bytes, limits: HeadLimits, origin: Origin | None) -> RequestHead | None:
    """Return the head in ``raw``; None for none, and for one that is refused."""
    end = attempt(find_head, raw, limits, statuses=_STATUSES)
    cut = len(raw) // 2
    first = attempt(find_head, raw[:cut], limits, statuses=_STATUSES)
    if first is None:  # whoever looks twice sees what one look shows
        again = attempt(find_head, raw, limits, scanned=cut, statuses=_STATUSES)
        assert isinstance(again, Malformed) == isinstance(end, Malformed), (again, end)
        assert isinstance(again, Malformed) or again == end, (again, end)
    if isinstance(end, Malformed):
        return None
    head = attempt(parse_head, raw if end is None else raw[:end], limits, origin, statuses=_STATUSES)
    if isinstance(head, Malformed):
        return None
    assert end is not None, "a head without its end"
    return head


def _matches(pattern: str, host: str) -> bool:
    return host.endswith(pattern[1:]) and host != pattern[2:] if pattern.startswith("*.") else host == pattern


def _check_verdict(head: RequestHead, verdict: Verdict) -> None:
    """Hold an allowance against the rules, read one by one."""
    if not verdict.allowed:
        assert verdict.grant is None
        return
    request, host, port = head.request, head.request.destination.host.text, head.request.destination.port
    grant = verdict.grant
    assert grant is not None
    if grant.index < 0:
        assert (host, port, verdict.pinned) == ("model.stockade.internal", 9000, Address.parse("10.0.0.7"))
        return
    rule = RULES.allow[grant.index]
    assert _matches(rule.host, host) and port in (rule.ports or ()), (rule, host, port)
    assert host not in ("node.test", "localhost", "no.wild.test")
    if request.tunnel:
        assert verdict.handling is not Handling.REQUEST
        assert (verdict.handling is Handling.RAW) == rule.tcp
        assert verdict.handling is not Handling.OPAQUE, "every pattern here is looked into, or denied in part"
        return
    assert verdict.handling is Handling.REQUEST and not rule.tcp
    assert request.scheme == "https" or (port != 443 and rule.credential is None)
    assert not rule.read_only or (request.method in ("GET", "HEAD") and not head.body)
    assert rule.methods is None or request.method in rule.methods
    assert rule.encoded_slash or "%2F" not in request.path
    assert not (host == "open.test" and (request.method == "DELETE" or request.path.lower().startswith("/closed/")))
    if rule.query:
        assert request.query is not None and "service=git-upload-pack" in request.query.split("&")
    assert len(request.query or "") <= (16 if rule.query_bytes else 4096)


def _again(written: bytes, head: RequestHead, origin: Origin | None, limits: HeadLimits) -> RequestHead:
    """Read what was written, by the way that the request came."""
    request, where = head.request, head.request.destination
    if origin is None:
        start = f"{request.method} http://{where.host.wire}:{where.port}/"
        written = written.replace(f"{request.method} /".encode(), start.encode(), 1)
    wider = HeadLimits(limits.header_bytes + 1024, limits.header_count + 4)
    return parse_head(written, wider, origin)


def _check_written(head: RequestHead, origin: Origin | None, limits: HeadLimits) -> None:
    """What passes is written so that it reads as itself, names its host, and has nothing in it that was left out."""
    request, where = head.request, head.request.destination
    written = render_request_head(head)
    lines_are_lines(written)
    again = _again(written, head, origin, limits)
    assert again.request == request
    websocket = [name for name, _ in head.headers if name.lower().startswith(b"sec-websocket-")]
    if not (websocket and head.upgrade):
        assert again.headers == head.headers
    assert (again.framing, again.length, again.claims) == (head.framing, head.length, ())
    assert again.dropped in ((), ("transfer-encoding",)), again.dropped  # which is written anew
    assert (again.upgrade, again.expect_continue) == (None, False)
    assert render_request_head(again) == written
    usual = {"http": 80, "https": 443}[request.scheme] == where.port
    host = where.host.wire if usual else f"{where.host.wire}:{where.port}"
    assert written.split(b"\r\n")[1] == f"Host: {host}".encode()
    names = [line.partition(b":")[0].lower() for line in written.split(b"\r\n")[1:-2]]
    assert names.count(b"host") == 1
    plain = [name.replace(b"_", b"-") for name in names]
    assert _NEVER_SENT.isdisjoint(plain) and not any(name.startswith(_NEVER_SENT_PREFIXES) for name in plain), names
    target = request.path + ("" if request.query is None else f"?{request.query}")
    _ask_oracles(written, head, target.encode())


def _check_changed(head: RequestHead) -> None:
    """Credentials are taken out and put in; a WebSocket is asked for only where the client did."""
    written = render_request_head(head, close=True, drop=head.credentials, add=(_KEY,))
    lines_are_lines(written)
    names = [line.partition(b":")[0].lower() for line in written.split(b"\r\n")[1:-2]]
    assert names.count(b"x-api-key") == 1 and written.count(b"the-operators-key") >= 1
    assert not (set(names) - {b"x-api-key"}) & {name.encode() for name in head.credentials}
    if head.upgrade == b"websocket":
        asked = render_request_head(head, upgrade=True)
        lines_are_lines(asked)
        assert asked.count(b"Connection: Upgrade\r\nUpgrade: websocket\r\n") == 1


def _ask_oracles(sent: bytes, head: RequestHead, target: bytes | None) -> None:
    """h11 and llhttp read the same request, fields, framing and body; ``target`` None: of what the client sent."""
    body = _BODIES[head.framing]
    data = b"".join(ChunkedReader().feed(body)) if head.framing is Framing.CHUNKED else body
    if head.framing is Framing.LENGTH:
        body = data = body[: head.length]
    whole = head.framing is not Framing.LENGTH or head.length == len(data)
    ours = Message((head.request.method.encode(), target), [], data, whole)
    first = h11_request(sent + body)
    _same(first, ours, head)
    second = llhttp(sent + body)
    if second is not None:
        _same(second, ours, head)
        assert second.start == first.start
        assert fields(second.headers) == fields(first.headers)


def _same(theirs: Message, ours: Message, head: RequestHead) -> None:
    assert theirs.start[0] == ours.start[0]
    assert (theirs.body, theirs.whole) == (ours.body, ours.whole), (theirs, ours)
    if ours.start[1] is None:
        return
    assert theirs.start[1] == ours.start[1]
    framing = (b"host", b"content-length", b"transfer-encoding")
    kept = [field for field in fields(theirs.headers) if field[0] not in framing]
    shown = head.headers
    if head.upgrade == b"websocket":
        shown = tuple(field for field in shown if not field[0].lower().startswith(b"sec-websocket-"))
    assert kept == fields(shown)
