"""Files of secrets: read late, only where they are private, and shown nowhere."""

from __future__ import annotations

import os

import pytest

from stockade.errors import ConfigError, PolicyError
from stockade.policy import (
    OperatorConfig,
    check_site,
    parse_document,
    parse_policy,
    read_credentials,
    read_known_secrets,
)
from tests.support import requires

KEY = "sk-canary-0123456789"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


def credentials(path) -> OperatorConfig:
    text = f"version: 1\ncredentials: [{{name: api, header: Authorization, prefix: 'Bearer ', file: '{path}'}}]\n"
    return parse_document(text, OperatorConfig, source="operator.yaml")


def known(path) -> OperatorConfig:
    text = f"version: 1\nknown_secrets: [{{name: deploy, file: '{path}'}}]\n"
    return parse_document(text, OperatorConfig, source="operator.yaml")


def test_a_credential_is_read(secret):
    (one,) = read_credentials(credentials(secret))
    assert (one.name, one.header, one.value, one.secret) == ("api", "authorization", f"Bearer {KEY}", KEY)
    assert read_credentials(OperatorConfig(version=1)) == ()


def test_values_are_in_no_repr(secret):
    assert KEY not in repr(read_credentials(credentials(secret)))
    assert KEY not in repr(read_known_secrets(known(secret)))


@pytest.mark.parametrize("data", [b"", b"\n", b"a b\n", b"a\nb\n", b"a\rb", b"a\0b", b"\xff\xfe", "schlüssel".encode()])
def test_a_credential_is_one_line_of_visible_ascii(secret, data):
    secret.write_bytes(data)
    with pytest.raises(ConfigError, match=r"one line of visible ASCII|not UTF-8") as caught:
        read_credentials(credentials(secret))
    assert str(secret) in str(caught.value)


@pytest.mark.parametrize(
    "read", [lambda path: read_credentials(credentials(path)), lambda path: read_known_secrets(known(path))]
)
class TestFiles:
    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o610, 0o666])
    def test_egress_case_093_files_that_others_reach(self, secret, read, mode):
        secret.chmod(mode)
        with pytest.raises(ConfigError, match="not private to its owner") as caught:
            read(secret)
        assert caught.value.hint == f"run: chmod 600 {secret}"
        assert KEY not in str(caught.value)

    @pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
    def test_files_that_nobody_else_reaches(self, secret, read, mode):
        secret.chmod(mode)
        assert read(secret)

    def test_links_are_not_followed(self, secret, read, tmp_path):
        link = tmp_path / "link"
        link.symlink_to(secret)
        with pytest.raises(ConfigError, match="cannot be read"):
            read(link)

    def test_what_is_no_file(self, read, tmp_path):
        with pytest.raises(ConfigError, match="not a regular file"):
            read(tmp_path)
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            read(tmp_path / "none")

    def test_a_fifo_does_not_hang(self, read, tmp_path):
        os.mkfifo(tmp_path / "fifo", 0o600)
        with pytest.raises(ConfigError, match="not a regular file"):
            read(tmp_path / "fifo")

    def test_a_file_that_is_too_large(self, secret, read):
        secret.write_text("a" * 16_385)
        with pytest.raises(ConfigError, match="larger than 16 KiB"):
            read(secret)

    def test_a_file_of_another_user(self, secret, read):
        requires(os.geteuid() == 0, "only root may give a file away", must_run_in_ci=False)
        os.chown(secret, 12_345, 12_345)
        with pytest.raises(ConfigError, match="belongs to another user"):
            read(secret)


def test_known_secrets_are_lines_that_no_traffic_holds_by_chance(secret):
    secret.write_text(
        "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nshort\nAAAAAAAAAAAAAAAA\nMIIEvQIBADANBgkq\n-----END KEY-----\n"
    )
    found = read_known_secrets(known(secret))
    assert [(one.name, one.value) for one in found] == [("deploy", "MIIEvQIBADANBgkq"), ("deploy", "A" * 16)]
    secret.write_text("short\n\n-----BEGIN-----\n")
    with pytest.raises(ConfigError, match="no line of at least 8 characters"):
        read_known_secrets(known(secret))


# --------------------------------------------------------------------- what a policy needs of its site


def policy(body: str):
    return parse_policy(f"version: 1\negress:\n{body}", source="p")


def test_a_credential_that_the_operator_lacks(secret):
    wants = policy(
        "  presets: [pypi-read]\n  allow:\n    - {host: b.example}\n    - {host: a.example, credential: apy}\n"
    )
    with pytest.raises(PolicyError, match="no credential 'apy'") as caught:
        check_site(wants, credentials(secret), path="policy.yaml")
    assert (caught.value.line, caught.value.key) == (6, "egress.allow[1].credential")
    assert "did you mean 'api'" in str(caught.value.hint)
    assert str(caught.value).startswith("policy.yaml:6: egress.allow[1].credential:")
    with pytest.raises(PolicyError, match="none at all"):
        check_site(wants, OperatorConfig(version=1))
    check_site(policy("  allow:\n    - {host: a.example, credential: api}\n"), credentials(secret))


@pytest.mark.parametrize("mode", ["record", "replay", "'off'"])
def test_recording_needs_nothing_of_the_operators(mode):
    wants = policy(f"  mode: {mode}\n")
    check_site(wants, OperatorConfig(version=1))
    check_site(wants, parse_document("version: 1\nstore: {path: /var/cache/s}\n", OperatorConfig, source="o"))


def test_egress_case_095_where_names_are_looked_up_elsewhere_only_exact_hosts_hold():
    text = "version: 1\nupstream: {url: 'http://p.example:3128', name_only: %s}\n"
    site, checked = (parse_document(text % word, OperatorConfig, source="o") for word in ("true", "false"))
    wide = policy("  allow:\n    - {host: '*.a.example'}\n")
    with pytest.raises(PolicyError, match="a wildcard cannot be kept") as caught:
        check_site(wide, site)
    assert (caught.value.line, caught.value.key) == (4, "egress.allow[0].host")
    check_site(wide, checked)
    gateway = parse_document("version: 1\nupstream: {url: 'unix:/run/g', gateway: true}\n", OperatorConfig, source="o")
    check_site(wide, gateway)
    check_site(policy("  presets: [pypi-read, npm-read, debian-read, github-read, huggingface-read]\n"), site)
