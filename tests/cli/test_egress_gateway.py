"""``stockade egress gateway`` as the operators of a login node use it, and a node that has no other way out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from stockade.runs import summarise
from tests.agents import assert_sealed, events_of, wait_until
from tests.clients.lab import Lab
from tests.egress import netlab
from tests.egress.gateway.conftest import pem
from tests.egress.proxy.harness import Client
from tests.support import ROOT, requires

SITE, INTERNAL, WHERE = "11.0.0.10", "10.0.0.10", "11.0.0.70:3129"
POLICY = """
version: 1
egress:
  allow:
    - {host: site.test, methods: [GET], paths: ["/public/**"], ports: [80]}
    - {host: inside.test, ports: [80]}
"""
INSPECTED = 'version: 1\negress: {allow: [{host: site.test, methods: [GET], paths: ["/public/**"]}]}\n'
OPERATOR = f'version: 1\nresolvers: ["{netlab.RESOLVER}"]\n'
NODE_POLICY = """
version: 1
egress: {allow: [{host: site.test, methods: [GET], ports: [80]}, {host: inside.test, methods: [GET], ports: [80]}]}
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    requires(Lab.possible(), "no network namespace can be made here")
    with Lab() as lab:
        lab.add_host("site.test", SITE)
        lab.add_host("inside.test", INTERNAL)
        yield lab


@pytest.fixture(scope="module")
def origin(lab: Lab) -> netlab.Origin:
    return lab.http(SITE)


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@dataclass
class Running:
    """A gateway in the foreground of its own process."""

    process: subprocess.Popen[bytes]
    told: dict[str, Any]

    @property
    def directory(self) -> Path:
        return Path(self.told["run_dir"])

    def end(self, number: int = signal.SIGTERM) -> tuple[int, dict[str, Any]]:
        """End it by a signal; return its exit code and its last line."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, dict[str, Any]]:
        assert self.process.stdout is not None
        last = json.loads(self.process.stdout.read())
        return self.process.wait(30), last


def command(lab: Lab, *words: str | Path) -> list[str]:
    return lab.command([sys.executable, "-m", "stockade.cli", *map(str, words)])


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "COLUMNS": "200"}


def files(folder: Path, policy: str = POLICY) -> tuple[Path, Path]:
    (folder / "policy.yaml").write_text(policy, "utf-8")
    (folder / "operator.yaml").write_text(OPERATOR, "utf-8")
    return folder / "policy.yaml", folder / "operator.yaml"


@contextlib.contextmanager
def gateway(lab: Lab, folder: Path, *words: str | Path, policy: str = POLICY) -> Iterator[Running]:
    """Start one; it is killed at the end of the block if it still lives."""
    text, operator = files(folder, policy)
    argv = command(lab, "egress", "gateway", text, "--operator", operator, "--json", *words)
    with subprocess.Popen(argv, cwd=folder, env=environment(), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "it did not start; its message stands above"
            yield Running(process, json.loads(line))
        finally:
            process.kill()


def fails(lab: Lab, folder: Path, *words: str | Path, policy: str = POLICY) -> str:
    """Start one that cannot be; return what it says."""
    text, operator = files(folder, policy)
    argv = command(lab, "egress", "gateway", text, "--operator", operator, *words)
    done = subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert not (folder / "runs").exists()
    return done.stderr.decode()


def over_unix(path: Path) -> Client:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return Client(sock)


def keys(folder: Path, ca: trustme.CA) -> dict[str, Path]:
    """Write what a gateway and a node need; return the paths."""
    cert, key = pem(ca, "gateway.test", WHERE.partition(":")[0])
    own_cert, own_key = pem(ca, "node7.test")
    found = {"cert": cert, "key": key, "client-ca": ca.cert_pem.bytes(), "node-cert": own_cert, "node-key": own_key}
    paths = {name: folder / f"{name}.pem" for name in found}
    for name, data in found.items():
        paths[name].write_bytes(data)
        paths[name].chmod(0o600)
    return paths


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_unix_socket_is_served_until_a_signal_and_sealed(
    lab: Lab, origin: netlab.Origin, tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "out.sock"
    with gateway(lab, tmp_path, "--listen", f"unix:{path}", "--run-id", "gw1") as running:
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert running.told["state"] == "listening"
        assert (running.told["tls"], running.told["run_id"]) == (False, "gw1")
        with over_unix(path) as client:
            assert client.get("http://site.test/public/a", "X-Rollout-Id: ep_1").body == b"hello"
            assert client.get("http://site.test/private/a").reason == "path_not_allowed"
        with over_unix(path) as client:
            assert client.get("http://inside.test/x").reason == "internal_address"
        metrics = subprocess.run(
            command(lab, "egress", "metrics", "gw1", "--json"),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            timeout=60,
            check=False,
        )
        values = {(one["name"], *one["labels"].values()): one["value"] for one in json.loads(metrics.stdout)}
        assert values["stockade_egress_decisions_total", "request", "allowed"] == 1
        code, last = running.end(number)
    assert (code, last["state"], last["reason"]) == (0, "ended", f"signal {number.name}")
    assert (last["requests"], last["denied"]) == (3, 2)
    assert last["bytes_in"] > 0
    assert last["record"] == "verified, unwitnessed"
    assert not path.exists()
    assert_sealed(running.directory)
    [start] = events_of(running.directory, "run.start")
    assert (start["backend"], start["metadata"]) == ("gateway", [f"listen=unix:{path}"])
    asked = events_of(running.directory, "net.request")
    assert [event["reason"] for event in asked] == ["allowed", "path_not_allowed", "internal_address"]
    assert asked[0]["detail"] == "claims x-rollout-id: ep_1"
    [rollout] = summarise(running.directory).rollouts
    assert (rollout.role, rollout.exit, rollout.allowed, rollout.denied) == ("gateway", "closed", 1, 2)
    [end] = events_of(running.directory, "run.end")
    assert (end["outcome"], end["requests"], end["requests_denied"]) == ("ended", 3, 2)


def test_stop_ends_it_at_once_and_is_confirmed(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "out.sock"
    with gateway(lab, tmp_path, "--listen", f"unix:{path}", "--run-id", "gw1") as running:
        argv = command(lab, "stop", "gw1", "--reason", "drill", "--json")
        done = subprocess.run(argv, cwd=tmp_path, env=environment(), capture_output=True, timeout=60, check=False)
        assert json.loads(done.stdout)[0]["state"] == "stopped"
        code, last = running.wait()
    assert (code, last["state"]) == (1, "stopped")
    assert_sealed(running.directory)
    assert [event["reason"] for event in events_of(running.directory, "control.kill")] == ["drill"]


def test_a_worker_that_is_killed_is_replaced_and_the_chain_goes_on(
    lab: Lab, origin: netlab.Origin, tmp_path: Path
) -> None:
    path = tmp_path / "out.sock"
    with gateway(lab, tmp_path, "--listen", f"unix:{path}") as running:
        with over_unix(path) as client:
            assert client.get("http://site.test/public/a").status == 200
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        workers = [pid for pid in children if b"stockade.egress" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 1
        os.kill(int(workers[0]), signal.SIGKILL)
        with over_unix(path) as client:
            assert client.get("http://site.test/public/b").status == 200
        _, last = running.end()
    assert (last["requests"], last["denied"]) == (2, 0)
    assert_sealed(running.directory)


def test_a_node_whose_only_way_out_is_the_gateway(
    lab: Lab, origin: netlab.Origin, tmp_path: Path, ca: trustme.CA
) -> None:
    made = keys(tmp_path, ca)
    for name in ("login", "node"):
        (tmp_path / name).mkdir()
    upstream = (
        f"upstream: {{url: 'https://{WHERE}', ca: {made['client-ca']}, "
        f"cert: {made['node-cert']}, key: {made['node-key']}, gateway: true}}\n"
    )
    script = (
        "for u in site.test/public/a site.test/private/a inside.test/x; do curl -s -w '%{http_code} ' http://$u; done"
    )
    given = [f"--{name}={made[name]}" for name in ("cert", "key", "client-ca")]
    with gateway(lab, tmp_path / "login", "--listen", WHERE, *given) as running:
        assert (running.told["listen"], running.told["tls"]) == (WHERE, True)
        (tmp_path / "node" / "policy.yaml").write_text(NODE_POLICY, "utf-8")
        # A node without name servers: nothing can be looked up there.
        (tmp_path / "node" / "operator.yaml").write_text('version: 1\nresolvers: ["11.0.0.254"]\n' + upstream, "utf-8")
        argv = command(lab, "run", "-p", "policy.yaml", "--operator", "operator.yaml", "--", "sh", "-c", script)
        done = subprocess.run(
            argv, cwd=tmp_path / "node", env=environment(), capture_output=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        _, last = running.end()
    said = done.stdout.decode()
    assert said.startswith("hello200 ")
    assert "the gateway said path_not_allowed\n502 " in said
    assert "the gateway said internal_address\n502 " in said
    assert (last["requests"], last["denied"]) == (3, 2)
    [node_run] = (tmp_path / "node" / "runs").glob("run-*")
    claimed = {event["detail"] for event in events_of(running.directory, "net.request")}
    rollouts = {event["rollout_id"] for event in events_of(node_run, "net.request")}
    assert claimed == {f"certificate node7.test; claims x-rollout-id: {rollout}" for rollout in rollouts}
    assert all("checked at the gateway" in event["detail"] for event in events_of(node_run, "net.request"))
    for directory in (running.directory, node_run):
        assert_sealed(directory)


def test_the_authority_that_nodes_must_trust_is_written(lab: Lab, tmp_path: Path) -> None:
    path, authority = tmp_path / "out.sock", tmp_path / "authority.pem"
    words = ("--listen", f"unix:{path}", "--authority", authority)
    with gateway(lab, tmp_path, *words, policy=INSPECTED) as running:
        assert running.told["inspects"]
        assert authority.read_bytes().startswith(b"-----BEGIN CERTIFICATE-----")
        assert b"KEY" not in authority.read_bytes()
        running.end()


def test_what_it_says_to_a_person(lab: Lab, tmp_path: Path) -> None:
    text, operator = files(tmp_path)
    argv = command(lab, "egress", "gateway", text, "--operator", operator, "--listen", "127.0.0.1:0")
    with subprocess.Popen(argv, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        first = process.stderr.readline().decode()
        assert first.startswith("gateway  127.0.0.1:")
        assert "unix:/path would be this user alone" in first
        assert process.stderr.readline().startswith(b"run      ")
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read().decode()
        assert process.wait(30) == 0
    assert "ended (signal SIGINT): 0 requests, 0 denied" in rest
    assert "(verified, unwitnessed)" in rest


def test_places_where_no_gateway_may_listen(lab: Lab, tmp_path: Path, ca: trustme.CA) -> None:
    made = keys(tmp_path, ca)
    assert "can be reached from elsewhere" in fails(lab, tmp_path, "--listen", WHERE)
    assert "can be reached from elsewhere" in fails(lab, tmp_path, "--listen", "[::]:3129")
    some = ("--cert", made["cert"], "--key", made["key"])
    assert "go together" in fails(lab, tmp_path, "--listen", WHERE, *some)
    assert "needs no certificates" in fails(lab, tmp_path, "--listen", f"unix:{tmp_path}/s", *some)
    for where in ("3129", ":3129", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536"):
        assert "no place to listen" in fails(lab, tmp_path, "--listen", where)
    assert "not an absolute path" in fails(lab, tmp_path, "--listen", "unix:s")
    for name, message in (("client-ca", "no certificate with its key"), ("node-cert", "no certificate with its key")):
        words = ("--cert", made[name], "--key", made["key"], "--client-ca", made["client-ca"])
        assert message in fails(lab, tmp_path, "--listen", WHERE, *words)
    (tmp_path / "empty.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    words = ("--cert", made["cert"], "--key", made["key"], "--client-ca", tmp_path / "empty.pem")
    assert "no authorities" in fails(lab, tmp_path, "--listen", WHERE, *words)


def test_nothing_is_removed_that_is_no_dead_socket(lab: Lab, tmp_path: Path) -> None:
    kept = tmp_path / "precious"
    kept.write_text("data")
    assert "is taken" in fails(lab, tmp_path, "--listen", f"unix:{kept}")
    assert kept.read_text() == "data"
    live = tmp_path / "live.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(live))
        listener.listen(1)
        assert "is taken" in fails(lab, tmp_path, "--listen", f"unix:{live}")
    with gateway(lab, tmp_path, "--listen", f"unix:{live}") as running:  # dead now: it makes room
        assert running.end()[0] == 0


def test_a_run_that_is_not_live_has_no_metrics(lab: Lab, tmp_path: Path) -> None:
    with gateway(lab, tmp_path, "--listen", f"unix:{tmp_path}/s", "--run-id", "gw1") as running:
        running.end()
    wait_until(lambda: not (tmp_path / "s").exists(), 10, "the socket is gone")
    argv = command(lab, "egress", "metrics", "gw1")
    done = subprocess.run(argv, cwd=tmp_path, env=environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"no agent of run gw1 is live on this machine" in done.stderr
