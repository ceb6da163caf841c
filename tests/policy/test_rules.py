"""The keys of a rule: what each means, and which of them cannot stand together."""

from __future__ import annotations

import pytest

from stockade.errors import PolicyError
from stockade.policy import HostRule, Policy, RowKind, explain, parse_policy, policy_digest, unsafe_options

OPAQUE = "host: a.example"


def policy(rule: str, *, limits: str = "") -> Policy:
    more = f"  limits: {{{limits}}}\n" if limits else ""
    return parse_policy(f"version: 1\negress:\n{more}  allow:\n    - {{{rule}}}\n", source="p")


def read(rule: str) -> HostRule:
    return policy(rule).egress.allow[0]


def refused(rule: str, message: str, key: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        read(rule)
    assert caught.value.key == f"egress.allow[0].{key}"
    assert caught.value.line == 4
    assert caught.value.hint


EVERY_KEY = (
    "host: a.example, methods: [GET], paths: [/x], query: {service: git-upload-pack, v: '2'}, ports: [443], "
    "tls: inspect, tcp: false, read_only: true, websocket: false, ech: deny, strip_credentials: true, store: true, "
    "encoded_slash: true, query_bytes: 100, limits: {requests_per_minute: 5, connections: 2, bytes_out: 64 KiB, "
    "bytes_in: 1 MiB}, unsafe_many_owners: false"
)


def test_every_key_is_read_and_survives_json():
    whole = policy(EVERY_KEY)
    rule = whole.egress.allow[0]
    assert rule.query == {"service": "git-upload-pack", "v": "2"}
    assert (rule.tls, rule.ech, rule.query_bytes) == ("inspect", "deny", 100)
    assert (rule.read_only, rule.strip_credentials, rule.store, rule.encoded_slash) == (True, True, True, True)
    assert rule.limits is not None
    assert (rule.limits.requests_per_minute, rule.limits.connections) == (5, 2)
    assert (rule.limits.bytes_out, rule.limits.bytes_in) == (64 << 10, 1 << 20)
    again = Policy.model_validate_json(whole.model_dump_json())
    assert again == whole
    assert policy_digest(again) == policy_digest(whole)


def test_defaults_open_nothing_more():
    rule = read(OPAQUE)
    assert (rule.tls, rule.tcp, rule.read_only, rule.websocket, rule.ech) == ("auto", False, False, False, None)
    assert (rule.credential, rule.strip_credentials, rule.store, rule.encoded_slash) == (None, False, False, False)
    assert (rule.query, rule.query_bytes, rule.limits, rule.unsafe_many_owners) == (None, None, None, False)
    assert (rule.source_line, rule.source_name) == (4, "")
    assert rule.tunnel
    assert not rule.inspected


@pytest.mark.parametrize(
    "key",
    [
        "methods: [POST]",
        "paths: [/x]",
        "query: {a: b}",
        "read_only: true",
        "websocket: true",
        "credential: model-api",
        "strip_credentials: true",
        "store: true",
        "query_bytes: 0",
        "encoded_slash: true",
    ],
)
def test_keys_that_speak_of_requests_make_a_rule_inspected(key):
    rule = read(f"{OPAQUE}, {key}")
    assert rule.inspected
    assert not rule.tunnel
    name = key.partition(":")[0]
    refused(f"{OPAQUE}, tls: opaque, {key}", f"{name} cannot be held to inside an opaque tunnel", "tls")
    refused(f"{OPAQUE}, tcp: true, ports: [22], {key}", f"{name} cannot be held to: a tcp rule", "tcp")


@pytest.mark.parametrize("key", ["ech: log", "tls: inspect", "tls: opaque"])
def test_a_raw_rule_knows_no_tls(key):
    refused(f"{OPAQUE}, tcp: true, ports: [22], {key}", "a tcp rule is not looked into", "tcp")


@pytest.mark.parametrize(
    "key", ["read_only: false", "store: false", "ech: deny", "limits: {bytes_out: 1 KiB}", "tls: auto"]
)
def test_keys_that_say_nothing_of_requests_leave_a_rule_opaque(key):
    assert read(f"{OPAQUE}, {key}").tunnel
    assert read(f"{OPAQUE}, tls: opaque, {key if key != 'tls: auto' else 'tcp: false'}").tunnel


def test_inspection_can_be_asked_for_by_itself():
    rule = read(f"{OPAQUE}, tls: inspect")
    assert rule.inspected
    assert (rule.accepted_methods, rule.paths) == (None, None)


def test_egress_case_085_raw_bytes_only_on_listed_ports():
    rule = read("host: git.example.org, tcp: true, ports: [22]")
    assert (rule.tcp, rule.tunnel, rule.inspected, rule.ports) == (True, False, False, (22,))
    refused("host: git.example.org, tcp: true", "must list its ports", "tcp")


@pytest.mark.parametrize(
    ("rule", "methods"),
    [
        ("read_only: true", ("GET", "HEAD")),
        ("read_only: true, methods: [GET]", ("GET",)),
        ("read_only: true, methods: [GET, HEAD, OPTIONS]", ("GET", "HEAD", "OPTIONS")),
        ("methods: [POST]", ("POST",)),
        ("paths: [/x]", None),
    ],
)
def test_methods_that_are_accepted(rule, methods):
    assert read(f"{OPAQUE}, {rule}").accepted_methods == methods


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "PROPFIND", "MKCOL"])
def test_read_only_takes_no_method_that_writes(method):
    refused(f"{OPAQUE}, read_only: true, methods: [GET, {method}]", "lists a method that writes", "methods")


def test_egress_case_082_no_websocket_on_a_read_only_rule():
    refused(f"{OPAQUE}, read_only: true, websocket: true", "sends in both directions", "websocket")
    assert read(f"{OPAQUE}, websocket: true").websocket
    assert read(f"{OPAQUE}, websocket: true, methods: [GET, POST]").websocket
    refused(f"{OPAQUE}, websocket: true, methods: [POST]", "begins with GET", "websocket")


def test_a_store_needs_get_and_no_credential():
    assert read(f"{OPAQUE}, store: true").store
    assert read(f"{OPAQUE}, store: true, read_only: true").store
    refused(f"{OPAQUE}, store: true, methods: [HEAD]", "only answers to GET", "store")
    refused(f"{OPAQUE}, store: true, credential: model-api", "served to others", "store")


@pytest.mark.parametrize("name", ["model-api", "a", "k9", "a" * 63])
def test_a_credential_is_a_label(name):
    assert read(f"{OPAQUE}, credential: {name}").credential == name


@pytest.mark.parametrize("name", ["Model", "model_api", "9a", "-a", "a-", "sk-ABCdef123", "a b", "''", "a" * 64])
def test_egress_case_097_a_credential_is_never_the_secret_itself(name):
    with pytest.raises(PolicyError) as caught:
        read(f"{OPAQUE}, credential: {name}")
    assert caught.value.key == "egress.allow[0].credential"
    assert len(name) < 3 or name not in str(caught.value), "what is no name may be the secret: it must not be shown"


def test_egress_case_097_a_credential_goes_to_one_owner_and_never_in_clear():
    refused(f"{OPAQUE}, credential: k, ports: [80]", "in clear text", "credential")
    refused("host: '*.github.io', credential: k, unsafe_many_owners: true", "many owners", "credential")
    both = read(f"{OPAQUE}, credential: k, strip_credentials: true")
    assert both.strip_credentials, "the client's own is removed before the operator's is added"


@pytest.mark.parametrize(
    "query", ["{}", "{a: ''}", "{a: 'b c'}", "{a: 'b%20c'}", "{'a[]': b}", "{a: 'x&y'}", "{a: 'x=y'}", "{a: b, A: c}"]
)
def test_a_query_has_one_spelling(query):
    with pytest.raises(PolicyError):
        read(f"{OPAQUE}, query: {query}")


def test_a_query_cannot_be_changed_afterwards():
    query = read(f"{OPAQUE}, query: {{a: b}}").query
    with pytest.raises(TypeError):
        query["a"] = "c"  # type: ignore[index]


@pytest.mark.parametrize("value", ["-1", "65537", "'10'", "1 KiB", "true"])
def test_not_query_bytes(value):
    with pytest.raises(PolicyError):
        read(f"{OPAQUE}, query_bytes: {value}")


# --------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("requests_per_minute", "121", "requests_per_minute: 500"),
        ("connections", "17", "connections: 100"),
        ("bytes_out", "2 MiB", "bytes_out: 4 MiB"),
        ("bytes_in", "1 GiB", "bytes_in: 1 GiB"),
    ],
)
def test_a_bound_of_a_rule_beyond_that_of_the_rollout_has_no_effect(name, value, limits):
    rule = f"{OPAQUE}, limits: {{{name}: {value}}}"
    refused(rule, f"{name} of the rule never takes effect", f"limits.{name}")
    assert policy(rule, limits=limits).egress.allow[0].limits is not None


def test_a_query_bound_beyond_that_of_the_rollout_has_no_effect():
    refused(f"{OPAQUE}, query_bytes: 4097", "never takes effect", "query_bytes")
    assert policy(f"{OPAQUE}, query_bytes: 8192", limits="query_bytes: 8192").egress.allow[0].query_bytes == 8192


def test_settings_of_egress():
    text = """\
version: 1
egress:
  mode: replay
  recording: spring-2027
  run_limits: {requests_per_minute: 6000, connections: 64, bytes_out: 1 GiB, bytes_in: 1 TiB}
  limits: {query_bytes: 100, names: 10, wildcard_label: 12}
  deny_cidrs: [198.51.100.0/24, "2001:db8::/32"]
"""
    egress = parse_policy(text, source="p").egress
    assert (egress.mode, egress.recording) == ("replay", "spring-2027")
    assert egress.run_limits is not None
    assert (egress.run_limits.requests_per_minute, egress.run_limits.bytes_in) == (6000, 1 << 40)
    assert (egress.limits.query_bytes, egress.limits.names, egress.limits.wildcard_label) == (100, 10, 12)
    assert [str(one) for one in egress.deny_cidrs] == ["198.51.100.0/24", "2001:db8::/32"]
    least = parse_policy("version: 1\n", source="p").egress
    assert (least.mode, least.recording, least.run_limits, least.deny_cidrs) == ("live", "default", None, ())
    assert (least.limits.query_bytes, least.limits.names, least.limits.wildcard_label) == (4096, 256, 40)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/a", "", ".a", "a.", "-a", "a\\0b", "ä", "a" * 65])
def test_egress_case_093_a_recording_is_no_path(name):
    with pytest.raises(PolicyError):
        parse_policy(f'version: 1\negress: {{mode: record, recording: "{name}"}}\n', source="p")


# ------------------------------------------------------------------------------------- conflicts


def both(*rules: str, deny: str = "") -> Policy:
    lines = [f"    - {{{rule}}}" for rule in rules]
    denied = f"\n  deny:\n    - {{{deny}}}" if deny else ""
    return parse_policy("version: 1\negress:\n  allow:\n" + "\n".join(lines) + denied + "\n", source="p")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (f"{OPAQUE}, read_only: true", f"{OPAQUE}, methods: [HEAD, GET]"),
        (f"{OPAQUE}, query: {{a: b, c: d}}", f"{OPAQUE}, query: {{c: d, a: b}}"),
        (f"{OPAQUE}, tls: inspect", f"{OPAQUE}, websocket: true"),
    ],
)
def test_rules_that_take_the_same_requests_are_one_rule_twice(one, two):
    for rules in ((one, two), (two, one)):
        with pytest.raises(PolicyError, match="given twice"):
            both(*rules)


def test_rules_that_differ_in_the_query_are_two():
    both(f"{OPAQUE}, query: {{a: b}}", f"{OPAQUE}, query: {{a: c}}", f"{OPAQUE}, methods: [GET]")


@pytest.mark.parametrize("other", ["methods: [GET], ports: [22, 443]", "read_only: true, ports: [22]", "ports: [22]"])
def test_a_raw_rule_makes_others_on_its_port_meaningless(other):
    raw = f"{OPAQUE}, tcp: true, ports: [22]"
    for rules in ((raw, f"{OPAQUE}, {other}"), (f"{OPAQUE}, {other}", raw)):
        with pytest.raises(PolicyError, match=r"go through as they are|given twice"):
            both(*rules)
    both(raw, f"{OPAQUE}, methods: [GET]")


@pytest.mark.parametrize("narrow", ["read_only: true", "store: true", "query_bytes: 0", "tls: inspect"])
def test_a_tunnel_makes_what_must_be_seen_meaningless(narrow):
    with pytest.raises(PolicyError, match=r"tunnels to it are open|given twice"):
        both(OPAQUE, f"{OPAQUE}, {narrow}")


@pytest.mark.parametrize("deny", ["paths: [/x]", "methods: [POST]", "query: {service: git-receive-pack}"])
def test_egress_case_063_denials_of_requests_need_a_rule_that_is_looked_into(deny):
    for rule in (OPAQUE, f"{OPAQUE}, tls: opaque", f"{OPAQUE}, tcp: true, ports: [443]"):
        with pytest.raises(PolicyError, match="cannot be denied") as caught:
            both(rule, deny=f"{OPAQUE}, {deny}")
        assert caught.value.key == "egress.deny[0].host"
    assert both(f"{OPAQUE}, tls: inspect", deny=f"{OPAQUE}, {deny}").egress.deny[0].needs_sight


def test_denials_by_query_that_close_a_rule_altogether():
    with pytest.raises(PolicyError, match="never takes effect"):
        both(f"{OPAQUE}, query: {{a: b, c: d}}", deny=f"{OPAQUE}, query: {{a: b}}")
    both(f"{OPAQUE}, query: {{a: b}}", deny=f"{OPAQUE}, query: {{a: c}}")
    both(f"{OPAQUE}, read_only: true", deny=f"{OPAQUE}, query: {{a: c}}")
    with pytest.raises(PolicyError, match="never takes effect"):
        both(f"{OPAQUE}, read_only: true", deny=f"{OPAQUE}, methods: [GET, HEAD]")


# ------------------------------------------------------------------------------------------ rows


def test_rows_say_what_a_rule_does():
    notes = {
        "tcp: true, ports: [22]": "raw bytes",
        "tls: opaque": "TLS is not looked into",
        "read_only: true": "no body",
        "query: {a: b}": "query a=b",
        "websocket: true": "WebSocket",
        "credential: k": "the credential k is added",
        "strip_credentials: true": "credentials are removed",
        "store: true": "kept and served again",
        "encoded_slash: true": "%2F",
        "ech: deny": "encrypted server names: deny",
        "query_bytes: 9": "query_bytes at most 9",
        "limits: {bytes_out: 9}": "bytes_out at most 9",
        "unsafe_many_owners: true": "UNSAFE",
    }
    for key, note in notes.items():
        row = explain(policy(f"{OPAQUE}, {key}"))[0]
        assert row.kind is RowKind.ALLOW
        assert note in row.note
        assert row.source == ""


def test_unsafe_options_are_listed():
    assert unsafe_options(policy(OPAQUE)) == ()
    text = both(
        "host: '*.github.io', unsafe_many_owners: true", OPAQUE, "host: s3.amazonaws.com, unsafe_many_owners: true"
    )
    assert unsafe_options(text) == (
        "unsafe_many_owners *.github.io: line 4",
        "unsafe_many_owners s3.amazonaws.com: line 6",
    )
