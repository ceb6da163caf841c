"""Credentials of the operator: put in by rule, never seen inside, and nobody else's beside them (case 97)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec
import pytest

from stockade.egress.gate import Credential
from tests.egress.netlab import NetLab, Origin, response
from tests.egress.proxy.harness import Attached, rules
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, policy

SECRET = "Bearer s3cret-of-the-operator"
KEYS = (Credential("model", "Authorization", SECRET), Credential("forge", "Private-Token", "glpat-\xe9\xe8-operator"))
POLICY = policy(
    '{host: api.test, credential: model, methods: [GET, POST], paths: ["/v1/**"]}',
    '{host: api.test, methods: [GET], paths: ["/open/**"]}',
    "{host: strip.test, credential: model, strip_credentials: true}",
    "{host: bare.test, strip_credentials: true}",
    "{host: forge.test, credential: forge, methods: [GET]}",
    "{host: other.test, methods: [GET, POST], ports: [80, 443]}",
    limits=LIMITS,
)
HOSTS = ("api.test", "strip.test", "bare.test", "forge.test", "other.test")


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(sites: Sites) -> Origin:
    return sites.site(*HOSTS)


@pytest.fixture
def site(sites: Sites, shared: Origin) -> Origin:
    shared.received.clear()
    shared.respond = lambda _request: response(b"hello")
    for host in HOSTS:
        sites.lab.add_host(host, IP)
    return shared


@pytest.fixture
def rollout(sites: Sites) -> Attached:
    return sites.attach(POLICY, credentials=KEYS)


def test_egress_case_097_the_credential_is_put_in(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, "api.test") as client:
        for method, body in (("GET", b""), ("POST", b"data"), ("GET", b"")):
            assert ask(client, "api.test", "/v1/x", method=method, body=body).status == 200
    assert [one.header("authorization") for one in site.received] == [[SECRET.encode()]] * 3
    assert "s3cret" not in rollout.record.read_text()
    end = rollout.wait("net.end", 2)[1]
    assert end["bytes_out"] == len(site.received[0].head), "what is put in is counted: it left"


def test_egress_case_097_a_value_need_not_be_ascii(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, "forge.test") as client:
        assert ask(client, "forge.test").status == 200
    assert site.received[0].header("private-token") == ["glpat-\xe9\xe8-operator".encode("latin-1")]


FOREIGN = [
    "Authorization: Bearer attacker",
    "authorization: Basic eDp5",
    "Cookie: session=attacker",
    "X-Api-Key: attacker",
    "x-goog-api-key: attacker",
    "API-Key: attacker",
    "X-Auth-Token: attacker",
    "Private-Token: attacker",
    "X_Api_Key: attacker",
    "Anthropic-Api-Key: attacker",
    "X-Amz-Security-Token: attacker",
]


@pytest.mark.parametrize("line", FOREIGN)
@pytest.mark.parametrize("path", ["/v1/x", "/open/x"])
def test_egress_case_097_foreign_credentials_are_refused(
    line: str, path: str, sites: Sites, rollout: Attached, site: Origin
) -> None:
    """By the rule that injects, and by any other rule of the same host: both lead to the same service."""
    queries = len(sites.lab.dns.queries)
    with sites.inside(rollout, "api.test") as client:
        reply = ask(client, "api.test", path, line)
    assert (reply.status, reply.reason) == (403, "foreign_credential")
    event = rollout.last("net.request")
    assert (event["verdict"], event["reason"], event["severity"]) == ("denied", "foreign_credential", 4)
    assert "attacker" not in rollout.record.read_text()
    assert site.received == []
    assert len(sites.lab.dns.queries) == queries


@pytest.mark.parametrize(
    "query", ["api_key=x", "a=1&access_token=x", "x-goog-api-key=x", "key=AIzaSy", "a=1;private_token=x", "APIKEY=x"]
)
@pytest.mark.parametrize("host", ["api.test", "strip.test"])
def test_egress_case_097_foreign_credentials_in_the_query(
    query: str, host: str, sites: Sites, rollout: Attached, site: Origin
) -> None:
    with sites.inside(rollout, host) as client:
        assert ask(client, host, f"/v1/x?{query}").reason == "foreign_credential"
    assert site.received == []


def test_egress_case_097_a_placeholder_is_replaced_where_the_rule_strips(
    sites: Sites, rollout: Attached, site: Origin
) -> None:
    lines = ("Authorization: Bearer placeholder", "authorization: Bearer second", "X-Api-Key: mine", "Cookie: a=b")
    with sites.inside(rollout, "strip.test") as client:
        assert ask(client, "strip.test", "/x", *lines, "X-Other: stays").status == 200
    (request,) = site.received
    assert request.header("authorization") == [SECRET.encode()]
    assert request.header("x-other") == [b"stays"]
    for gone in (b"placeholder", b"second", b"mine", b"cookie"):
        assert gone not in request.head.lower()


def test_egress_case_097_stripped_without_anything_in_its_place(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, "bare.test") as client:
        assert ask(client, "bare.test", "/x", "Authorization: Bearer mine", "Cookie: a=b").status == 200
    assert b"authorization" not in site.received[0].head.lower()
    assert b"cookie" not in site.received[0].head.lower()


def test_it_goes_to_its_own_rule_and_to_no_other(sites: Sites, rollout: Attached, site: Origin) -> None:
    """Also on the same upstream connection, and whatever redirects say."""
    site.respond = lambda _request: response(b"", "302 Found", "Location: https://other.test/v1/x")
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", "/v1/x").status == 302
        assert ask(client, "api.test", "/open/x").status == 302
        assert ask(client, "api.test", "/v1/x").status == 302
    with sites.inside(rollout, "other.test") as client:
        assert ask(client, "other.test", "/v1/x", "Authorization: Bearer mine").status == 302
    assert [one.header("authorization") for one in site.received] == [
        [SECRET.encode()],
        [],
        [SECRET.encode()],
        [b"Bearer mine"],
    ]


def test_it_never_goes_in_clear(sites: Sites, site: Origin) -> None:
    """No policy says so; rules that say it all the same are not followed."""
    compiled = rules(POLICY, inspection=True, credentials=KEYS)
    careless = tuple(msgspec.structs.replace(rule, ports=(80, 443)) for rule in compiled.allow)
    rollout = sites.worker.attach(dataclasses.replace(compiled, allow=careless))
    plain = sites.lab.http(IP, 80)
    with rollout.connect() as client:
        assert client.get("http://api.test/v1/x").status == 403
    with rollout.connect() as client:
        assert client.connect("api.test", 80).status == 200
        assert ask(client, "api.test", "/v1/x").status == 403
    assert plain.connections == 0
    plain.close()


def test_it_never_goes_to_a_server_that_cannot_prove_its_name(sites: Sites, rollout: Attached, site: Origin) -> None:
    impostor = sites.site("api.test", ip="11.0.0.84", context=sites.context("other.test"))
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", "/v1/x").reason == "upstream_tls"
    assert impostor.received == []
    assert rollout.wait("net.end", 2)[-1]["bytes_out"] == 0
    impostor.close()


@pytest.mark.parametrize("line", ["Connection: Authorization", "Connection: close, authorization"])
def test_a_client_cannot_have_it_taken_out(line: str, sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", "/v1/x", line).status == 200
    assert site.received[0].header("authorization") == [SECRET.encode()]


def test_the_path_is_judged_before_it_is_put_in(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", "/v2/x").reason == "path_not_allowed"
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", "/v1/x", method="DELETE").reason == "method_not_allowed"
    assert site.received == []


def test_it_is_in_no_message_of_the_worker(sites: Sites, rollout: Attached, site: Origin) -> None:
    """A credential that is no header value is refused without being told."""
    with pytest.raises(ValueError, match="model") as caught:
        sites.attach(POLICY, credentials=(Credential("model", "Authorization", "a\r\nX-Evil: 1"), KEYS[1]))
    assert "X-Evil" not in str(caught.value)
    for one in KEYS:
        assert one.value not in repr(one)
    assert "s3cret" not in str(sites.worker.ask("stats"))


def test_a_websocket_gets_it_too(sites: Sites, site: Origin) -> None:
    rollout = sites.attach(policy("{host: api.test, credential: model, websocket: true}"), credentials=KEYS)
    lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: x")
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", "/", *lines).status == 200, "this server has none"
    assert site.received[0].header("authorization") == [SECRET.encode()]
    assert site.received[0].header("upgrade") == [b"websocket"]


def test_the_worker_has_counted_no_fault(sites: Sites) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == 0
