"""The authority of a run and a worker's mint: what they vouch for, how much, and what it costs."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import ssl
from collections.abc import Callable

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress import _authority, _mint
from stockade.egress._authority import make_authority
from stockade.egress._mint import CACHED_LEAVES, MINT_BURST, MINTS_PER_S, Mint, MintBusy
from tests.egress.tls.harness import HOST, OUTSIDE, Run

Clock = Callable[[], float]


def shake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Shake hands in memory; return the client's and the server's side."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(down, up, server_hostname=host)
    other = server.wrap_bio(up, down, server_side=True)
    for side in (one, other, one, other, one):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return one, other


def constraints(permitted: list[str]) -> tuple[set[object], set[object]]:
    """Return the values of the permitted and excluded subtrees, after checking that both tiers have the same."""
    made = make_authority(permitted, run_id="r")
    root, issuing = x509.load_pem_x509_certificate(made.cert_pem), x509.load_pem_x509_certificate(made.key_pem)
    found = [one.extensions.get_extension_for_class(x509.NameConstraints) for one in (root, issuing)]
    assert found[0].value == found[1].value
    assert found[0].critical
    assert found[1].critical
    value = found[0].value
    return (
        {name.value for name in value.permitted_subtrees or ()},
        {name.value for name in value.excluded_subtrees or ()},
    )


ALL_V4, ALL_V6 = ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")


@pytest.mark.promise("S3.12")
@pytest.mark.parametrize(
    ("permitted", "names", "excluded"),
    [
        ([], {"stockade.invalid"}, {ALL_V4, ALL_V6}),
        (["b.test", "a.test", "a.test"], {"a.test", "b.test"}, {ALL_V4, ALL_V6}),
        (["*.a.test", "a.test", "x.y.a.test", "ba.test"], {"a.test", "ba.test"}, {ALL_V4, ALL_V6}),
        (["192.0.2.7"], {"stockade.invalid", ipaddress.ip_network("192.0.2.7/32")}, {ALL_V6}),
        (["a.test", "2001:db8::7"], {"a.test", ipaddress.ip_network("2001:db8::7/128")}, {ALL_V4}),
        (["xn--bcher-kva.example", "_srv.a-b.test"], {"xn--bcher-kva.example", "_srv.a-b.test"}, {ALL_V4, ALL_V6}),
    ],
)
def test_the_authority_is_constrained_to_what_is_permitted(permitted, names, excluded) -> None:
    assert constraints(permitted) == (names, excluded)


@pytest.mark.parametrize(
    "text", ["", ".", "*", "*.", ".a.test", "a..test", "a.test.", "A.test", "bücher.example", "a b"]
)
def test_what_is_neither_a_name_nor_an_address_is_an_error(text) -> None:
    with pytest.raises(ValueError):
        make_authority([text], run_id="r")


def test_the_authority_lives_for_a_week_and_names_its_run() -> None:
    now = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    made = make_authority([HOST], run_id="x" * 100, now=now)
    root, issuing = x509.load_pem_x509_certificate(made.cert_pem), x509.load_pem_x509_certificate(made.key_pem)
    for one in (root, issuing):
        assert one.not_valid_before_utc == now - dt.timedelta(hours=1)
        assert one.not_valid_after_utc == now + dt.timedelta(days=7)
    assert root.subject == root.issuer == issuing.issuer != issuing.subject
    assert "stockade run xxx" in root.subject.rfc4514_string()
    paths = [one.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length for one in (root, issuing)]
    assert paths == [1, 0]


@pytest.mark.promise("S3.12")
def test_egress_case_080_the_key_is_not_where_the_certificate_goes() -> None:
    made = make_authority([HOST], run_id="r")
    assert b"PRIVATE" not in made.cert_pem
    assert "PRIVATE" not in repr(made)
    assert made.cert_pem.count(b"BEGIN CERTIFICATE") == 1  # the root, whose key nobody has any more
    root = x509.load_pem_x509_certificate(made.cert_pem)
    assert root.public_key() != x509.load_pem_x509_certificate(made.key_pem).public_key()
    assert make_authority([HOST], run_id="r").key_pem != made.key_pem


def test_a_strict_client_accepts_a_leaf(run) -> None:
    for host in (HOST, "below." + HOST, "wild.test", "a.b.wild.test", "192.0.2.7", "2001:db8::7"):
        client, server = shake(run.mint.context(host), run.client(), host)
        assert client.version() == "TLSv1.3"
        assert server.version() == "TLSv1.3"
        certificate = client.getpeercert()
        assert certificate is not None
        assert str(certificate["subjectAltName"][0][1]).lower() in (host, "2001:db8:0:0:0:0:0:7")


@pytest.mark.parametrize("host", [OUTSIDE, "xfiles.test", "test", "192.0.2.8", "2001:db8::8"])
def test_a_strict_client_refuses_a_leaf_for_another_host(host, run) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="subtree violation"):
        shake(run.mint.context(host), run.client(), host)


def test_an_authority_without_hosts_vouches_for_none() -> None:
    empty = Run(())
    try:
        for host in (HOST, "192.0.2.7", "2001:db8::7"):
            with pytest.raises(ssl.SSLCertVerificationError, match="subtree violation"):
                shake(empty.mint.context(host), empty.client(), host)
    finally:
        empty.close()


def test_a_mint_takes_no_parts_that_do_not_belong_together() -> None:
    one, other = make_authority([HOST], run_id="r"), make_authority([HOST], run_id="r")
    with pytest.raises(ValueError, match="not the authority's"):
        Mint(other.cert_pem, one.key_pem)
    end = b"-----END CERTIFICATE-----\n"
    mixed = one.key_pem.partition(end)[0] + end + other.key_pem.partition(end)[2]
    with pytest.raises(ValueError, match="not that of its certificate"):
        Mint(one.cert_pem, mixed)
    with pytest.raises(ValueError):
        Mint(one.cert_pem, b"")


def test_egress_case_081_leaves_are_bounded_in_number_and_in_rate(run) -> None:
    now = [0.0]
    mint = Mint(run.authority.cert_pem, run.authority.key_pem, clock=lambda: now[0])
    try:
        first = [mint.context(f"{number}.wild.test") for number in range(MINT_BURST)]
        with pytest.raises(MintBusy) as busy:
            mint.context("one.too.many.wild.test")
        assert busy.value.retry_s == pytest.approx(1 / MINTS_PER_S)
        assert mint.context("0.wild.test") is first[0]  # what is there costs nothing
        now[0] += busy.value.retry_s
        mint.context("one.too.many.wild.test")
        with pytest.raises(MintBusy):
            mint.context("two.too.many.wild.test")
        for number in range(CACHED_LEAVES):
            now[0] += 1 / MINTS_PER_S
            mint.context(f"again.{number}.wild.test")
        assert len(mint._cache) == CACHED_LEAVES
        assert mint.context("again.0.wild.test") is not None
        now[0] += 1
        assert mint.context("0.wild.test") is not first[0]
        now[0] += 3600
        for number in range(MINT_BURST):
            mint.context(f"later.{number}.wild.test")
        with pytest.raises(MintBusy):
            mint.context("no.savings.wild.test")
    finally:
        mint.close()


@pytest.mark.parametrize(("offered", "chosen"), [(["h2", "http/1.1"], "http/1.1"), (["h2"], None), ([], None)])
def test_egress_case_083_only_http_1_1_is_spoken(offered, chosen, run) -> None:
    client = run.client()
    if offered:
        client.set_alpn_protocols(offered)
    one, other = shake(run.mint.context(HOST), client, HOST)
    assert one.selected_alpn_protocol() == chosen
    assert other.selected_alpn_protocol() == chosen


def test_clients_get_no_tickets_compression_or_second_handshake(run) -> None:
    context = run.mint.context(HOST)
    client, _ = shake(context, run.client(), HOST)
    with pytest.raises(ssl.SSLWantReadError):
        client.read(1)
    assert client.session is None or not client.session.has_ticket
    assert client.compression() is None
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_sessions_that_openssl_keeps_are_given_up(run, monkeypatch) -> None:
    monkeypatch.setattr(_mint, "_KEPT_SESSIONS", 5)
    client = run.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.options |= ssl.OP_NO_TICKET
    host = "sessions.wild.test"
    seen = 0
    contexts = set()
    for _ in range(200):
        context = run.mint.context(host)
        contexts.add(id(context))
        _, server = shake(context, client, host)
        with contextlib.suppress(ssl.SSLWantReadError):
            server.unwrap()  # as a connection that is closed properly does; else OpenSSL forgets its session at once
        seen = max(seen, context.session_stats()["number"])
    assert 5 < seen <= 5 + 2 * _mint._USES_PER_CHECK
    assert len(contexts) > 1


def test_closing_gives_the_descriptors_back(run) -> None:
    before = os.listdir("/proc/self/fd")
    mint = Mint(run.authority.cert_pem, run.authority.key_pem)
    context = mint.context(HOST)
    mint.close()
    mint.close()
    assert os.listdir("/proc/self/fd") == before
    shake(context, run.client(), HOST)  # what was handed out goes on


LABELS = st.lists(st.sampled_from(["a", "b", "ab", "x-y", "test"]), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(st.sampled_from(["", "*."]), LABELS).map(lambda pair: pair[0] + ".".join(pair[1])), max_size=12)
)
def test_every_permitted_name_is_covered_and_none_is_listed_twice(permitted) -> None:
    names = {_authority._name(text) for text in permitted}
    kept = _authority._outermost(names)
    for name in names:
        assert sum(name == one or name.endswith("." + one) for one in kept) == 1
    assert set(kept) <= names
