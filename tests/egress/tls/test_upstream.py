"""What an upstream must show, and what is said when it does not (egress case 79)."""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from stockade.egress._mint import CACHED_SESSIONS, upstream_context
from tests.egress.tls.harness import HOST, LoopThread, Owner
from tests.support import requires

Configure = Callable[[ssl.SSLContext], None]


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture
def owner(looping: LoopThread) -> Iterator[Owner]:
    owner = Owner(looping)
    yield owner
    owner.close()


def outcome(owner: Owner, ca: trustme.CA, configure: Configure, host: str = HOST) -> str | None:
    """Greet an upstream; return what was told."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    configure(server)

    def serve() -> None:
        with contextlib.suppress(OSError), server.wrap_socket(owner.peer, server_side=True) as peer:
            peer.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    owner.greet(upstream_context(ca.cert_pem.bytes()), host)
    told = owner.greeted()
    owner.call("close")
    thread.join(10)
    return told


def leaf(ca: trustme.CA, *names: str, not_after: dt.datetime | None = None) -> Configure:
    return ca.issue_cert(*names, not_after=not_after, key_type=trustme.KeyType.ECDSA).configure_cert


def of_purpose(ca: trustme.CA, folder: Path) -> Configure:
    """A certificate of a client, shown by a server."""
    issuer = x509.load_pem_x509_certificate(ca.cert_pem.bytes())
    signer = serialization.load_pem_private_key(ca.private_key_pem.bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(dt.datetime.now(dt.UTC) + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
        .sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "client.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*form))
    return lambda context: context.load_cert_chain(path)


def test_a_good_upstream_is_accepted(owner, ca) -> None:
    assert outcome(owner, ca, leaf(ca, HOST)) is None


def test_an_address_is_verified_as_one(owner, ca) -> None:
    assert outcome(owner, ca, leaf(ca, "192.0.2.7"), "192.0.2.7") is None


@pytest.mark.promise("S3.12")
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("expired", "certificate: certificate has expired"),
        ("wrong name", "certificate: for another name"),
        ("wrong address", "certificate: for another name"),
        ("self-signed", "certificate: self-signed certificate"),
        ("unknown authority", "certificate: unable to get local issuer certificate"),
        ("wrong purpose", "certificate: unsuitable certificate purpose"),
    ],
)
def test_egress_case_079_a_bad_certificate_is_refused_with_a_reason(what, why, owner, ca, tmp_path) -> None:
    stranger = trustme.CA(key_type=trustme.KeyType.ECDSA)
    yesterday = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    configure = {
        "expired": lambda: leaf(ca, HOST, not_after=yesterday),
        "wrong name": lambda: leaf(ca, "other.test"),
        "wrong address": lambda: leaf(ca, "192.0.2.8"),
        "self-signed": lambda: self_signed(tmp_path),
        "unknown authority": lambda: leaf(stranger, HOST),
        "wrong purpose": lambda: of_purpose(ca, tmp_path),
    }[what]()
    host = "192.0.2.7" if what == "wrong address" else HOST
    assert outcome(owner, ca, configure, host) == why
    assert why.isascii()
    assert HOST not in why


def self_signed(folder: Path) -> Configure:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - dt.timedelta(1), now + dt.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "self.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*form))
    return lambda context: context.load_cert_chain(path)


@pytest.mark.promise("S3.12")
def test_no_fallback_to_clear_text_or_to_an_old_version(looping, ca) -> None:
    for junk, why in (
        (b"HTTP/1.1 200 OK\r\n\r\n", "wrong version number"),
        (b"\x15\x03\x03\x00\x02\x02\x28", "alert handshake failure"),
        (b"\x16\x03\x03\x00\x2a\x02\x00\x00\x26\x03\x02" + bytes(33) + b"\xc0\x13\x00", "unsupported protocol"),
    ):
        owner = Owner(looping)
        owner.greet(upstream_context(ca.cert_pem.bytes()))
        owner.peer.sendall(junk)
        assert owner.greeted() == why
        owner.close()


def test_egress_case_083_an_upstream_that_speaks_only_http_2_is_refused(owner, ca, tmp_path) -> None:
    requires(shutil.which("openssl"), "no openssl", must_run_in_ci=False)
    made = ca.issue_cert(HOST)
    made.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    argv = ["openssl", "s_server", "-accept", "127.0.0.1:0", "-cert", "server.pem", "-alpn", "h2", "-naccept", "1"]
    with subprocess.Popen(
        argv, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("ACCEPT"):
                port = int(line.rsplit(":", 1)[1])
                break
        with contextlib.closing(Relayed(owner, port)):
            owner.greet(upstream_context(ca.cert_pem.bytes()))
            assert owner.greeted() == "alert no application protocol"
            owner.call("close")
        server.terminate()


class Relayed:
    """Joins the other end of an owner to a port."""

    def __init__(self, owner: Owner, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), 10)
        pairs = ((self._sock, owner.peer), (owner.peer, self._sock))
        self._threads = [threading.Thread(target=self._relay, args=pair) for pair in pairs]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _relay(source, target) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                target.sendall(piece)
            target.shutdown(1)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(10)
        self._sock.close()


def test_what_is_remembered_is_bounded(ca) -> None:
    context = upstream_context(ca.cert_pem.bytes())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    leaf(ca, HOST)(server)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname=HOST)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, other, client, other):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    context.remember("early.test", client)  # no ticket has come: nothing to keep
    assert context.session("early.test") is None
    with contextlib.suppress(ssl.SSLWantReadError):
        client.read(1)
    for number in range(CACHED_SESSIONS + 1):
        context.remember(f"{number}.test", client)
    assert context.session("0.test") is None
    assert context.session(f"{CACHED_SESSIONS}.test") is not None


@pytest.mark.parametrize(
    "roots", [b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"]
)
def test_roots_that_are_none_are_an_error(roots) -> None:
    with pytest.raises((ValueError, ssl.SSLError)):
        upstream_context(roots)


def test_upstreams_are_always_verified(ca) -> None:
    context = upstream_context(ca.cert_pem.bytes())
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) == 1
