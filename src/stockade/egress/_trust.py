"""What makes programs in a sandbox trust the run's authority, beside the roots that they would trust anyway.

No file of the image is changed: a folder of files is mounted beside them, and environment variables point there. A
program that reads neither is refused by its own TLS library, never let through unseen.
"""

from __future__ import annotations

import os
import re
import ssl
import warnings

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12

from stockade.errors import NodeError

TRUST_FOLDER = "/etc/stockade-trust"
"""Where the sandbox has the files of :func:`trust_files`."""

_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine, Arch
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora, RHEL and their kin
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",
)
_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----\s.+?-----END CERTIFICATE-----", re.DOTALL)

_BUNDLE_VARIABLES = (
    "SSL_CERT_FILE",  # OpenSSL, and so Python, Ruby, PHP; Go; Rust programs such as uv
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "REQUESTS_CA_BUNDLE",
    "npm_config_cafile",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
    "BUNDLE_SSL_CA_CERT",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    "CONDA_SSL_VERIFY",
    "DENO_CERT",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "HEX_CACERTS_PATH",
    "HTTPLIB2_CA_CERTS",
    "JULIA_SSL_CA_ROOTS_PATH",
    "NIX_SSL_CERT_FILE",
    # Beside the roots that Node was built with: the operator's own are not among those.
    "NODE_EXTRA_CA_CERTS",
    "PERL_LWP_SSL_CA_FILE",
)
# Java insists on a password. It keeps nobody out, and need not: what it protects is public.
_STORE_PASSWORD = "changeit"  # noqa: S105


def system_roots() -> bytes:
    """Return the PEM of the certificates that this host trusts; raise NodeError if it has none.

    ``SSL_CERT_FILE`` of the agent's own environment comes first, then the usual places, then what OpenSSL was built to
    look at.
    """
    places = [os.environ.get("SSL_CERT_FILE"), *_SYSTEM_BUNDLES, ssl.get_default_verify_paths().openssl_cafile]
    for place in filter(None, places):
        try:
            with open(place, "rb") as file:
                blocks = _BLOCK.findall(file.read())
        except OSError:
            continue
        if blocks:
            return b"\n".join(blocks) + b"\n"
    raise NodeError("no trusted root certificates on this host", hint="install ca-certificates, or set SSL_CERT_FILE")


def trust_files(ca_pem: bytes, roots_pem: bytes, *, folder: str = TRUST_FOLDER) -> dict[str, bytes]:
    """Return the files of ``folder`` in the sandbox by name: the run's authority alone, and beside ``roots_pem``.

    The roots stay, for tunnels that nobody looks into. Java's copy lacks those that RFC 5280 does not allow.
    """
    bundle = ca_pem.rstrip() + b"\n" + roots_pem
    store = pkcs12.serialize_java_truststore(
        [
            pkcs12.PKCS12Certificate(certificate, b"stockade-%d" % number)
            for number, certificate in enumerate(_readable(bundle))
        ],
        serialization.BestAvailableEncryption(_STORE_PASSWORD.encode()),
    )
    return {
        "ca.pem": ca_pem,
        "bundle.pem": bundle,
        "truststore.p12": store,
        # GnuTLS has no variable for it; what is built on it is told by its own settings.
        "wgetrc": f"ca_certificate = {folder}/bundle.pem\n".encode(),
        "apt.conf": f'Acquire::https::CaInfo "{folder}/bundle.pem";\n'.encode(),
    }


def _readable(bundle: bytes) -> list[x509.Certificate]:
    """Leave out what the library refuses, or says that it will: old roots with a serial number of 0, for example."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in _BLOCK.findall(bundle):
            try:
                found.append(x509.load_pem_x509_certificate(block))
            except (ValueError, Warning):
                continue
    return found


def trust_env(*, folder: str = TRUST_FOLDER) -> dict[str, str]:
    """Return the variables that point at the files of :func:`trust_files`."""
    java = {
        "trustStore": f"{folder}/truststore.p12",
        "trustStoreType": "PKCS12",
        "trustStorePassword": _STORE_PASSWORD,
    }
    return {
        **dict.fromkeys(_BUNDLE_VARIABLES, f"{folder}/bundle.pem"),
        "JAVA_TOOL_OPTIONS": " ".join(f"-Djavax.net.ssl.{name}={value}" for name, value in java.items()),
        "WGETRC": f"{folder}/wgetrc",
        "APT_CONFIG": f"{folder}/apt.conf",
    }
