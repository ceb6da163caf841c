"""The certificate authority of one run: made by the agent, used by its workers, trusted by its sandboxes only.

Two tiers. The root, which sandboxes trust, signs one issuing certificate, and its key is gone before anybody knows it.
The issuing key exists in the memory of the agent and its workers, and nowhere else (egress case 80). Both certificates
are name-constrained (RFC 5280 section 4.2.1.10) to the hosts that the policy can inspect, so a key that gets out is
worth nothing against any other host. One tier would do for OpenSSL, GnuTLS and rustls; Java does not look at the
constraints of a root.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LIFETIME = dt.timedelta(days=7)
BACKDATED = dt.timedelta(hours=1)
"""Clocks of sandboxes that were restored from a snapshot may be behind."""

_NO_HOST = "stockade.invalid"
"""Permitted where no name is: a list without any DNS name would leave all of them open (RFC 2606: never resolves)."""
_COMMON_NAME_MAX = 64


@dataclass(frozen=True, slots=True)
class Authority:
    """``cert_pem`` is the root, for everyone; ``key_pem`` the issuing certificate and its key, for workers alone.

    The key is PKCS #8, not encrypted.
    """

    cert_pem: bytes
    key_pem: bytes = field(repr=False)


def make_authority(
    permitted: Sequence[str] | None,
    *,
    run_id: str,
    lifetime: dt.timedelta = LIFETIME,
    now: dt.datetime | None = None,
) -> Authority:
    """Make a fresh P-256 authority that can vouch for ``permitted`` and for nothing else.

    ``permitted`` holds canonical host names, ``*.`` suffixes and IP literals, as rules spell them. A constraint has no
    leading dot, because validators disagree about one; so a name permits its subdomains, and a suffix its apex too. That
    is wider than the rule by names that the gate decides about anyway. Raises ValueError for an entry that is neither a
    name nor an address. None permits everything: for a run that finds out which hosts are asked for.
    """
    constraints = None if permitted is None else _constraints(permitted)
    start = (now or dt.datetime.now(dt.UTC)) - BACKDATED
    end = start + BACKDATED + lifetime
    root, issuing = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    # The run's ID stands in the names, so that two authorities never share one: validators look issuers up by name.
    names = [_common_name(f"stockade run {run_id}"), _common_name(f"stockade issuing {run_id}")]

    def certify(subject: int, key: ec.EllipticCurvePublicKey, path_length: int) -> x509.Certificate:
        builder = x509.CertificateBuilder(names[0], names[subject], key, x509.random_serial_number(), start, end)
        if constraints is not None:
            builder = builder.add_extension(constraints, critical=True)
        return (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
            .add_extension(_CA_USAGE, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False)
            .sign(root, hashes.SHA256())
        )

    certificate = certify(1, issuing.public_key(), 0).public_bytes(serialization.Encoding.PEM)
    key = issuing.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Authority(certify(0, root.public_key(), 1).public_bytes(serialization.Encoding.PEM), certificate + key)


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_COMMON_NAME_MAX])])


_CA_USAGE = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


def _constraints(permitted: Sequence[str]) -> x509.NameConstraints:
    """Return the constraints; a kind of name that is not permitted at all is excluded as a whole."""
    names: set[str] = set()
    networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
    for text in permitted:
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError:
            names.add(_name(text))
    subtrees: list[x509.GeneralName] = [x509.DNSName(name) for name in _outermost(names) or [_NO_HOST]]
    subtrees += [x509.IPAddress(network) for network in sorted(set(networks), key=str)]
    excluded: list[x509.GeneralName] = []
    for version, everything in ((4, "0.0.0.0/0"), (6, "::/0")):
        if all(network.version != version for network in networks):
            excluded.append(x509.IPAddress(ipaddress.ip_network(everything)))
    return x509.NameConstraints(permitted_subtrees=subtrees, excluded_subtrees=excluded or None)


def _name(text: str) -> str:
    name = text.removeprefix("*.")
    labels = name.split(".")
    if not name.isascii() or name != name.lower() or any(not _plain_label(label) for label in labels):
        raise ValueError(f"neither a canonical host name nor an address: {text!r}")
    return name


def _plain_label(label: str) -> bool:
    return bool(label) and label.replace("-", "").replace("_", "").isalnum()


def _outermost(names: Iterable[str]) -> list[str]:
    """Drop names below another one: each is compared with every leaf name by every client."""
    kept: set[str] = set()
    for name in sorted(names, key=lambda name: name.count(".")):
        labels = name.split(".")
        if not any(".".join(labels[start:]) in kept for start in range(len(labels))):
            kept.add(name)
    return sorted(kept)
