"""``stockade egress learn`` as a person uses it: a real task, in a sandbox whose internet would answer if it were asked."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade.policy import load_policy, parse_policy
from tests.agents import assert_sealed, events_of
from tests.clients.lab import Lab
from tests.egress import netlab
from tests.support import ROOT, requires

KNOWN, NEW, PLAIN, OPAQUE = "11.0.0.10", "11.0.0.11", "11.0.0.12", "11.0.0.13"
POLICY = """
version: 1
egress:
  allow:
    - {host: known.example.org, ports: [80], methods: [GET], paths: ["/data"]}
"""
OPERATOR = f'version: 1\nresolvers: ["{netlab.RESOLVER}"]\n'
TASK = """
import json, os, socket, ssl, sys, urllib.request

def fetch(url, data=None, direct=False):
    handlers = [urllib.request.ProxyHandler({})] if direct else []
    try:
        with urllib.request.build_opener(*handlers).open(url, data, timeout=30) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.headers.get("X-Stockade-Reason") or str(error)
    except OSError as error:
        return type(error).__name__

def pinned(host):
    # A client that trusts its own authority alone.
    with socket.create_connection((host, 443), 30) as sock:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(sock, server_hostname=host)
        except ssl.SSLError as error:
            return "refused"

def raw(host, port):
    with socket.create_connection((host, port), 30) as sock:
        sock.sendall(b"\\x00\\x01raw bytes\\x00\\n\\r\\n")
        return sock.recv(100).decode("latin-1")[:12]

said = {
    "known": fetch("http://known.example.org/data"),
    "other path": fetch("http://known.example.org/other"),
    "secret": fetch("https://new.example.org/a/b?token=1"),
    "direct": fetch("https://new.example.org/direct", direct=True),
    "upload": fetch("https://new.example.org/up", b"body"),
    "clear": fetch("http://plain.example.org/c", direct=True),
    "pinned": pinned("opaque.example.org"),
    "raw": raw("new.example.org", 9418),
}
socket.getaddrinfo("only.example.org", 443)
print(json.dumps(said))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    requires(Lab.possible(), "no network namespace can be made here")
    with Lab() as lab:
        for name, address in {"known": KNOWN, "new": NEW, "plain": PLAIN, "opaque": OPAQUE, "only": NEW}.items():
            lab.add_host(f"{name}.example.org", address)
        yield lab


@pytest.fixture(scope="module")
def origins(lab: Lab) -> dict[str, netlab.Origin]:
    """Everything answers, so that what the task did not reach was kept from it."""
    found = {f"{ip}:80": lab.http(ip) for ip in (KNOWN, NEW, PLAIN, OPAQUE)}
    return found | {f"{ip}:{port}": lab.echo(ip, port) for ip in (NEW, OPAQUE) for port in (443, 9418)}


def learn(lab: Lab, folder: Path, *words: str, policy: str | None = POLICY) -> subprocess.CompletedProcess[bytes]:
    (folder / "operator.yaml").write_text(OPERATOR, "utf-8")
    given = ["--operator", "operator.yaml"]
    if policy is not None:
        (folder / "policy.yaml").write_text(policy, "utf-8")
        given += ["--policy", "policy.yaml"]
    argv = [sys.executable, "-m", "stockade.cli", "egress", "learn", *given, *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run(lab.command(argv), cwd=folder, env=environment, capture_output=True, timeout=100, check=False)


def test_a_task_is_run_and_its_rules_are_told(lab: Lab, origins: dict[str, netlab.Origin], tmp_path: Path) -> None:
    lab.dns.queries.clear()
    done = learn(lab, tmp_path, "--output", "learnt.yaml", "--json", "--", "python3", "-c", TASK)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["return_code"], told["exit"]) == (7, "exited")
    said = json.loads(base64.b64decode(told["stdout_b64"]))
    assert said == {
        "known": "hello",
        "other path": "path_not_allowed",
        "secret": "host_not_allowed",
        "direct": "host_not_allowed",
        "upload": "host_not_allowed",
        "clear": "host_not_allowed",
        "pinned": "refused",
        "raw": "HTTP/1.1 400",
    }
    # Nothing was looked up or dialled but what the policy allows.
    assert {name for name, _ in lab.dns.queries} == {"known.example.org"}
    assert {place for place, origin in origins.items() if origin.connections} == {f"{KNOWN}:80"}
    assert [request.line for request in origins[f"{KNOWN}:80"].received] == [b"GET /data HTTP/1.1"]

    learnt = load_policy(tmp_path / "learnt.yaml")
    assert (tmp_path / "learnt.yaml").read_text("ascii") == told["policy"]
    rules = {
        (rule.host.text, rule.ports, rule.methods, tuple(map(str, rule.paths or ()))) for rule in learnt.egress.allow
    }
    assert rules == {
        ("known.example.org", (80,), ("GET",), ("/other",)),
        ("new.example.org", (443,), ("GET",), ("/a/b", "/direct")),
        ("new.example.org", (443,), ("POST",), ("/up",)),
        ("plain.example.org", (80,), ("GET",), ("/c",)),
    }
    assert "token" not in told["policy"]
    assert "# - {host: 'opaque.example.org', ports: [443], tls: opaque}" in told["policy"]
    assert "# - {host: 'new.example.org', ports: [9418], tcp: true}" in told["policy"]
    assert "by name only, once: only.example.org" in told["policy"]
    assert told["counts"] == {"allowed": 1, "denied": 6, "hosts_denied": 3}
    assert_sealed(Path(told["run_dir"]))


def test_nothing_is_folded_that_rules_are_learnt_from(lab: Lab, tmp_path: Path) -> None:
    task = "import urllib.request as u\nfor n in range(60):\n try: u.urlopen(f'https://many.example.org/x/{n}')\n except OSError: pass"
    done = learn(lab, tmp_path, "--", "python3", "-c", task, policy=None)
    assert done.returncode == 0, done.stderr
    [rule] = parse_policy(done.stdout.decode("ascii"), source="x").egress.allow
    assert (rule.host.text, [str(glob) for glob in rule.paths or ()]) == ("many.example.org", ["/x/**"])
    assert b"asked for 60 times" in done.stdout
    run_dir = next((tmp_path / "runs").glob("run-*"))
    assert not [event for event in events_of(run_dir, "net.request") if "count" in event]
    shown = done.stderr.decode()
    assert "command   exited with 0" in shown
    assert "60 denied, to 1 hosts" in shown
    assert not [name for name, _ in lab.dns.queries if name == "many.example.org"]


def test_a_grading_sandbox_has_no_network_even_then(tmp_path: Path) -> None:
    from stockade.runs import Admitted, Ask, RunState, admit

    state = RunState(stopped=False, ending=False, record_broken=False, live=0, max_live=1, learn=True)
    policy = parse_policy("version: 1\n", source="x")
    for role, network in (("rollout", True), ("grading", False)):
        answer = admit(policy, Ask(role), state)  # type: ignore[arg-type]
        assert isinstance(answer, Admitted)
        assert answer.network is network


@pytest.mark.parametrize(
    ("words", "policy", "message"),
    [
        (("--output", "policy.yaml", "--", "true"), POLICY, "exists already"),
        (("--", "true"), "version: 1\negress: {mode: 'off'}\n", "nothing would be met"),
    ],
)
def test_what_cannot_be_learnt_is_refused_before_anything_runs(
    lab: Lab, tmp_path: Path, words: tuple[str, ...], policy: str, message: str
) -> None:
    done = learn(lab, tmp_path, *words, policy=policy)
    assert (done.returncode, message in done.stderr.decode()) == (2, True)
    assert not (tmp_path / "runs").exists()
