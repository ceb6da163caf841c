"""The terms on which a request is allowed: cases 43, 66, 67, 69, 82, 97 and 99 of the bypass table."""

from __future__ import annotations

import pytest

from stockade.egress.gate import (
    Credential,
    Destination,
    Grant,
    HeadLimits,
    Limits,
    Origin,
    Reason,
    Request,
    Rule,
    RuleLimits,
    Rules,
    Way,
    decide,
    judge_credentials,
    judge_upgrade,
    parse_head,
    parse_host,
    render_request_head,
)

LIMITS = HeadLimits()
KEYS = (Credential("key", "X-Api-Key", "s3cr3t-value"),)
ALLOWED, METHOD, PATH = Reason.ALLOWED, Reason.METHOD_NOT_ALLOWED, Reason.PATH_NOT_ALLOWED
QUERY, BODY = Reason.QUERY_NOT_ALLOWED, Reason.BODY_NOT_ALLOWED
TLS = Origin(Way.TLS, "https", parse_host(b"a.example"), 443)


def rule(host="a.example", ports=(80, 443), **more):
    return Rule(host, more.pop("methods", None), more.pop("paths", None), ports, 1, **more)


def rules(*allow, **more):
    return Rules(allow=allow, credentials=KEYS, **more)


def inside(method="GET", path="/", *, host="a.example", port=443, scheme="https", way=Way.TLS):
    path, mark, query = path.partition("?")
    return Request(Destination(way, parse_host(host.encode()), port), method, path, query if mark else None, scheme)


def head(*fields, method=b"GET", target=b"/", version=b"1.1", origin=TLS):
    lines = [b"%b %b HTTP/%b" % (method, target, version), b"Host: a.example", *fields, b"", b""]
    return parse_head(b"\r\n".join(lines), LIMITS, origin)


BOTH = pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])


@pytest.mark.promise("S3.15")
@BOTH
def test_egress_case_062_read_only_means_the_same_in_clear_and_inside_tls(scheme, port):
    made = rules(rule(read_only=True))
    for method, reason in [
        ("GET", ALLOWED),
        ("HEAD", ALLOWED),
        ("POST", METHOD),
        ("OPTIONS", METHOD),
        ("TRACE", METHOD),
    ]:
        assert decide(inside(method, port=port, scheme=scheme), made).reason is reason
    assert terms_of(inside(port=port, scheme=scheme), made).read_only
    assert decide(inside(port=port, scheme=scheme), made, body=True).reason is BODY


@pytest.mark.promise("S3.15")
@pytest.mark.parametrize(
    ("made", "method", "reason"),
    [
        (rule(read_only=True, methods=("GET", "OPTIONS")), "OPTIONS", BODY),
        (rule(read_only=True, methods=("SEARCH",)), "SEARCH", BODY),
        (rule(methods=("GET", "POST")), "GET", BODY),
        (rule(methods=("HEAD", "OPTIONS")), "OPTIONS", BODY),
        (rule(methods=("TRACE",)), "TRACE", BODY),
        (rule(methods=("GET", "POST")), "POST", ALLOWED),
        (rule(methods=("GET", "DELETE")), "DELETE", ALLOWED),
        (rule(paths=("/**",)), "GET", ALLOWED),
        (rule(), "GET", ALLOWED),
    ],
)
def test_egress_case_099_a_body_where_none_is_needed(made, method, reason):
    assert decide(inside(method, "/x"), rules(made), body=True).reason is reason
    assert decide(inside(method, "/x"), rules(made)).reason is ALLOWED


def test_what_counts_as_a_body():
    assert not head().body
    assert not head(b"Content-Length: 0").body
    assert head(b"Content-Length: 1").body
    assert head(b"Transfer-Encoding: chunked").body


@pytest.mark.parametrize("method", ["TRACE", "TRACK", "PRI", "CONNECT-UDP"])
def test_methods_that_nobody_implies(method):
    assert decide(inside(method), rules(rule())).reason is METHOD
    assert decide(inside(method), rules(rule(methods=(method,)))).reason is ALLOWED


@pytest.mark.promise("S3.15")
@pytest.mark.parametrize(
    ("size", "own", "general", "reason"),
    [
        (10, None, 10, ALLOWED),
        (11, None, 10, Reason.QUERY_TOO_LARGE),
        (5, 5, 10, ALLOWED),
        (6, 5, 10, Reason.QUERY_TOO_LARGE),
        (11, 50, 10, Reason.QUERY_TOO_LARGE),
        (1, 0, 10, Reason.QUERY_TOO_LARGE),
        (0, 0, 10, ALLOWED),
        (4096, None, 4096, ALLOWED),
        (4097, None, 4096, Reason.QUERY_TOO_LARGE),
    ],
)
def test_egress_case_099_long_query(size, own, general, reason):
    made = rules(rule(query_bytes=own), limits=Limits(query_bytes=general))
    assert decide(inside(path="/?" + "q" * size), made).reason is reason


def test_egress_case_099_another_rule_may_take_a_long_query():
    made = rules(rule(query_bytes=5), rule(paths=("/search",)))
    assert terms_of(inside(path="/search?" + "q" * 100), made).index == 1
    assert decide(inside(path="/other?" + "q" * 100), made).reason is Reason.QUERY_TOO_LARGE


SLASHES = [
    ("/@scope%2Fname", rule(), PATH),
    ("/@scope%2Fname", rule(paths=("/*",)), PATH),
    ("/@scope%2Fname", rule(encoded_slash=True), ALLOWED),
    ("/@scope%2Fname", rule(paths=("/*",), encoded_slash=True), ALLOWED),
    ("/@scope%2Fname", rule(paths=("/@*%2F*",), encoded_slash=True), ALLOWED),
    ("/@scope%2Fname", rule(paths=("/@*/*",), encoded_slash=True), PATH),
    ("/a%2F%2Fb", rule(paths=("/**",), encoded_slash=True), PATH),
    ("/a%2F/b", rule(paths=("/**",), encoded_slash=True), PATH),
    ("/a%2Fb;c", rule(paths=("/**",), encoded_slash=True), PATH),
    ("/a%2Fb", rule(paths=("/**",)), PATH),
    ("/a/b", rule(paths=("/**",), encoded_slash=True), ALLOWED),
]


@BOTH
@pytest.mark.parametrize(("path", "made", "reason"), SLASHES)
def test_egress_case_066_encoded_slash_by_rule_only(path, made, reason, scheme, port):
    assert decide(inside(path=path, port=port, scheme=scheme), rules(made)).reason is reason


@pytest.mark.parametrize(
    "path", ["/solutions%2F1", "/SOLUTIONS%2F1", "/x%2F..", "/solutions%2F%2F1", "/solutions/a%2Fb"]
)
def test_egress_case_100_an_encoded_slash_is_no_way_around_a_denial(path):
    deny = (Rule("a.example", None, ("/solutions/**", "/x/.."), None, 2),)
    made = rules(rule(encoded_slash=True, paths=("/**",)), deny=deny)
    assert decide(inside(path=path), made).reason is Reason.DENIED_BY_RULE
    assert decide(inside(path="/other%2F1"), made).allowed


class TestQuery:
    FETCH = rule(methods=("GET",), paths=("/*/*/info/refs",), query=(("service", "git-upload-pack"),))

    @pytest.mark.parametrize(
        ("query", "reason"),
        [
            ("?service=git-upload-pack", ALLOWED),
            ("?a=b&service=git-upload-pack&c", ALLOWED),
            ("?service=git-receive-pack", QUERY),
            ("?service=git-upload-pack&service=git-receive-pack", QUERY),
            ("?service=git-receive-pack&service=git-upload-pack", QUERY),
            ("?service=git-upload-pack&Service=git-receive-pack", QUERY),
            ("?service=git-upload-pack&%73ervice=git-receive-pack", QUERY),
            ("?service=git-upload-pack&service[]=git-receive-pack", QUERY),
            ("?service=git-upload-pack&+service=git-receive-pack", QUERY),
            ("?service=git-upload-pack&service%00x=git-receive-pack", QUERY),
            ("?service=git-upload-pack;service=git-receive-pack", QUERY),
            ("?a=1;service=git-upload-pack", QUERY),
            ("?service=git-upload-pack&a;service=git-receive-pack", QUERY),
            ("?service=git-upload-pack;", QUERY),
            ("?service=git-upload-packs", QUERY),
            ("?service=git%2Dupload-pack", QUERY),
            ("?SERVICE=git-upload-pack", QUERY),
            ("?service", QUERY),
            ("?", QUERY),
            ("", QUERY),
        ],
    )
    def test_egress_case_067_git_fetch_and_not_push(self, query, reason):
        assert decide(inside(path="/o/r/info/refs" + query), rules(self.FETCH)).reason is reason

    @pytest.mark.parametrize(
        ("query", "denied"),
        [
            ("?service=git-receive-pack", True),
            ("?x&service=git-receive-pack", True),
            ("?x;service=git-receive-pack", True),
            ("?SERVICE=git-receive-pack", True),
            ("?service=GIT-RECEIVE-PACK", True),
            ("?%73ervice=git%2dreceive-pack", True),
            ("?service[]=git-receive-pack", True),
            ("?service=+git-receive-pack", True),
            ("?service=git-upload-pack&service=git-receive-pack", True),
            ("?service=git%252dreceive-pack", True),
            ("?service=git-upload-pack", False),
            ("?note=git-receive-pack", False),
            ("?", False),
            ("", False),
        ],
    )
    def test_egress_case_067_push_denied_however_it_is_spelt(self, query, denied):
        deny = (Rule("a.example", None, ("/**",), None, 2, query=(("service", "git-receive-pack"),)),)
        verdict = decide(inside(path="/o/r/info/refs" + query), rules(rule(), deny=deny))
        assert verdict.reason is (Reason.DENIED_BY_RULE if denied else ALLOWED)

    def test_all_of_several_parameters(self):
        pairs = (("a", "1"), ("b", "2"))
        assert decide(inside(path="/?b=2&a=1"), rules(rule(query=pairs))).allowed
        assert decide(inside(path="/?a=1"), rules(rule(query=pairs))).reason is QUERY
        deny = (Rule("a.example", None, None, None, 2, query=pairs),)
        assert decide(inside(path="/?a=1"), rules(rule(), deny=deny)).allowed
        assert decide(inside(path="/?b=2&a=1"), rules(rule(), deny=deny)).reason is Reason.DENIED_BY_RULE


class TestLabels:
    LONG, FITS = "s" * 41, "s" * 40

    @pytest.mark.parametrize(
        "request_", [inside, lambda **more: Request(inside(**more).destination, "CONNECT", "", None, "")]
    )
    def test_egress_case_043_label_under_a_wildcard(self, request_):
        made = rules(rule("*.wild.example"), inspection=True)
        assert decide(request_(host=f"{self.FITS}.wild.example"), made).allowed
        assert decide(request_(host=f"{self.FITS}.{self.FITS}.wild.example"), made).allowed
        for name in (self.LONG, f"a.{self.LONG}", f"{self.LONG}.a"):
            assert decide(request_(host=f"{name}.wild.example"), made).reason is Reason.LABEL_TOO_LONG

    def test_egress_case_043_an_exact_name_may_be_long(self):
        made = rules(rule("*.wild.example"), rule(f"{self.LONG}.wild.example", read_only=True))
        assert terms_of(inside(host=f"{self.LONG}.wild.example"), made).index == 1
        refused = decide(inside("POST", host=f"{self.LONG}.wild.example"), made)
        assert refused.reason is METHOD, "the wildcard does not take what the exact rule refuses"

    def test_egress_case_043_the_limit_is_the_policys(self):
        made = rules(rule("*.wild.example"), limits=Limits(wildcard_label=3))
        assert decide(inside(host="abc.wild.example"), made).allowed
        assert decide(inside(host="abcd.wild.example"), made).reason is Reason.LABEL_TOO_LONG

    def test_a_denial_is_told_first(self):
        made = rules(rule("*.wild.example"), deny=(Rule("*.wild.example", None, None, None, 2),))
        assert decide(inside(host=f"{self.LONG}.wild.example"), made).reason is Reason.DENIED_BY_RULE


class TestClearText:
    def test_egress_case_062_https_on_any_port_of_the_rule(self):
        made = rules(rule(ports=(443, 8443)))
        assert decide(inside(port=8443), made).allowed
        assert decide(inside(port=443), made).allowed
        assert decide(inside(port=8444), made).reason is Reason.PORT_NOT_ALLOWED
        assert decide(inside(port=443, scheme="http"), made).reason is Reason.PORT_NOT_ALLOWED
        assert decide(inside(port=8443, scheme="http"), made).allowed

    @pytest.mark.parametrize("tls", ["opaque", "inspect"])
    def test_a_rule_that_speaks_of_tls_means_it_everywhere_but_on_80(self, tls):
        made = rules(rule(ports=(80, 443, 8443), tls=tls))
        assert decide(inside(port=8443, scheme="http"), made).reason is Reason.PORT_NOT_ALLOWED
        assert decide(inside(port=80, scheme="http"), made).allowed
        assert decide(inside(port=8443), made).allowed, "an opaque rule allows what is inside, where it must be seen"

    def test_egress_case_097_no_credential_in_clear(self):
        made = rules(rule(ports=(80, 8080, 443), credential="key"))
        for port in (80, 8080):
            assert decide(inside(port=port, scheme="http"), made).reason is Reason.PORT_NOT_ALLOWED
        assert terms_of(inside(), made).credential == "key"


def terms_of(request, made) -> Grant:
    grant = decide(request, made).grant
    assert grant is not None
    return grant


def grant(**more):
    return terms_of(inside(), rules(rule(**more), inspection=True))


WEBSOCKET = (b"Connection: keep-alive, Upgrade", b"Upgrade: WebSocket", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
             b"Sec-WebSocket-Version: 13")  # fmt: skip


class TestUpgrade:
    def test_egress_case_082_websocket_by_rule(self):
        asked = head(*WEBSOCKET)
        assert asked.upgrade == b"websocket"
        assert judge_upgrade(asked, grant(websocket=True)).allowed
        written = render_request_head(asked, upgrade=True)
        assert written == (
            b"GET / HTTP/1.1\r\nHost: a.example\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            b"Sec-WebSocket-Version: 13\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )

    @pytest.mark.parametrize("more", [{}, {"read_only": True}, {"methods": ("GET",)}, {"tls": "inspect"}])
    def test_egress_case_082_websocket_without_a_rule(self, more):
        assert judge_upgrade(head(*WEBSOCKET), grant(**more)).reason is Reason.UPGRADE_NOT_ALLOWED
        assert b"ebsocket" not in render_request_head(head(*WEBSOCKET)).lower()

    @pytest.mark.parametrize(
        "asked",
        [
            head(*WEBSOCKET, method=b"POST"),
            head(*WEBSOCKET, b"Content-Length: 3"),
            head(*WEBSOCKET, b"Transfer-Encoding: chunked"),
            head(*WEBSOCKET, version=b"1.0"),
        ],
    )
    def test_egress_case_082_what_is_no_websocket_handshake(self, asked):
        assert judge_upgrade(asked, grant(websocket=True)).reason is Reason.UPGRADE_NOT_ALLOWED

    @pytest.mark.parametrize(
        ("fields", "upgrade"),
        [
            ([b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"], b"h2c"),
            ([b"Connection: Upgrade", b"Upgrade: h2c, WEBSOCKET"], b"websocket"),
            ([b"Connection: Upgrade", b"Upgrade: h2c", b"Upgrade: websocket"], b"websocket"),
            ([b"Connection: Upgrade", b"Upgrade:"], None),
            ([b"Connection: Upgrade"], None),
            ([b"Upgrade: websocket"], None),
            ([b"Connection: keep-alive", b"Upgrade: websocket"], None),
        ],
    )
    def test_egress_case_060_upgrade_counts_where_connection_names_it(self, fields, upgrade):
        asked = head(*fields)
        assert asked.upgrade == upgrade
        assert judge_upgrade(asked, grant()).allowed is (upgrade != b"websocket")
        assert b"pgrade" not in render_request_head(asked)

    def test_nobody_upgrades_who_did_not_ask(self):
        for asked in (head(), head(b"Connection: Upgrade", b"Upgrade: h2c")):
            with pytest.raises(ValueError, match="WebSocket"):
                render_request_head(asked, upgrade=True)


CREDENTIALS = [
    b"Authorization: Bearer x", b"Cookie: a=b", b"X-Api-Key: x", b"x-api-key: x", b"X-Goog-Api-Key: x", b"api-key: x",
    b"X-Auth-Token: x", b"PRIVATE-TOKEN: x", b"Job-Token: x", b"X_Api_Key: x", b"X-Vendor-Api-Key: x", b"apikey: x",
    b"X-Amz-Security-Token: x", b"X-Access-Token: x", b"Ocp-Apim-Subscription-Key: x", b"X-Authorization: x",
]  # fmt: skip


class TestCredentials:
    @pytest.mark.parametrize("field", CREDENTIALS)
    def test_egress_case_097_foreign_credential(self, field):
        asked = head(field, b"Accept: */*")
        name = field.partition(b":")[0].lower().decode()
        assert asked.credentials == {name}
        assert judge_credentials(asked, grant(credential="key")).reason is Reason.FOREIGN_CREDENTIAL
        assert judge_credentials(asked, grant()).allowed
        assert judge_credentials(asked, grant(strip_credentials=True)).allowed
        stripped = render_request_head(asked, drop=asked.credentials)
        assert stripped == b"GET / HTTP/1.1\r\nHost: a.example\r\nAccept: */*\r\n\r\n"

    def test_none_is_brought(self):
        asked = head(b"Accept: */*", b"X-Token-Count: 3", b"X-Keyword: a", b"Monkey: x")
        assert asked.credentials == frozenset()
        assert judge_credentials(asked, grant(credential="key")).allowed

    @pytest.mark.parametrize(
        "query", ["api_key=x", "a=b&apikey=x", "API-KEY=x", "access_token=x", "private_token=x", "x;auth-token=x",
                  "key=AIzaSyFake", "x-goog-api-key=x"],
    )  # fmt: skip
    def test_egress_case_097_foreign_credential_in_the_query(self, query):
        asked = head(target=b"/v1/files?" + query.encode())
        for more in ({}, {"strip_credentials": True}):
            assert judge_credentials(asked, grant(credential="key", **more)).reason is Reason.FOREIGN_CREDENTIAL
        assert judge_credentials(asked, grant()).allowed

    def test_an_ordinary_query_is_none(self):
        for query in (b"key=name", b"q=api_key", b"tokens=5", b"monkey=x"):
            assert judge_credentials(head(target=b"/?" + query), grant(credential="key")).allowed

    def test_egress_case_097_other_rules_of_the_host_are_guarded_too(self):
        made = rules(rule(ports=(443,), paths=("/v1/**",), credential="key"), rule(ports=(443,), paths=("/public/**",)))
        terms = terms_of(inside(path="/public/x"), made)
        assert (terms.credential, terms.guarded) == (None, True)
        assert judge_credentials(head(b"X-Api-Key: x"), terms).reason is Reason.FOREIGN_CREDENTIAL
        assert not terms_of(inside(host="b.example"), rules(rule("b.example"))).guarded

    def test_egress_case_097_injected_in_place_of_the_clients(self):
        """An SDK that insists on a key of its own is given one that never leaves."""
        asked = head(b"x-api-key: placeholder", b"Authorization: Bearer placeholder", b"Accept: */*")
        terms = grant(credential="key", strip_credentials=True)
        assert judge_credentials(asked, terms).allowed
        field = KEYS[0].field
        written = render_request_head(asked, drop=asked.credentials, add=(field,))
        assert written == b"GET / HTTP/1.1\r\nHost: a.example\r\nAccept: */*\r\nX-Api-Key: s3cr3t-value\r\n\r\n"
        only_added = render_request_head(asked, add=(field,))
        assert only_added.lower().count(b"x-api-key") == 1
        assert b"s3cr3t-value" in only_added

    def test_connection_takes_a_credential_off_but_not_out_of_sight(self):
        asked = head(b"Connection: X-Api-Key", b"X-Api-Key: x")
        assert asked.headers == ()
        assert asked.credentials == {"x-api-key"}


def test_the_grant_tells_the_terms():
    made = rules(
        rule("a.example", store=True, limits=RuleLimits(bytes_out=5)),
        rule("*.example", websocket=True, strip_credentials=True),
        rule("b.test", read_only=True, limits=RuleLimits(connections=1)),
    )
    first, second, third = (terms_of(inside(host=host), made) for host in ("a.example", "c.example", "b.test"))
    assert (first.index, first.store, first.limited, first.wildcard, first.ech) == (0, True, 0, False, "log")
    assert (second.index, second.websocket, second.strip_credentials, second.limited) == (1, True, True, -1)
    assert (second.wildcard, second.ech) == (True, "deny")
    assert (third.index, third.read_only, third.limited) == (2, True, 1)
    assert made.rule_limits == (RuleLimits(bytes_out=5), RuleLimits(connections=1))
    assert first.rule == "allow a.example line 1"
