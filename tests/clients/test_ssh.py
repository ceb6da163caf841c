"""ssh goes where a ``tcp`` rule says so, and nowhere else: not to another host, nor through a rule about TLS."""

from __future__ import annotations

import os
import shutil

import pytest

from stockade.client import Episode, ExecReply
from tests.clients.conftest import DENIED, FILES, HOSTS
from tests.clients.lab import PROXY, WAYS, Circle, Lab, Way, ok, said, tunnel
from tests.clients.shell import USER, Shell
from tests.clients.tools import needs
from tests.egress.netlab import Origin, serve_sink
from tests.support import requires

pytestmark = pytest.mark.anyio

HOST = "shell.example.org"
POLICY = """
version: 1
egress:
  allow:
    - {host: shell.example.org, tcp: true, ports: [22]}
    - {host: files.example.org, ports: [22, 443]}
    - {host: inspected.example.org, ports: [22, 443], read_only: true}
"""
LOOT = os.urandom(200_000)
CONNECT = (
    f"ProxyCommand=bash -c 'exec 3<>/dev/tcp/{PROXY.replace(':', '/')};"
    ' printf "CONNECT %h:%p HTTP/1.1\\r\\nHost: %h:%p\\r\\n\\r\\n" >&3;'
    ' while IFS= read -r line <&3 && [ "$line" != $(printf "\\r") ]; do echo "$line" >&2; done; cat <&3 & exec cat >&3\''
)
"""ssh reads no variable for a proxy; who wants one gives it a command."""


@pytest.fixture(scope="module")
def shell(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    needs("ssh", "bash")
    requires(shutil.which("dropbear", path="/usr/sbin:/usr/bin"), "dropbear is not installed")
    shell = Shell(tmp_path_factory.mktemp("shell"))
    for ip in (HOSTS[HOST], DENIED):
        lab.origin(ip, 22, shell.serve)  # what keeps ssh from the other is only the policy
    return shell


@pytest.fixture(scope="module")
def sinks(lab: Lab) -> list[Origin]:
    """Whoever listens for ssh at hosts that have rules about TLS there."""
    return [lab.origin(ip, 22, serve_sink) for ip in (FILES, HOSTS["inspected.example.org"])]


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


def files(shell: Shell) -> dict[str, bytes]:
    known = "".join(f"{host} {shell.known}\n" for host in (*HOSTS, DENIED))
    return {"/workspace/key": shell.key, "/workspace/known": known.encode(), "/workspace/loot": LOOT}


async def ssh(rollout: Episode, way: Way, host: str, command: str, *options: str) -> ExecReply:
    """Run a command on a host, with the loot as its input."""
    settings = [
        "BatchMode=yes",
        "StrictHostKeyChecking=yes",
        "UserKnownHostsFile=/workspace/known",
        "ConnectTimeout=20",
    ]
    words = [word for setting in (*settings, *options) for word in ("-o", setting)]
    line = ["ssh", "-F", "none", "-i", "/workspace/key", *words, f"{USER}@{host}", command]
    script = 'chmod 600 key && exec "$@" < loot'
    return await rollout.exec(way.argv("sh", "-c", script, "sh", *line), timeout_s=60)


async def test_a_tcp_rule_lets_ssh_through(circle: Circle, shell: Shell, way: Way) -> None:
    async with circle.rollout(files=files(shell)) as rollout:
        assert ok(await ssh(rollout, way, HOST, "cat")) == LOOT
        assert (await ssh(rollout, way, HOST, "exit 7")).return_code == 7
    assert circle.decisions(rollout) == [tunnel(HOST, port=22)] * 2
    assert circle.ways(rollout) == {"transparent"}  # ssh asks no proxy, whatever the variables say
    assert {event["handling"] for event in circle.events(rollout, "net.connect")} == {"raw"}
    assert circle.ends(rollout)[0]["bytes_out"] > len(LOOT)
    assert circle.ends(rollout)[0]["bytes_in"] > len(LOOT)


async def test_a_tcp_rule_holds_for_a_tunnel_of_the_proxy(circle: Circle, shell: Shell) -> None:
    async with circle.rollout(files=files(shell)) as rollout:
        assert ok(await ssh(rollout, WAYS[0], HOST, "cat", CONNECT)) == LOOT
        reply = await ssh(rollout, WAYS[0], "denied.example.org", "cat", CONNECT)
        assert "403 Forbidden" in said(reply)
    assert circle.decisions(rollout) == [
        tunnel(HOST, port=22),
        tunnel("denied.example.org", "host_not_allowed", 22),
    ]
    assert circle.ways(rollout) == {None}


async def test_ssh_reaches_no_other_host(circle: Circle, shell: Shell, way: Way) -> None:
    before = shell.sessions
    async with circle.rollout(files=files(shell)) as rollout:
        assert "Could not resolve hostname" in said(await ssh(rollout, way, "denied.example.org", "cat"))
        reply = await ssh(rollout, way, DENIED, "cat")
        assert reply.return_code == 255, said(reply)
    assert [(one.verdict, one.host, one.port) for one in circle.decisions(rollout)] == [("denied", DENIED, 22)]
    assert shell.sessions == before


async def test_a_rule_about_tls_lets_no_ssh_through(
    circle: Circle, shell: Shell, sinks: list[Origin], way: Way
) -> None:
    async with circle.rollout(files=files(shell)) as rollout:
        for host in ("files.example.org", "inspected.example.org"):
            reply = await ssh(rollout, way, host, "cat", *([CONNECT] if way.proxied else []))
            assert reply.return_code == 255, said(reply)
    found = circle.events(rollout, "net.connect", "net.request", "net.end")
    assert [(one["server.address"], one["reason"]) for one in found if one["verdict"] == "denied"] == [
        ("files.example.org", "not_tls" if way.proxied else "malformed_request"),
        ("inspected.example.org", "malformed_request"),
    ]
    assert [bytes(sink.data) for sink in sinks] == [b"", b""]
