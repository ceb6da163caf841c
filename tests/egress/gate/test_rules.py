"""Rules as values: read from a policy, sent as JSON, refused where they cannot be meant (cases 20, 91, 92, 97)."""

from __future__ import annotations

import weakref

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import (
    Address,
    Credential,
    Limits,
    Mode,
    Reason,
    Rule,
    RuleLimits,
    Rules,
    RunLimits,
    Secret,
    ServiceRule,
    judge_addresses,
)
from stockade.policy import load_operator, parse_policy

KEY = Credential("key", "Authorization", "Bearer t0ken-value")
SECRET = Secret("deploy", "deploy-s3cr3t")

POLICY = """
version: 1
egress:
  mode: record
  recording: nightly
  allow:
    - host: api.example
      methods: [GET, POST]
      paths: ["/v1/**"]
      ports: [443, 8443]
      tls: inspect
      ech: deny
      websocket: true
      credential: key
      strip_credentials: true
      query_bytes: 200
      query: {b: "2", a: "1"}
      encoded_slash: true
      limits: {requests_per_minute: 7, connections: 2, bytes_out: 1 KiB, bytes_in: 2 KiB}
    - {host: "*.files.example", read_only: true, store: true, ech: log}
    - {host: git.example, ports: [22], tcp: true, limits: {bytes_out: 1 KiB}}
    - {host: pinned.example, tls: opaque}
  deny:
    - {host: api.example, paths: ["/v1/admin/**"], query: {q: x}}
  limits: {query_bytes: 300, names: 9, wildcard_label: 20}
  run_limits: {requests_per_minute: 100, bytes_in: 1 MiB}
  deny_cidrs: [11.1.0.0/16, 11.2.0.0/16]
"""


def rules_of(text=POLICY, operator=None, **more):
    return Rules.from_policy(
        parse_policy(text, source="test.yaml"), load_operator(operator), credentials=(KEY,), **more
    )


def test_a_policy_is_read_as_it_is_written():
    made = rules_of(secrets=(SECRET,), inspection=True)
    api, files, git, pinned = made.allow
    assert api == Rule(
        "api.example",
        ("GET", "POST"),
        ("/v1/**",),
        (443, 8443),
        api.line,
        query=(("a", "1"), ("b", "2")),
        tls="inspect",
        ech="deny",
        websocket=True,
        credential="key",
        strip_credentials=True,
        encoded_slash=True,
        query_bytes=200,
        limits=RuleLimits(7, 2, 1024, 2048),
    )
    assert api.line > 0
    assert (files.host, files.read_only, files.store, files.ech, files.methods) == (
        "*.files.example",
        True,
        True,
        "log",
        None,
    )
    assert (git.tcp, git.ports, git.tls, git.limits) == (True, (22,), "auto", RuleLimits(bytes_out=1024))
    assert (pinned.tls, pinned.ech, pinned.limits) == ("opaque", "", None)
    (deny,) = made.deny
    assert (deny.host, deny.paths, deny.query, deny.ports) == ("api.example", ("/v1/admin/**",), (("q", "x"),), None)
    assert (made.mode, made.inspection, made.run_limits) == (Mode.RECORD, True, RunLimits(100, None, None, 1 << 20))
    assert (made.limits.query_bytes, made.limits.names, made.limits.wildcard_label) == (300, 9, 20)
    assert (made.credentials, made.secrets) == ((KEY,), (SECRET,))
    assert made.rule_limits == (RuleLimits(7, 2, 1024, 2048), RuleLimits(bytes_out=1024))
    assert judge_addresses([Address.parse("11.2.0.1")], made).reason is Reason.DENIED_ADDRESS


def test_egress_case_039_the_policy_and_the_operator_close_ranges(tmp_path):
    path = tmp_path / "operator.yaml"
    path.write_text("version: 1\ndeny_cidrs: [11.9.0.0/16, 11.1.0.0/16]\n")
    made = rules_of(operator=path)
    assert [str(cidr) for cidr in made.deny_cidrs] == ["11.9.0.0/16", "11.1.0.0/16", "11.2.0.0/16"]


@pytest.mark.parametrize("mode", list(Mode))
def test_the_agent_may_say_another_mode(mode):
    assert rules_of(mode=mode).mode is mode
    assert Rules.from_json(rules_of(mode=mode).to_json()).mode is mode


def test_rules_of_a_preset_say_so():
    made = Rules.from_policy(
        parse_policy("version: 1\negress:\n  presets: [pypi-read]\n", source="p"), load_operator(None), inspection=True
    )
    assert made.allow
    assert {rule.source for rule in made.allow} == {"preset pypi-read"}
    label = made.index.exact.get(made.allow[0].host) or made.index.suffixes[made.allow[0].host.removeprefix("*")]
    assert "preset pypi-read" in next(iter(label.allow.values()))[0].grant.rule


def test_json_gives_the_same_rules():
    for made in (
        rules_of(secrets=(SECRET,), inspection=True, own_addresses=["198.41.0.4"]),
        Rules(),
        rules_of(mode=Mode.OFF),
    ):
        text = made.to_json()
        assert "\n" not in text
        again = Rules.from_json(text)
        assert again == made
        assert again.to_json() == text
        assert again.rule_limits == made.rule_limits


def test_equal_rules_in_use_are_one_object():
    """A thousand rollouts of one policy share what is compiled, and it goes with the last of them."""
    text = rules_of(secrets=(SECRET,)).to_json()
    one, two = Rules.from_json(text), Rules.from_json(text)
    assert one is two
    assert Rules.from_json(text.replace('"names":9', '"names":8')) is not one
    gone = weakref.ref(one)
    del one, two
    assert gone() is None


def test_json_of_many_rules_stays_small():
    """Most rules say little; what they do not say takes no room in a control message."""
    made = Rules(allow=tuple(Rule(f"h{n}.example", None, None, (443,), n) for n in range(1000)))
    assert len(made.to_json()) < 100_000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"mode":"record"', '"mode":"replayed"'),
        ('"mode":"record"', '"mode":null'),
        ('"inspection":false', '"inspection":0'),
        ('"tls":"inspect"', '"tls":"none"'),
        ('"ech":"deny"', '"ech":"maybe"'),
        ('"tcp":true', '"tcp":1'),
        ('"tcp":true', '"tcp":true,"tls":"opaque"'),
        ('"tcp":true', '"tcp":true,"read_only":true'),
        ('"tcp":true', '"tcp":true,"unsafe":true'),
        ('"read_only":true', '"read_only":"true"'),
        ('"read_only":true', '"read_only":true,"websocket":true'),
        ('"tls":"opaque"', '"tls":"opaque","store":true'),
        ('"credential":"key"', '"credential":"other"'),
        ('"credential":"key"', '"credential":5'),
        ('"name":"key"', '"name":"keys"'),
        ('"header":"Authorization"', '"header":"Host"'),
        ('"header":"Authorization"', '"header":"Au thorization"'),
        ('"value":"Bearer t0ken-value"', '"value":"a\\r\\nHost: evil.example"'),
        ('"query_bytes":200', '"query_bytes":-1'),
        ('"query":[["a","1"],["b","2"]]', '"query":{"a":"1"}'),
        ('"query":[["a","1"],["b","2"]]', '"query":[["a"]]'),
        ('"requests_per_minute":7', '"requests_per_minute":"7"'),
        ('"requests_per_minute":7', '"per_hour":7'),
        ('"run_limits":{', '"run_limits":{"more":1,'),
        ('"ports":[443,8443]', '"ports":[443,65536]'),
        ('"ports":[443,8443]', '"ports":[0]'),
        ('"methods":["GET","POST"]', '"methods":["get"]'),
        ('"methods":["GET","POST"]', '"methods":["GET /x"]'),
        ('"secrets":[', '"secrets":[{"name":"n"},'),
    ],
)
def test_egress_case_091_and_092_damaged_json_is_no_rules(old, new):
    text = rules_of(secrets=(SECRET,)).to_json()
    assert old in text
    with pytest.raises(ValueError) as caught:
        Rules.from_json(text.replace(old, new, 1))
    shown = str(caught.value)
    assert "t0ken" not in shown
    assert "s3cr3t" not in shown


def rule(**more):
    ports = more.pop("ports", (443,))
    return Rule(more.pop("host", "a.example"), more.pop("methods", None), more.pop("paths", None), ports, 1, **more)


@pytest.mark.parametrize(
    "bad",
    [
        rule(ports=()),
        rule(ports=None),
        rule(ports=(0,)),
        rule(ports=(65536,)),
        rule(tls="none"),
        rule(ech="no"),
        rule(tcp=True, methods=("GET",)),
        rule(tcp=True, websocket=True),
        rule(tcp=True, tls="inspect"),
        rule(tls="opaque", paths=("/x",)),
        rule(tls="opaque", encoded_slash=True),
        rule(tls="opaque", query_bytes=5),
        rule(tls="opaque", query=(("a", "b"),)),
        rule(read_only=True, websocket=True),
        rule(methods=("",)),
        rule(methods=("Get",)),
        rule(query_bytes=-1),
        rule(credential="unknown"),
        rule(host="*"),
        rule(host="*.*.example"),
        rule(host="a.*.example"),
        rule(host="bücher.example"),
        rule(host="127.1"),
        rule(paths=("x",)),
    ],
)
def test_egress_case_091_rules_that_cannot_be_meant_do_not_exist(bad):
    with pytest.raises(ValueError):
        Rules(allow=(bad,), credentials=(KEY,))


@pytest.mark.parametrize(
    "bad",
    [
        [Credential("a", "X-Key", "v"), Credential("a", "X-Other", "v")],
        [Credential("a", "", "v")],
        [Credential("a", "X Key", "v")],
        [Credential("a", "X-Key:", "v")],
        [Credential("a", "X-Key\r\n", "v")],
        [Credential("a", "host", "v")],
        [Credential("a", "Content-Length", "5")],
        [Credential("a", "Transfer-Encoding", "chunked")],
        [Credential("a", "Connection", "close")],
        [Credential("a", "Upgrade", "h2c")],
        [Credential("a", "Proxy-Authorization", "v")],
        [Credential("a", "X-Forwarded-Host", "v")],
        [Credential("a", "Sec-WebSocket-Key", "v")],
        [Credential("a", "X-Key", "")],
        [Credential("a", "X-Key", " v")],
        [Credential("a", "X-Key", "v ")],
        [Credential("a", "X-Key", "SENTINEL\r\nHost: evil.example")],
        [Credential("a", "X-Key", "SENTINEL\0")],
        [Credential("a", "X-Key", "SENTINEL\u2028")],
    ],
)
def test_egress_case_097_a_credential_is_one_header_line_and_nothing_else(bad):
    with pytest.raises(ValueError) as caught:
        Rules(credentials=tuple(bad))
    assert "SENTINEL" not in str(caught.value)


def test_a_credential_as_a_header_line():
    assert KEY.field == (b"Authorization", b"Bearer t0ken-value")
    assert Credential("a", "X-Key", "caf\xe9").field == (b"X-Key", b"caf\xe9")


def test_secrets_are_in_no_repr():
    made = rules_of(secrets=(SECRET,))
    for shown in (
        repr(made),
        repr(KEY),
        repr(SECRET),
        str(made),
        f"{made.credentials} {made.secrets}",
        repr(made.index),
    ):
        assert "t0ken" not in shown
        assert "s3cr3t" not in shown
    assert "key" in repr(KEY)


def test_a_secret_that_cannot_be_looked_for_is_refused_with_the_rules():
    with pytest.raises(ValueError, match="fewer than") as caught:
        Rules(secrets=(Secret("pin", "12 34"),))
    assert "12 34" not in str(caught.value)
    made = rules_of(secrets=(SECRET,)).scanner
    assert made is not None
    assert made.start().feed(b"x=deploy-s3cr3t") == "deploy"
    assert Rules().scanner is None


def test_rules_are_immutable():
    made = rules_of()
    with pytest.raises(AttributeError):
        made.mode = Mode.OFF
    with pytest.raises(AttributeError):
        made.allow[0].tcp = True


def test_the_five_fields_of_before_are_enough():
    made = Rule("a.example", ("GET",), None, (443,), 3)
    assert made == Rule(
        "a.example", ("GET",), None, (443,), 3, tls="auto", tcp=False, read_only=False, ech="", limits=None
    )
    assert Rules(allow=(made,)).mode is Mode.LIVE
    assert Rules(allow=(made,)).limits == Limits()


NAMES = st.sampled_from(["a.example", "*.example", "b.test", "140.82.114.4", "2a04:4e42::223"])
RULES = st.builds(
    Rule,
    NAMES,
    st.none() | st.lists(st.sampled_from(["GET", "POST", "PUT"]), max_size=2).map(tuple),
    st.none() | st.lists(st.sampled_from(["/", "/a/**", "/*/b"]), max_size=2).map(tuple),
    st.lists(st.integers(1, 65535), min_size=1, max_size=3).map(tuple),
    st.integers(0, 99),
    source=st.sampled_from(["", "preset x"]),
    query=st.none() | st.just((("a", "b"),)),
    tls=st.sampled_from(["auto", "inspect"]),
    read_only=st.booleans(),
    ech=st.sampled_from(["", "allow", "log", "deny"]),
    credential=st.none() | st.just("key"),
    strip_credentials=st.booleans(),
    store=st.booleans(),
    encoded_slash=st.booleans(),
    query_bytes=st.none() | st.integers(0, 5000),
    limits=st.none() | st.builds(RuleLimits, *[st.none() | st.integers(0, 1 << 50)] * 4),
)


@given(
    st.lists(RULES, max_size=4).map(tuple),
    st.sampled_from(list(Mode)),
    st.booleans(),
    st.text('abcdefghABCDEFGH\u20ac"\x1f', min_size=8, max_size=30),
    st.none() | st.builds(RunLimits, *[st.none() | st.integers(0, 1 << 50)] * 4),
)
def test_any_rules_go_through_json_unchanged(allow, mode, inspection, value, run_limits):
    service = ServiceRule("model", Address.parse("fd00::1"), 8000, ("POST",), ("/v1/x",), 1)
    made = Rules(
        allow=allow,
        services=(service,),
        mode=mode,
        inspection=inspection,
        credentials=(KEY,),
        secrets=(Secret("s", value),),
        run_limits=run_limits,
    )
    text = made.to_json()
    assert Rules.from_json(text) == made
    assert Rules.from_json(msgspec.json.format(text.encode())) == made
