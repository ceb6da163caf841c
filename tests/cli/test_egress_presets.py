"""What the shipped presets let through, request by request as clients send them, through the gate itself."""

from __future__ import annotations

import pytest

from stockade.cli._egress import Explanation, WayIn, judge
from stockade.egress.gate import Rules
from stockade.policy import OperatorConfig, parse_policy


def rules(preset: str, more: str = "") -> Rules:
    policy = parse_policy(f"version: 1\negress:\n  presets: [{preset}]\n{more}", source="p")
    return Rules.from_policy(policy, OperatorConfig(version=1), inspection=True)


def answer(preset: str, line: str, way: WayIn | None = None) -> Explanation:
    method, url, *body = line.split(" ")
    return judge(rules(preset), method, url, way, body=bool(body))


PYPI, FILES = "https://pypi.org", "https://files.pythonhosted.org"
NPM = "https://registry.npmjs.org"
HUB = "https://huggingface.co"
GIT = "https://github.com"

FETCHES = {
    "pypi-read": [
        f"GET {PYPI}/simple/",
        f"GET {PYPI}/simple/requests/",
        f"HEAD {PYPI}/simple/requests/",
        f"GET {PYPI}/pypi/requests/json",
        f"GET {PYPI}/pypi/requests/2.32.3/json",
        f"GET {PYPI}/integrity/sampleproject/4.0.0/sampleproject-4.0.0.tar.gz/provenance",
        f"GET {FILES}/packages/f9/9b/abc/requests-2.32.3-py3-none-any.whl",
        f"HEAD {FILES}/packages/f9/9b/abc/requests-2.32.3-py3-none-any.whl",
        f"GET {FILES}/packages/f9/9b/abc/requests-2.32.3-py3-none-any.whl.metadata",
        f"GET {FILES}/packages/source/r/requests/requests-2.32.3.tar.gz",
    ],
    "npm-read": [
        f"GET {NPM}/lodash",
        f"GET {NPM}/@types%2fnode",
        f"GET {NPM}/@types%2Fnode",
        f"GET {NPM}/@types/node",
        f"GET {NPM}/lodash/4.17.21",
        f"GET {NPM}/@types%2fnode/latest",
        f"GET {NPM}/@types/node/latest",
        f"GET {NPM}/lodash/-/lodash-4.17.21.tgz",
        f"GET {NPM}/@types/node/-/node-22.1.0.tgz",
        f"GET {NPM}/-/npm/v1/keys",
    ],
    "debian-read": [
        "GET http://deb.debian.org/debian/dists/bookworm/InRelease",
        "GET https://deb.debian.org/debian/dists/bookworm/InRelease",
        "GET http://deb.debian.org/debian/dists/bookworm/main/binary-amd64/by-hash/SHA256/0a1b",
        "GET http://deb.debian.org/debian/dists/bookworm-updates/main/i18n/Translation-en.xz",
        "GET http://deb.debian.org/debian/pool/main/g/gcc-12/gcc-12_12.2.0-14%2bdeb12u1_amd64.deb",
        "GET http://deb.debian.org/debian/pool/main/h/hello/hello_2.10-3%7ebpo1_amd64.deb",
        "GET http://deb.debian.org/debian-security/dists/bookworm-security/InRelease",
        "GET http://deb.debian.org/debian-security/pool/updates/main/o/openssl/libssl3_3.0.15-1_amd64.deb",
        "GET https://security.debian.org/debian-security/dists/bookworm-security/InRelease",
        "GET http://security.debian.org/debian-security/pool/updates/main/c/curl/curl_7.88_amd64.deb",
    ],
    "github-read": [
        f"GET {GIT}/o/r/info/refs?service=git-upload-pack",
        f"GET {GIT}/o/r.git/info/refs?service=git-upload-pack",
        f"POST {GIT}/o/r.git/git-upload-pack body",
        f"GET {GIT}/o/r/archive/refs/tags/v1.0.tar.gz",
        f"GET {GIT}/o/r/releases/download/v1.0/tool-linux-amd64",
        f"GET {GIT}/o/r/releases/latest",
        f"GET {GIT}/o/r/raw/main/README.md",
        "GET https://codeload.github.com/o/r/tar.gz/refs/tags/v1.0",
        "GET https://raw.githubusercontent.com/o/r/main/src/a.py",
        "GET https://release-assets.githubusercontent.com/github-production-release-asset/1/2?sp=r&sig=a%2Bb%3D",
        "GET https://objects.githubusercontent.com/github-production-release-asset-2e65be/1/2?X-Amz-Signature=a",
        "GET https://media.githubusercontent.com/media/o/r/main/big.bin",
        "GET https://api.github.com/repos/o/r",
        "GET https://api.github.com/repos/o/r/releases/latest",
    ],
    "huggingface-read": [
        f"HEAD {HUB}/org/model/resolve/main/config.json",
        f"GET {HUB}/gpt2/resolve/main/config.json",
        f"GET {HUB}/datasets/org/data/resolve/refs%2Fconvert%2Fparquet/x.parquet",
        f"GET {HUB}/datasets/squad/resolve/main/README.md",
        f"GET {HUB}/spaces/org/app/resolve/main/app.py",
        f"GET {HUB}/org/model/raw/main/README.md",
        f"GET {HUB}/api/models/org/model/revision/main",
        f"GET {HUB}/api/models/org/model/tree/main?recursive=True&expand=False",
        f"GET {HUB}/api/models?search=bert&limit=5",
        f"GET {HUB}/api/datasets/org/data/revision/refs%2Fpr%2F1",
        f"GET {HUB}/api/resolve-cache/models/org/model/0123abc/onnx%2Fconfig.json?%2Forg%2Fmodel%2Fonnx%252Fconfig.json=&etag=%22a%22",
        f"GET {HUB}/api/models/org/model/xet-read-token/0123abc",
        f"POST {HUB}/api/datasets/org/data/paths-info/main body",
        f"POST {HUB}/api/models/gpt2/paths-info/main body",
        "GET https://cas-server.xethub.hf.co/v1/reconstructions/0a1b",
        "GET https://cas-server.xethub.hf.co/reconstructions/0a1b",
        "GET https://transfer.xethub.hf.co/xorbs/default/0a1b?X-Xet-Signed-Range=bytes%3D0-1&Signature=a~",
        "GET https://us.aws.cdn.hf.co/xet-bridge-us/0a/1b?Policy=a&Signature=b",
        "GET https://cas-bridge.xethub.hf.co/xet-bridge-us/0a/1b?Signature=b",
        "GET https://cdn-lfs-us-1.hf.co/repos/0a/1b/0c?response-content-disposition=x",
    ],
}

REFUSED = {
    "pypi-read": [
        f"POST {PYPI}/legacy/ body",
        f"POST {PYPI}/pypi body",
        f"POST {PYPI}/simple/requests/",
        f"PUT {FILES}/packages/x body",
        f"GET {PYPI}/simple/requests/ body",
        f"GET {PYPI}/search/?q=secret",
        f"GET {PYPI}/account/login/",
        f"GET {PYPI}/simple/../account/login/",
        f"GET {PYPI}/simple/%2e%2e/account/",
        "GET http://pypi.org/simple/",
        "POST https://upload.pypi.org/legacy/ body",
        "GET https://test.pypi.org/simple/",
    ],
    "npm-read": [
        f"POST {NPM}/-/npm/v1/security/advisories/bulk body",
        f"POST {NPM}/-/npm/v1/security/audits/quick body",
        f"PUT {NPM}/lodash body",
        f"PUT {NPM}/@mine%2fpackage body",
        f"DELETE {NPM}/lodash/-/lodash-4.17.21.tgz/-rev/1",
        f"PUT {NPM}/-/user/org.couchdb.user:me body",
        f"POST {NPM}/-/npm/v1/tokens body",
        f"PUT {NPM}/-/package/lodash/dist-tags/latest body",
        f"GET {NPM}/-/v1/search?text=secret",
        f"GET {NPM}/lodash?_method=PUT",
        "GET http://registry.npmjs.org/lodash",
    ],
    "debian-read": [
        "POST http://deb.debian.org/debian/pool/x body",
        "PUT http://deb.debian.org/debian/pool/x body",
        "GET http://deb.debian.org/",
        "GET http://deb.debian.org/debian/",
        "GET http://deb.debian.org:8080/debian/dists/x",
        "GET http://ftp.debian.org/debian/dists/x",
        "GET https://paste.debian.net/",
    ],
    "github-read": [
        f"GET {GIT}/o/r/info/refs?service=git-receive-pack",
        f"GET {GIT}/o/r.git/info/refs?service=git-receive-pack",
        f"GET {GIT}/o/r/info/refs?service=git-upload-pack&service=git-receive-pack",
        f"GET {GIT}/o/r/info/refs?service=git-receive-pack&service=git-upload-pack",
        f"GET {GIT}/o/r/info/refs?service=git%2Dreceive-pack",
        f"GET {GIT}/o/r/info/refs?%73ervice=git-receive-pack&service=git-upload-pack",
        f"GET {GIT}/o/r/info/refs?service=git-upload-pack;service=git-receive-pack",
        f"GET {GIT}/o/r/info/refs?SERVICE=git-receive-pack&service=git-upload-pack",
        f"GET {GIT}/o/r/info/refs",
        f"POST {GIT}/o/r/git-receive-pack body",
        f"POST {GIT}/o/r.git/git-receive-pack body",
        f"POST {GIT}/o/r/Git-Receive-Pack body",
        f"POST {GIT}/o/r.git/info/lfs/objects/batch body",
        f"POST {GIT}/o/r/issues body",
        f"POST {GIT}/session body",
        f"GET {GIT}/login",
        f"GET {GIT}/search?q=secret",
        f"POST {GIT}/o/r/git-upload-pack/x body",
        "POST https://api.github.com/gists body",
        "GET https://api.github.com/gists",
        "POST https://api.github.com/graphql body",
        "PUT https://api.github.com/repos/o/r/contents/x body",
        "POST https://api.github.com/repos/o/r/forks",
        "PATCH https://api.github.com/repos/o/r body",
        "DELETE https://api.github.com/repos/o/r",
        "GET https://gist.github.com/o/1",
        "POST https://uploads.github.com/repos/o/r/releases/1/assets?name=x body",
        "GET https://gist.githubusercontent.com/o/1/raw",
        "PUT https://objects.githubusercontent.com/github-production-release-asset-2e65be/1 body",
        "CONNECT https://github.com:22/",
    ],
    "huggingface-read": [
        f"POST {HUB}/api/models/org/model/commit/main body",
        f"POST {HUB}/api/repos/create body",
        f"DELETE {HUB}/api/repos/delete body",
        f"POST {HUB}/api/models/org/model/preupload/main body",
        f"POST {HUB}/org/model.git/info/lfs/objects/batch body",
        f"GET {HUB}/api/models/org/model/xet-write-token/main",
        f"GET {HUB}/api/models/org/model/xet-write-token%2Fmain",
        f"POST {HUB}/api/models/org/model/discussions body",
        f"GET {HUB}/org/model/info/refs?service=git-receive-pack",
        f"POST {HUB}/org/model/git-receive-pack body",
        f"GET {HUB}/settings/tokens",
        f"GET {HUB}/api/whoami-v2",
        f"PUT {HUB}/org/model/resolve/main/x body",
        "POST https://cas-server.xethub.hf.co/v1/xorbs/default/0a1b body",
        "POST https://cas-server.xethub.hf.co/v1/shards body",
        "PUT https://cdn-lfs-us-1.hf.co/repos/0a/1b body",
        "GET https://evil.cdn.hf.co/x",
        "GET https://api-inference.huggingface.co/models/x",
        "GET https://mine.hf.space/",
    ],
}


def _cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(preset, line) for preset, lines in table.items() for line in lines]


@pytest.mark.parametrize(("preset", "line"), _cases(FETCHES))
def test_what_a_client_fetches_is_let_through(preset, line):
    told = answer(preset, line)
    assert told.deciding.verdict.allowed, told.deciding
    assert f"preset {preset} line" in str(told.deciding.verdict.rule)
    if line.split()[1].startswith("https:"):
        for way in (WayIn.TRANSPARENT, WayIn.SOCKS5):
            assert answer(preset, line, way).deciding.verdict.allowed


@pytest.mark.promise("S3.15")
@pytest.mark.parametrize(("preset", "line"), _cases(REFUSED))
def test_egress_cases_067_068_every_way_to_write_is_refused(preset, line):
    for way in (None, WayIn.TRANSPARENT, WayIn.SOCKS5):
        assert not answer(preset, line, way).deciding.verdict.allowed


@pytest.mark.parametrize(
    ("preset", "line"),
    [
        ("pypi-read", f"GET {FILES}/packages/f9/9b/abc/x.whl"),
        ("pypi-read", f"GET {FILES}/packages/f9/9b/abc/x.whl.metadata"),
        ("npm-read", f"GET {NPM}/lodash/-/lodash-4.17.21.tgz"),
        ("npm-read", f"GET {NPM}/@types/node/-/node-22.1.0.tgz"),
        ("debian-read", "GET http://deb.debian.org/debian/pool/main/h/hello/hello_2.10-3_amd64.deb"),
        ("debian-read", "GET http://deb.debian.org/debian/dists/bookworm/main/binary-amd64/by-hash/SHA256/0a"),
        ("huggingface-read", f"GET {HUB}/api/resolve-cache/models/org/model/0123abc/config.json"),
    ],
)
def test_what_never_changes_is_stored(preset, line):
    grant = answer(preset, line).deciding.verdict.grant
    assert grant is not None
    assert grant.store


@pytest.mark.parametrize(
    ("preset", "line"),
    [
        ("pypi-read", f"GET {PYPI}/simple/requests/"),
        ("npm-read", f"GET {NPM}/lodash"),
        ("debian-read", "GET http://deb.debian.org/debian/dists/bookworm/InRelease"),
        ("github-read", f"GET {GIT}/o/r/archive/main.tar.gz"),
        ("huggingface-read", f"GET {HUB}/org/model/resolve/main/config.json"),
    ],
)
def test_what_may_change_is_not_stored(preset, line):
    grant = answer(preset, line).deciding.verdict.grant
    assert grant is not None
    assert not grant.store


def test_egress_case_067_a_wider_rule_of_the_policy_does_not_open_pushing():
    wide = "  allow:\n    - {host: github.com, unsafe_many_owners: true, tls: inspect}\n"
    both = rules("github-read", wide)
    assert judge(both, "POST", f"{GIT}/o/r/issues", None, body=True).deciding.verdict.allowed
    for line in (f"{GIT}/o/r/info/refs?service=git-receive-pack", f"{GIT}/o/r/git-receive-pack"):
        verdict = judge(both, "POST", line, None, body=True).deciding.verdict
        assert (verdict.allowed, verdict.reason.value) == (False, "denied_by_rule")


def test_egress_case_100_a_policy_closes_the_repository_with_the_answer():
    closed = rules(
        "github-read",
        "  deny:\n    - {host: github.com, paths: ['/task/answer/**', '/task/answer.git/**']}\n",
    )
    for path in ("/task/answer/info/refs", "/Task/Answer.git/info/refs"):
        told = judge(closed, "GET", f"{GIT}{path}?service=git-upload-pack", None)
        assert told.deciding.verdict.reason.value == "denied_by_rule"
    assert judge(closed, "GET", f"{GIT}/o/r/info/refs?service=git-upload-pack", None).deciding.verdict.allowed
