"""``stockade egress explain``: the gate's own answer, told to a person or a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stockade.cli._egress import WayIn, judge
from stockade.egress.gate import Rules
from stockade.policy import OperatorConfig, parse_policy
from tests.support import ROOT

POLICY = """\
version: 1
egress:
  presets: [pypi-read]
  allow:
    - {host: open.example}
    - {host: seen.example, ports: [80, 443], methods: [GET, POST], paths: ["/x/**"]}
    - {host: api.example, credential: model-api, strip_credentials: true}
    - {host: git.example.org, tcp: true, ports: [22]}
    - {host: 93.184.216.34, ports: [443], read_only: true}
  deny:
    - {host: seen.example, paths: ["/x/secret"]}
services:
  - {name: model, address: 127.0.0.1, port: 8000, methods: [POST], paths: ["/v1/completions"]}
"""
RULES = Rules.from_policy(
    parse_policy(POLICY.replace(", credential: model-api", ""), source="p"), OperatorConfig(version=1), inspection=True
)


def asked(
    method: str, url: str, way: WayIn | None = None, *, body: bool = False
) -> tuple[bool, str, str | None, str | None]:
    told = judge(RULES, method, url, way, body=body)
    verdict = told.deciding.verdict
    tunnel = None if told.tunnel is None else told.tunnel.verdict.handling.value
    return verdict.allowed, verdict.reason.value, tunnel, verdict.rule


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GET https://open.example/any?x=1", (True, "allowed", "opaque", "allow open.example line 5")),
        ("GET https://seen.example/x/1", (True, "allowed", "inspect", "allow seen.example line 6")),
        ("GET http://seen.example/x/1", (True, "allowed", None, "allow seen.example line 6")),
        ("PUT https://seen.example/x/1", (False, "method_not_allowed", "inspect", None)),
        ("GET https://seen.example/y", (False, "path_not_allowed", "inspect", None)),
        ("GET https://seen.example/x/%2e%2e/y", (False, "malformed_path", "inspect", None)),
        ("GET https://seen.example/x/secret", (False, "denied_by_rule", "inspect", "deny seen.example line 11")),
        ("GET https://seen.example/x/SECRET", (False, "denied_by_rule", "inspect", "deny seen.example line 11")),
        ("GET https://seen.example:8443/x/1", (False, "port_not_allowed", "request", None)),
        ("GET https://none.example/", (False, "host_not_allowed", "request", None)),
        ("CONNECT https://seen.example/", (True, "allowed", "inspect", "allow seen.example line 6")),
        ("CONNECT https://git.example.org:22", (True, "allowed", "raw", "allow git.example.org line 8")),
        ("GET https://git.example.org:22/", (True, "allowed", "raw", "allow git.example.org line 8")),
        ("GET https://pypi.org/simple/a/", (True, "allowed", "inspect", "allow pypi.org preset pypi-read line 7")),
        ("GET https://93.184.216.34/", (True, "allowed", "inspect", "allow 93.184.216.34 line 9")),
        ("POST http://model.stockade.internal:8000/v1/completions", (True, "allowed", None, "service model line 13")),
        ("GET http://localhost/", (False, "own_address", None, None)),
        ("get https://seen.example/x/1", (False, "malformed_request", "inspect", None)),
        ("GET https://SEEN.example./x/1", (True, "allowed", "inspect", "allow seen.example line 6")),
    ],
)
def test_what_the_gate_says(line, expected):
    assert asked(*line.split(" ")) == expected


def test_every_way_in_meets_the_same_rules():
    """egress.md case 62: a request that one way refuses, no other lets through."""
    for url, allowed in (
        ("https://seen.example/x/1", True),
        ("https://seen.example/y", False),
        ("http://seen.example/y", False),
    ):
        for way in (WayIn.CONNECT, WayIn.TRANSPARENT, WayIn.SOCKS5):
            assert asked("GET", url, way)[0] is allowed, (url, way)
    assert asked("GET", "http://seen.example/y", WayIn.HTTP)[0] is False


def test_egress_case_064_https_in_absolute_form():
    assert asked("GET", "https://seen.example/x/1", WayIn.HTTP)[:2] == (False, "unsupported_scheme")


def test_a_body_is_judged():
    assert asked("GET", "https://seen.example/x/1", body=True)[1] == "body_not_allowed"
    assert asked("POST", "https://seen.example/x/1", body=True)[1] == "allowed"


def test_nothing_is_judged_inside_a_tunnel_that_is_not_seen():
    told = judge(RULES, "DELETE", "https://open.example/x", None)
    assert told.request is None
    assert told.tunnel is not None


# --------------------------------------------------------------------------------- the program


def run(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "TERM": "dumb"}
    command = [sys.executable, "-m", "stockade.cli", "egress", "explain", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, env=environment, check=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "policy.yaml").write_text(POLICY)
    return tmp_path


def test_the_program_tells_verdict_reason_handling_and_rule(folder):
    done = run(folder, "policy.yaml", "GET", "https://seen.example/x/1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "allowed GET https://seen.example/x/1 by connect: allowed",
        "  tunnel: inspect; by 'allow seen.example line 6' (policy.yaml:6)",
        "  request: request; by 'allow seen.example line 6' (policy.yaml:6)",
    ]
    denied = run(folder, "policy.yaml", "GET", "https://seen.example/x/secret")
    assert denied.returncode == 1
    assert "denied_by_rule; by 'deny seen.example line 11' (policy.yaml:11)" in denied.stdout


def test_the_program_speaks_json(folder):
    done = run(folder, "policy.yaml", "GET", "https://api.example/x", "--json")
    told = json.loads(done.stdout)
    assert (told["allowed"], told["reason"], told["handling"]) == (True, "allowed", "request")
    assert (told["way"], told["host"], told["port"]) == ("connect", "api.example", 443)
    assert (told["rule"], told["place"]) == ("allow api.example line 7", "policy.yaml:7")
    assert told["tunnel"]["handling"] == "inspect"
    assert told["request"]["terms"] == ["strip_credentials", "credential model-api"]
    preset = json.loads(run(folder, "policy.yaml", "POST", "https://pypi.org/legacy/", "--json").stdout)
    assert preset["tunnel"]["place"] == "preset pypi-read:7"
    assert (preset["allowed"], preset["request"]["allowed"], preset["handling"]) == (False, False, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("policy.yaml", "GET", "ftp://a.example/"), "not a URL"),
        (("policy.yaml", "GET", "seen.example/x"), "not a URL"),
        (("policy.yaml", "GET", "https://user@seen.example/"), "malformed_host"),
        (("policy.yaml", "GET", "https://seen.example:0443/"), "malformed_host"),
        (("none.yaml", "GET", "https://a.example/"), "cannot be read"),
        (("policy.yaml", "GET", "https://a.example/", "--operator", "site.yaml"), "no credential 'model-api'"),
        (("policy.yaml", "GET", "https://a.example/", "--operator", "none.yaml"), "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(folder, words, message):
    (folder / "site.yaml").write_text("version: 1\n")
    done = run(folder, *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_the_operators_file_counts(folder):
    site = folder / "site.yaml"
    site.write_text(
        "version: 1\ndeny_cidrs: [93.184.216.0/24]\ncredentials: [{name: model-api, header: x-api-key, file: /none}]\n"
    )
    assert run(folder, "policy.yaml", "GET", "https://93.184.216.34/").returncode == 0
    done = run(folder, "policy.yaml", "GET", "https://93.184.216.34/", "--operator", "site.yaml")
    assert done.returncode == 1
    assert "denied_address" in done.stdout


def test_text_of_the_url_cannot_write_to_the_terminal(folder):
    done = run(folder, "policy.yaml", "GET", "https://seen.example/\x1b[31m\u202ex")
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
