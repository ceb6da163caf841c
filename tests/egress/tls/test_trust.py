"""The files and variables by which a sandbox trusts its run; that real clients do is in test_clients.py."""

from __future__ import annotations

import ssl

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import pkcs12

from stockade.egress import _trust
from stockade.egress._trust import TRUST_FOLDER, system_roots, trust_env, trust_files
from stockade.errors import NodeError
from tests.egress.tls.harness import Run
from tests.support import requires


@pytest.fixture(scope="module")
def roots() -> bytes:
    return b"".join(trustme.CA(organization_name=f"root {number}").cert_pem.bytes() for number in range(2))


def test_files_hold_the_authority_and_the_roots(run: Run, roots: bytes) -> None:
    files = trust_files(run.authority.cert_pem, roots)
    assert files["ca.pem"] == run.authority.cert_pem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=files["bundle.pem"].decode())
    assert len(context.get_ca_certs()) == 3
    store = pkcs12.load_pkcs12(files["truststore.p12"], b"changeit")
    assert [one.friendly_name for one in store.additional_certs] == [b"stockade-0", b"stockade-1", b"stockade-2"]
    assert not any(b"PRIVATE" in data for data in files.values())


def test_a_root_that_cannot_be_read_is_left_out_of_javas_store(run: Run, roots: bytes) -> None:
    broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    store = pkcs12.load_pkcs12(trust_files(run.authority.cert_pem, roots + broken)["truststore.p12"], b"changeit")
    assert len(store.additional_certs) == 3


def test_variables_point_at_files_that_are_there(run: Run, roots: bytes) -> None:
    files = trust_files(run.authority.cert_pem, roots)
    variables = trust_env()
    named = " ".join(variables.values()) + " " + (files["wgetrc"] + files["apt.conf"]).decode()
    paths = {word.strip('";').rpartition("=")[2] for word in named.split() if TRUST_FOLDER in word}
    assert paths == {f"{TRUST_FOLDER}/{name}" for name in files if name != "ca.pem"}  # that one is for people
    for name in ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "REQUESTS_CA_BUNDLE"):
        assert variables[name] == f"{TRUST_FOLDER}/bundle.pem"


def test_the_hosts_roots_are_found(tmp_path, monkeypatch, roots: bytes) -> None:
    own = tmp_path / "own.pem"
    own.write_bytes(b"# a comment\n" + roots + b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    found = system_roots()
    assert found.count(b"BEGIN CERTIFICATE") == 2
    assert b"PRIVATE" not in found
    # One that names nothing does not hide what the system has.
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    monkeypatch.setattr(_trust, "_SYSTEM_BUNDLES", (str(tmp_path / "empty.pem"), str(own)))
    (tmp_path / "empty.pem").touch()
    assert system_roots() == found


def test_a_host_without_roots_is_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    monkeypatch.setattr(_trust, "_SYSTEM_BUNDLES", ())
    default = ssl.get_default_verify_paths()
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: default._replace(openssl_cafile="/nowhere"))
    with pytest.raises(NodeError, match="ca-certificates"):
        system_roots()


def test_this_hosts_own_roots_can_be_used(monkeypatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    requires(any(map(_exists, _trust._SYSTEM_BUNDLES)), "no root certificates on this host", must_run_in_ci=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=system_roots().decode("ascii"))
    assert context.get_ca_certs()


def _exists(path: str) -> bool:
    try:
        with open(path, "rb"):
            return True
    except OSError:
        return False
