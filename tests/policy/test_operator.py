"""The operator's file: what it may open, and what not even it may."""

from __future__ import annotations

import ipaddress

import pytest

from stockade.errors import ConfigError, PolicyError
from stockade.policy import OperatorConfig, load_operator

TEXT = """\
version: 1
unsafe_allow_cidrs:
  - {cidr: 10.20.0.0/24, reason: package mirror of the site}
  - {cidr: "fd00:20::/64", reason: package mirror of the site}
deny_cidrs: [198.51.100.0/24, 10.30.0.0/16]
resolvers: ["10.20.0.2", "10.20.0.3:5353", "fd00:20::2", "[fd00:20::3]:53"]
uid_range: {first: 2000000000, count: 1000}
store: {path: /var/cache/stockade, max_bytes: 50 GiB}
credentials:
  - {name: model-api, header: Authorization, prefix: "Bearer ", file: /etc/stockade/model-api.key}
  - {name: index, header: x-api-key, file: /etc/stockade/index.key}
known_secrets:
  - {name: deploy-key, file: /etc/stockade/deploy.key}
upstream: {url: "https://Gateway.Example.org:3129", ca: /etc/s/ca.pem, cert: /etc/s/n.pem, key: /etc/s/n.key, name_only: true}
extra_roots: /etc/stockade/site-ca.pem
"""


@pytest.fixture
def read(tmp_path):
    def load(text: str) -> OperatorConfig:
        path = tmp_path / "operator.yaml"
        path.write_text(text)
        return load_operator(path)

    return load


def test_every_key_is_read(read):
    config = read(TEXT)
    assert config.unsafe_allow_cidrs == (ipaddress.ip_network("10.20.0.0/24"), ipaddress.ip_network("fd00:20::/64"))
    assert [(one.reason, one.source_line) for one in config.unsafe_allow] == [
        ("package mirror of the site", 3),
        ("package mirror of the site", 4),
    ]
    assert config.deny_cidrs == (ipaddress.ip_network("198.51.100.0/24"), ipaddress.ip_network("10.30.0.0/16"))
    assert config.resolvers == ("10.20.0.2", "10.20.0.3:5353", "fd00:20::2", "[fd00:20::3]:53")
    assert (config.uid_range.first, config.uid_range.count) == (2_000_000_000, 1000)
    assert config.store is not None
    assert (config.store.path, config.store.max_bytes) == ("/var/cache/stockade", 50 << 30)
    first, second = config.credentials
    assert (first.name, first.header, first.prefix, first.file) == (
        *("model-api", "authorization", "Bearer "),
        "/etc/stockade/model-api.key",
    )
    assert (second.header, second.prefix, second.source_line) == ("x-api-key", "", 11)
    assert [(one.name, one.file) for one in config.known_secrets] == [("deploy-key", "/etc/stockade/deploy.key")]
    upstream = config.upstream
    assert upstream is not None
    assert (upstream.url, upstream.name_only) == ("https://gateway.example.org:3129", True)
    assert (upstream.ca, upstream.cert, upstream.key) == ("/etc/s/ca.pem", "/etc/s/n.pem", "/etc/s/n.key")
    assert config.extra_roots == "/etc/stockade/site-ca.pem"
    assert OperatorConfig.model_validate_json(config.model_dump_json()) == config


def test_without_a_file_nothing_is_opened():
    config = load_operator(None)
    assert (config.unsafe_allow_cidrs, config.deny_cidrs, config.resolvers) == ((), (), ())
    assert config.uid_range.first == 0x7000_0000
    assert config.uid_range.count == 65_536
    assert (config.store, config.upstream, config.extra_roots) == (None, None, None)
    assert (config.credentials, config.known_secrets) == ((), ())


def test_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_operator(tmp_path / "none.yaml")
    assert not isinstance(caught.value, PolicyError)


@pytest.mark.promise("S1.6")
@pytest.mark.parametrize(
    "cidr",
    [
        "169.254.0.0/16",
        "169.254.169.254/32",
        "168.63.129.16/32",
        "168.63.0.0/16",
        "100.100.100.200/32",
        "100.64.0.0/10",
        "192.0.0.0/24",
        "fd00:ec2::/32",
        "fd00:ec2::254/128",
        "fd00::/8",
        "fc00::/7",
        "fd20:ce::/64",
        "fe80::/10",
        "fe80::/64",
        "0.0.0.0/0",
        "::/0",
        "0.0.0.0/8",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "255.255.255.255/32",
        "ff00::/8",
        "128.0.0.0/1",
    ],
)
def test_egress_case_037_metadata_stays_closed_to_operators(read, cidr):
    with pytest.raises(ConfigError, match=r"can never be opened|carries IPv4") as caught:
        read(f"version: 1\nunsafe_allow_cidrs:\n  - {{cidr: '{cidr}', reason: package mirror of the site}}\n")
    assert (caught.value.line, caught.value.key) == (3, "unsafe_allow_cidrs[0].cidr")


@pytest.mark.parametrize("cidr", ["::ffff:a9fe:a9fe/128", "64:ff9b::/96", "2002:a9fe:a9fe::/48", "64:ff9b::a9fe:0/112"])
def test_egress_case_031_blocks_that_embed_ipv4(read, cidr):
    with pytest.raises(ConfigError, match="carries IPv4"):
        read(f"version: 1\nunsafe_allow_cidrs:\n  - {{cidr: '{cidr}', reason: package mirror of the site}}\n")


@pytest.mark.parametrize(
    "cidr", ["10.0.0.1/8", "10.0.0.0", "10.0.0.0/33", "10.0.0.0/255.0.0.0", "mirror", "''", "010.0.0.0/8", "10/8"]
)
def test_not_blocks(read, cidr):
    with pytest.raises(ConfigError):
        read(f"version: 1\ndeny_cidrs: [{cidr}]\n")


@pytest.mark.promise("S1.6")
@pytest.mark.parametrize("reason", ["", ", reason: ''", ", reason: short", ", reason: '          '"])
def test_opening_a_block_needs_a_reason(read, reason):
    with pytest.raises(ConfigError):
        read(f"version: 1\nunsafe_allow_cidrs:\n  - {{cidr: 10.0.0.0/24{reason}}}\n")


def test_contradictions(read):
    entry = "{cidr: 10.0.0.0/24, reason: package mirror of the site}"
    with pytest.raises(ConfigError, match="given twice"):
        read(f"version: 1\nunsafe_allow_cidrs: [{entry}, {entry}]\n")
    with pytest.raises(ConfigError, match="never takes effect") as caught:
        read(f"version: 1\nunsafe_allow_cidrs: [{entry}]\ndeny_cidrs: [10.0.0.0/8]\n")
    assert (caught.value.line, caught.value.key) == (2, "unsafe_allow_cidrs[0].cidr")


@pytest.mark.parametrize(
    "resolver",
    [
        "dns.example",
        "10.0.0.2:0",
        "10.0.0.2:65536",
        "10.0.0.2:053",
        "[10.0.0.2]:53",
        "fd00::2:",
        "0.0.0.0",
        "[::]:53",
        "224.0.0.1",
        "10.0.0",
        "''",
    ],
)
def test_not_resolvers(read, resolver):
    with pytest.raises(ConfigError) as caught:
        read(f"version: 1\nresolvers: ['{resolver.strip(chr(39))}']\n")
    assert caught.value.key == "resolvers[0]"


@pytest.mark.parametrize(
    "body",
    [
        "first: 0",
        "first: 1000",
        "first: 65535",
        "count: 0",
        "first: 4294967295",
        "first: 4294967294, count: 2",
        "frist: 70000",
    ],
)
def test_uid_ranges_that_hold_accounts_or_end_beyond(read, body):
    with pytest.raises(ConfigError):
        read(f"version: 1\nuid_range: {{{body}}}\n")


def test_misspelt_key_is_never_ignored(read):
    with pytest.raises(ConfigError, match="did you mean 'deny_cidrs'"):
        read("version: 1\ndeny_cidr: [10.0.0.0/8]\n")


# -------------------------------------------------------------------- store, secrets, upstream


@pytest.mark.parametrize(
    ("url", "scheme", "endpoint"),
    [
        ("http://proxy.example.org:3128", "http", ("proxy.example.org", 3128)),
        ("http://proxy.example.org:3128/", "http", ("proxy.example.org", 3128)),
        ("http://127.0.0.1:8080", "http", ("127.0.0.1", 8080)),
        ("http://localhost:8080", "http", ("localhost", 8080)),
        ("https://gateway.example.org:443", "https", ("gateway.example.org", 443)),
        ("https://[fd00:20::5]:3129", "https", ("fd00:20::5", 3129)),
        ("unix:/run/stockade/egress.sock", "unix", ("/run/stockade/egress.sock", 0)),
    ],
)
def test_upstreams(read, url, scheme, endpoint):
    upstream = read(f"version: 1\nupstream: {{url: '{url}'}}\n").upstream
    assert upstream is not None
    assert (upstream.scheme, upstream.endpoint) == (scheme, endpoint)
    assert not upstream.name_only


@pytest.mark.parametrize(
    "text",
    [
        "url: 'unix:/run/x.sock'",
        "url: 'http://127.0.0.1:3128'",
        "url: 'http://[::1]:3128'",
        "url: 'https://p.example:3128', cert: /etc/s/c.pem, key: /etc/s/k.pem",
    ],
)
def test_gateways_are_reached_by_certificate_or_not_over_a_network(read, text):
    upstream = read(f"version: 1\nupstream: {{{text}, gateway: true}}\n").upstream
    assert upstream is not None
    assert (upstream.gateway, upstream.name_only, upstream.asks_by_name) == (True, False, True)
    plain = read("version: 1\nupstream: {url: 'unix:/run/x.sock'}\n").upstream
    assert (plain.gateway, plain.asks_by_name) == (False, False)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "proxy.example.org:3128",
        "http://proxy.example.org",
        "http://proxy.example.org:0",
        "http://proxy.example.org:65536",
        "http://proxy.example.org:03128",
        "http://user:secret@proxy.example.org:3128",
        "http://*.example.org:3128",
        "http://proxy.example.org:3128/path",
        "http://proxy.example.org:3128?x",
        "http://127.1:3128",
        "http://[::ffff:127.0.0.1]:3128",
        "socks5://proxy.example.org:1080",
        "HTTP://proxy.example.org:3128",
        "http:proxy.example.org:3128",
        "unix:run/egress.sock",
        "unix://run/egress.sock",
        "unix:/run/../egress.sock",
    ],
)
def test_not_upstreams(read, url):
    with pytest.raises(ConfigError) as caught:
        read(f"version: 1\nupstream: {{url: '{url}'}}\n")
    assert caught.value.key == "upstream.url"


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("url: 'http://p.example:3128', ca: /etc/s/ca.pem", "upstream.ca"),
        ("url: 'unix:/run/x.sock', cert: /etc/s/c.pem, key: /etc/s/k.pem", "upstream.cert"),
        ("url: 'https://p.example:3128', cert: /etc/s/c.pem", "upstream.url"),
        ("url: 'https://p.example:3128', key: /etc/s/k.pem", "upstream.url"),
        ("url: 'https://p.example:3128', insecure: true", "upstream.insecure"),
        ("url: 'https://p.example:3128', gateway: true", "upstream.url"),
        ("url: 'http://p.example:3128', gateway: true", "upstream.url"),
        ("url: 'http://192.0.2.1:3128', gateway: true", "upstream.url"),
        ("url: 'unix:/run/x.sock', gateway: true, name_only: true", "upstream.name_only"),
        ("name_only: true", "upstream.url"),
    ],
)
def test_egress_case_094_upstreams_that_contradict_themselves(read, body, key):
    with pytest.raises(ConfigError) as caught:
        read(f"version: 1\nupstream: {{{body}}}\n")
    assert caught.value.key == key


@pytest.mark.parametrize(
    "header",
    [
        *("host", "Content-Length", "transfer-encoding", "connection", "te", "trailer", "upgrade", "expect", "via"),
        *("proxy-authorization", "x-forwarded-for", "a b", "a:b", "''", '"a\\r\\nb"', "sec-websocket-key"),
    ],
)
def test_headers_that_the_proxy_writes_itself_hold_no_credential(read, header):
    with pytest.raises(ConfigError) as caught:
        read(f"version: 1\ncredentials: [{{name: a, header: {header}, file: /etc/a}}]\n")
    assert caught.value.key == "credentials[0].header"


@pytest.mark.parametrize("prefix", ['"a\\r\\nb"', "' Bearer'", "'ü'", f"'{'a' * 65}'"])
def test_prefixes_that_are_no_part_of_a_header(read, prefix):
    with pytest.raises(ConfigError) as caught:
        read(f"version: 1\ncredentials: [{{name: a, header: x-a, prefix: {prefix}, file: /etc/a}}]\n")
    assert caught.value.key == "credentials[0].prefix"


@pytest.mark.parametrize("key", ["credentials", "known_secrets"])
def test_names_of_secrets_are_labels_and_given_once(read, key):
    header = "header: x-a, " if key == "credentials" else ""
    entry = f"{{name: a, {header}file: /etc/a}}"
    with pytest.raises(ConfigError, match="given twice") as caught:
        read(f"version: 1\n{key}:\n  - {entry}\n  - {entry}\n")
    assert (caught.value.key, caught.value.line) == (f"{key}[1].name", 4)
    with pytest.raises(ConfigError, match="not a name"):
        read(f"version: 1\n{key}: [{{name: A_b, {header}file: /etc/a}}]\n")


@pytest.mark.parametrize("path", ["cache", "./cache", "/cache/", "/a/../b", "''"])
@pytest.mark.parametrize("key", ["store: {path: %s}", "extra_roots: %s", "known_secrets: [{name: a, file: %s}]"])
def test_files_are_named_from_the_root(read, path, key):
    with pytest.raises(ConfigError):
        read(f"version: 1\n{key % path}\n")


def test_secrets_are_not_read_with_the_file_that_names_them(read):
    config = read("version: 1\ncredentials: [{name: a, header: x-a, file: /does/not/exist}]\n")
    assert config.credentials[0].file == "/does/not/exist"
