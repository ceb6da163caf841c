"""What the shipped presets let through, by the gate that judges it: cases 66, 67, 68 and 69 of the bypass table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.egress.gate import (
    Destination,
    Handling,
    HeadLimits,
    Malformed,
    Origin,
    Reason,
    Request,
    Rules,
    Way,
    decide,
    parse_head,
    parse_host,
)
from stockade.policy import PRESETS, load_operator, parse_policy


def rules_of(name):
    text = f"version: 1\negress:\n  presets: [{name}]\n"
    return Rules.from_policy(parse_policy(text, source="p"), load_operator(None), inspection=True)


RULES = {name: rules_of(name) for name in PRESETS}


def hosts_of(name):
    return [rule.host for rule in RULES[name].allow]


def judged(name, host, line, *fields):
    """Return the verdict on a request inside inspected TLS, from its bytes on."""
    raw = "\r\n".join([f"{line} HTTP/1.1", f"Host: {host}", *fields, "", ""]).encode()
    try:
        head = parse_head(raw, HeadLimits(), Origin(Way.TLS, "https", parse_host(host.encode()), 443))
    except Malformed as error:
        return error
    return decide(head.request, RULES[name], body=head.body)


FORGE = hosts_of("github-read")[0]
FORGE_API = next(host for host in hosts_of("github-read") if host.startswith("api."))
HUB = hosts_of("huggingface-read")[0]
NPM = hosts_of("npm-read")[0]
PYPI = hosts_of("pypi-read")[0]

READS = [
    ("github-read", FORGE, "GET /o/r/info/refs?service=git-upload-pack", ()),
    ("github-read", FORGE, "GET /o/r.git/info/refs?service=git-upload-pack", ()),
    ("github-read", FORGE, "POST /o/r.git/git-upload-pack", ("Content-Length: 100",)),
    ("github-read", FORGE, "POST /o/r.git/git-upload-pack", ("Transfer-Encoding: chunked",)),
    ("github-read", FORGE, "GET /o/r/archive/refs/heads/main.tar.gz", ()),
    ("github-read", FORGE_API, "GET /repos/o/r/contents/x", ()),
    ("npm-read", NPM, "GET /left", ()),
    ("npm-read", NPM, "GET /@scope%2fname", ()),
    ("npm-read", NPM, "GET /@scope/name", ()),
    ("npm-read", NPM, "GET /@scope/name/-/name-1.0.0.tgz", ()),
    ("pypi-read", PYPI, "GET /simple/x/", ()),
    ("huggingface-read", HUB, "GET /o/m/resolve/main/config.json", ()),
    ("huggingface-read", HUB, "HEAD /o/m/resolve/main/a%2Fb.bin", ()),
]


@pytest.mark.parametrize(("name", "host", "line", "fields"), READS)
def test_reading_works(name, host, line, fields):
    verdict = judged(name, host, line, *fields)
    assert verdict.allowed, verdict


PUSHES = [
    "GET /o/r/info/refs?service=git-receive-pack",
    "GET /o/r/info/refs?service=git-receive-pack&service=git-upload-pack",
    "GET /o/r/info/refs?service=git-upload-pack&service=git-receive-pack",
    "GET /o/r/info/refs?%73ervice=git-receive-pack",
    "GET /o/r/info/refs?SERVICE=git-receive-pack&service=git-upload-pack",
    "GET /o/r/info/refs",
    "GET /o/r/INFO/refs?service=git-receive-pack",
    "GET /o/r/info%2Frefs?service=git-receive-pack",
    "GET /o/r//info/refs?service=git-receive-pack",
    "GET /o/r/x/../info/refs?service=git-receive-pack",
    "POST /o/r/git-receive-pack",
    "POST /o/r.git/git-receive-pack",
    "POST /o/r/GIT-receive-pack",
    "POST /o/r/git-receive-pack;x",
    "POST /o/r/git-receive-pack/",
    "POST /o/r/x/git-upload-pack/../git-receive-pack",
    "POST /o/r%2Fgit-receive-pack/git-upload-pack",
    "PUT /o/r/git-upload-pack",
    "POST /o/r/git-upload-pack?_method=PUT",
]


@pytest.mark.parametrize("line", PUSHES)
def test_egress_case_067_both_requests_of_a_push_are_refused(line):
    verdict = judged("github-read", FORGE, line)
    assert isinstance(verdict, Malformed) or not verdict.allowed


WRITES = [
    ("github-read", FORGE, "POST /gists"),
    ("github-read", FORGE, "POST /o/r/info/lfs/objects/batch"),
    ("github-read", FORGE, "POST /o/r/upload/main"),
    ("github-read", FORGE, "POST /o/r/releases/download/x"),
    ("github-read", FORGE, "POST /login/oauth/access_token"),
    ("github-read", FORGE_API, "PUT /repos/o/r/contents/x"),
    ("github-read", FORGE_API, "POST /repos/o/r/forks"),
    ("github-read", FORGE_API, "POST /graphql"),
    ("github-read", FORGE_API, "POST /gists"),
    ("github-read", FORGE_API, "DELETE /repos/o/r"),
    ("github-read", FORGE_API, "PATCH /repos/o/r"),
    ("github-read", FORGE_API, "GET /gists"),
    ("npm-read", NPM, "PUT /name"),
    ("npm-read", NPM, "PUT /@scope%2fname"),
    ("npm-read", NPM, "DELETE /name/-rev/1"),
    ("npm-read", NPM, "POST /-/npm/v1/security/audits"),
    ("npm-read", NPM, "PUT /-/user/org.couchdb.user:x"),
    ("pypi-read", PYPI, "POST /legacy/"),
    ("huggingface-read", HUB, "POST /api/models/o/m/commit/main"),
    ("huggingface-read", HUB, "POST /api/repos/create"),
    ("huggingface-read", HUB, "GET /api/models/o/m/xet-write-token/main"),
    ("huggingface-read", HUB, "GET /api/models/o/m%2Fxet-write-token/main"),
    ("huggingface-read", HUB, "GET /api/models/o/m/XET-write-token/main"),
    ("huggingface-read", HUB, "POST /o/m.git/info/lfs/objects/batch"),
    ("huggingface-read", HUB, "POST /o/m.git/git-receive-pack"),
]


@pytest.mark.parametrize(("name", "host", "line"), WRITES)
def test_egress_case_068_ways_to_write_are_refused(name, host, line):
    verdict = judged(name, host, line)
    assert isinstance(verdict, Malformed) or not verdict.allowed


@pytest.mark.parametrize(("name", "host", "line", "fields"), [one for one in READS if one[2].startswith("GET")])
def test_egress_case_099_reading_brings_no_body(name, host, line, fields):
    assert judged(name, host, line, "Content-Length: 1", *fields).reason is Reason.BODY_NOT_ALLOWED


@pytest.mark.parametrize("name", PRESETS)
def test_egress_case_063_no_host_of_a_preset_is_an_opaque_tunnel(name):
    for host in hosts_of(name):
        for port, verdict in (
            (443, (Handling.INSPECT, Reason.ALLOWED)),
            (22, (Handling.REQUEST, Reason.PORT_NOT_ALLOWED)),
        ):
            request = Request(Destination(Way.CONNECT, parse_host(host.encode()), port), "CONNECT", "", None, "")
            found = decide(request, RULES[name])
            assert (found.handling, found.reason) == verdict


SEGMENT = st.sampled_from(["o", "r", "x.git", "info", "refs", "api", "repos", "git-receive-pack", "simple", "-", "resolve",
                           "models", "@s%2Fn", "commit", "upload", "%2E", "xet-write-token"])  # fmt: skip


@given(
    st.sampled_from(PRESETS),
    st.integers(0, 50),
    st.sampled_from(["POST", "PUT", "PATCH", "DELETE", "MKCOL", "PROPPATCH", "LOCK", "TRACE", "OPTIONS"]),
    st.lists(SEGMENT, max_size=6).map("/".join),
    st.sampled_from(["", "?service=git-receive-pack", "?_method=GET", "?x"]),
)
def test_nothing_but_reading_gets_through(name, number, method, path, query):
    host = hosts_of(name)[number % len(hosts_of(name))]
    verdict = judged(name, host, f"{method} /{path}{query}")
    if not isinstance(verdict, Malformed) and verdict.allowed:
        assert method == "POST"
        assert path.endswith("/git-upload-pack") or "/paths-info/" in path
