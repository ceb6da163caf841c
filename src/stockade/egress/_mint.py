"""A worker's part of TLS inspection: leaves for the client's side, verification for the upstream's side.

Everything here works after the lock-down: a leaf reaches OpenSSL through a memfd, and :func:`warm` loads beforehand
what Python and both TLS libraries would otherwise look for on the disk at first use.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stockade.egress._authority import make_authority

CACHED_LEAVES = 256
"""Most hosts with a ready leaf, 20 KiB each; the one longest unused goes first (egress case 81)."""
MINT_BURST = 64
MINTS_PER_S = 32.0
"""A leaf costs 1.5 ms, so minting never takes more than a twentieth of a core for long (case 81)."""
CACHED_SESSIONS = 256
SESSION_S = 600.0
"""A session with an upstream is resumed for this long; then its certificate is verified anew."""

_WARM = "warm.invalid"
_USES_PER_CHECK = 64
_KEPT_SESSIONS = 256
_PROTOCOLS = ["http/1.1"]
_OPTIONS = ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION


class MintBusy(Exception):
    """Too many new names at once; in ``retry_s`` seconds there is a leaf again."""

    def __init__(self, retry_s: float) -> None:
        super().__init__("too many new names for certificates")
        self.retry_s = retry_s


@dataclass(slots=True)
class _Leaf:
    """What one host's connections share. ``pem`` is kept because a context can have to be made again."""

    pem: bytes
    context: ssl.SSLContext
    uses: int = 0


class Mint:
    """Makes a leaf per host, all with one key that never leaves this process.

    ``clock`` gives monotonic seconds. :meth:`close` gives the two memfds back; a worker ends with its Mint.
    """

    __slots__ = ("_cache", "_clock", "_fds", "_filled_s", "_issuer", "_key", "_left", "_signer")

    def __init__(self, cert_pem: bytes, key_pem: bytes, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take both parts of an Authority; raise ValueError if they do not belong together."""
        warm()
        signer = serialization.load_pem_private_key(key_pem, password=None)
        self._issuer = x509.load_pem_x509_certificate(key_pem)
        if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != self._issuer.public_key():
            raise ValueError("the key is not that of its certificate")
        try:
            self._issuer.verify_directly_issued_by(x509.load_pem_x509_certificate(cert_pem))
        except InvalidSignature:
            raise ValueError("the key is not the authority's") from None
        self._signer = signer
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._clock = clock
        self._left = float(MINT_BURST)
        self._filled_s = clock()
        self._cache: OrderedDict[str, _Leaf] = OrderedDict()
        self._fds = (_memfd(), _memfd())
        _rewrite(self._fds[1], _key_pem(self._key))

    def context(self, host: str) -> ssl.SSLContext:
        """Return what a client that asked for ``host`` is greeted with; raise :class:`MintBusy` at the rate limit.

        ``host`` is a canonical name or an IP literal. The context offers HTTP/1.1 alone (case 83), TLS 1.2 or later, no
        tickets and no early data; ValueError if ``host`` cannot stand in a certificate.
        """
        leaf = self._cache.get(host)
        if leaf is None:
            self._take()
            pem = self._sign(host)
            leaf = _Leaf(pem, self._context(pem))
            self._cache[host] = leaf
            if len(self._cache) > CACHED_LEAVES:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(host)
            leaf.uses += 1
            # TLS 1.2 clients that know no tickets leave a session each in the context, up to 20,000; ssl has no
            # switch for that, but a new context begins empty.
            if leaf.uses % _USES_PER_CHECK == 0 and leaf.context.session_stats()["number"] > _KEPT_SESSIONS:
                leaf.context = self._context(leaf.pem)
        return leaf.context

    def close(self) -> None:
        """Close the memfds and forget every leaf; idempotent."""
        self._cache.clear()
        fds, self._fds = self._fds, (-1, -1)
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _take(self) -> None:
        now = self._clock()
        self._left = min(float(MINT_BURST), self._left + (now - self._filled_s) * MINTS_PER_S)
        self._filled_s = now
        if self._left < 1:
            raise MintBusy((1 - self._left) / MINTS_PER_S)
        self._left -= 1

    def _sign(self, host: str) -> bytes:
        return _leaf(host, self._key.public_key(), self._issuer, self._signer)

    def _context(self, pem: bytes) -> ssl.SSLContext:
        _rewrite(self._fds[0], pem)
        return _server_context(*self._fds)


def _leaf(
    host: str, key: ec.EllipticCurvePublicKey, issuer: x509.Certificate, signer: ec.EllipticCurvePrivateKey
) -> bytes:
    """Return the PEM of a fresh leaf, valid as long as its issuer, and of the issuer: what a server shows."""
    leaf = (
        x509.CertificateBuilder()
        .subject_name(_SUBJECT)
        .issuer_name(issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
        .add_extension(_LEAF_PURPOSE, critical=False)
        .add_extension(_LEAF_USAGE, critical=True)
        .add_extension(_LEAF, critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return leaf.public_bytes(serialization.Encoding.PEM) + issuer.public_bytes(serialization.Encoding.PEM)


def _server_context(certificate: int, key: int) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    # Without tickets a client shakes hands anew each time: cheaper here than making tickets that few come back with.
    context.num_tickets = 0
    # OpenSSL takes certificates by path only. These paths lead to our own memory, which Landlock does not cover.
    context.load_cert_chain(f"/proc/self/fd/{certificate}", f"/proc/self/fd/{key}")
    return context


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= _OPTIONS
    context.set_alpn_protocols(_PROTOCOLS)


# Not a name of a host, so no client that still looks at it compares it with one.
_SUBJECT = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "stockade inspection")])
_LEAF = x509.BasicConstraints(ca=False, path_length=None)
_LEAF_PURPOSE = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
_LEAF_USAGE = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _memfd() -> int:
    return os.memfd_create("stockade-tls", os.MFD_CLOEXEC)


def _rewrite(fd: int, data: bytes) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)


class UpstreamContext(ssl.SSLContext):
    """Verifies upstream certificates, and remembers sessions so that the next connection to a host costs less.

    A resumed session is not verified again (RFC 8446 section 2.2): it belongs to the host that it was verified for, and
    to that host alone, and only for :data:`SESSION_S`.
    """

    def __init__(self, _protocol: int) -> None:
        self._sessions: OrderedDict[str, tuple[ssl.SSLSession, float]] = OrderedDict()

    def session(self, host: str) -> ssl.SSLSession | None:
        """Return a session to resume with ``host``."""
        session, made_s = self._sessions.get(host, (None, 0.0))
        return session if time.monotonic() - made_s < SESSION_S else None

    def remember(self, host: str, tls: ssl.SSLObject) -> None:
        """Keep the session of a connection that ends, unless it was resumed itself or cannot be."""
        if tls.session_reused:
            return
        session = tls.session
        if session is None or not (session.has_ticket or session.id):
            return
        self._sessions[host] = (session, time.monotonic())
        self._sessions.move_to_end(host)
        if len(self._sessions) > CACHED_SESSIONS:
            self._sessions.popitem(last=False)


def upstream_context(roots_pem: bytes) -> UpstreamContext:
    """Return what every upstream is verified with: certificate, name and purpose, by ``roots_pem`` alone (case 79).

    TLS 1.2 or later, HTTP/1.1 alone. Raises ValueError for no roots, ssl.SSLError for some that cannot be read.
    """
    warm()
    context = UpstreamContext(ssl.PROTOCOL_TLS_CLIENT)  # requires certificates, and checks the name
    _harden(context)
    context.load_verify_locations(cadata=roots_pem.decode("ascii"))
    return context


@functools.cache
def warm() -> None:
    """Shake hands once, in memory: what is loaded at first use is loaded now, before the disk is out of reach."""
    made = make_authority([_WARM], run_id="warm")
    issuer = x509.load_pem_x509_certificate(made.key_pem)
    signer = ec.generate_private_key(ec.SECP256R1())
    files = (_memfd(), _memfd())
    try:
        _rewrite(files[0], _leaf(_WARM, signer.public_key(), issuer, signer))
        _rewrite(files[1], _key_pem(signer))
        context = _server_context(*files)
    finally:
        for fd in files:
            os.close(fd)
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = stranger.wrap_bio(down, up, server_hostname=_WARM)
    server = context.wrap_bio(up, down, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLError):  # it fails in the end: nobody trusts this leaf
            side.do_handshake()
