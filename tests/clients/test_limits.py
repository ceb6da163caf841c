"""A rollout's byte caps hold against real clients: counted over all its connections, and to the byte."""

from __future__ import annotations

import pytest

from stockade.client import Episode
from tests.clients.conftest import FILES
from tests.clients.lab import Circle, Lab, ok, request, said, tunnel
from tests.clients.origins import DATA, files, path_of
from tests.egress.netlab import Origin, Received, response

pytestmark = pytest.mark.anyio

CAP_IN = 1 << 20
CAP_OUT = 64 << 10
POLICY = """
version: 1
egress:
  allow:
    - {host: files.example.org, ports: [443]}
    - {host: files.example.org, ports: [80], methods: [GET, POST, PUT], paths: ["/**"]}
  limits: {bytes_in: 1 MiB, bytes_out: 64 KiB, bytes_out_per_request: 32 KiB}
"""
BIG = bytes(4 * CAP_IN)


@pytest.fixture(scope="module", autouse=True)
def big(sites: dict[str, list[Origin]]) -> None:
    def respond(asked: Received) -> bytes:
        return response(BIG) if path_of(asked)[1] == "/big.bin" else files(asked)

    for site in sites[FILES]:
        site.respond = respond


async def fetch(rollout: Episode, url: str) -> tuple[int, int]:
    """Return curl's exit code and how many bytes of a body it was given."""
    reply = await rollout.exec(["curl", "-sSf", "-o", "/dev/null", "-w", "%{size_download}", url], timeout_s=60)
    return reply.return_code, int(reply.stdout)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_download_ends_at_the_cap(circle: Circle, scheme: str) -> None:
    async with circle.rollout() as rollout:
        code, size = await fetch(rollout, f"{scheme}://files.example.org/big.bin")
        assert code in (18, 35, 56)  # partial file, or reset
        assert 0 < size < CAP_IN
        # It is the rollout's cap, not the connection's: nothing is left for another one.
        code, size = await fetch(rollout, f"{scheme}://files.example.org/data.bin")
        assert code != 0
        assert size < len(DATA)
    first = circle.ends(rollout)[0]
    assert (first["verdict"], first["reason"]) == ("denied", "bytes_in_exceeded")
    assert sum(end["bytes_in"] for end in circle.ends(rollout)) == CAP_IN


async def test_many_small_downloads_share_the_cap(circle: Circle) -> None:
    async with circle.rollout() as rollout:
        urls = [f"http://files.example.org/data.bin?{number}" for number in range(6)]
        got = [await fetch(rollout, url) for url in urls]
        assert [size for _, size in got[:3]] == [len(DATA)] * 3
        assert sum(size for _, size in got) <= CAP_IN
        assert got[-1][1] < len(DATA)
    ends = circle.ends(rollout)
    assert sum(end["bytes_in"] for end in ends) == CAP_IN
    assert {end["reason"] for end in ends[:3]} == {"completed"}


async def test_an_upload_over_plain_http_is_refused_before_it_begins(
    circle: Circle, sites: dict[str, list[Origin]]
) -> None:
    before = len(sites[FILES][0].received)
    loot = {"/workspace/loot.bin": bytes(CAP_OUT // 2 + 1), "/workspace/small.bin": bytes(CAP_OUT // 4)}
    async with circle.rollout(files=loot) as rollout:
        send = ["curl", "-sS", "-D", "-", "--data-binary"]
        reply = await rollout.exec([*send, "@loot.bin", "http://files.example.org/upload"], timeout_s=60)
        assert "X-Stockade-Reason: request_too_large\r\n" in said(reply)
        reply = await rollout.exec([*send, "@small.bin", "http://files.example.org/upload"], timeout_s=60)
        assert f"taken {CAP_OUT // 4}\n" in said(reply)
    assert circle.decisions(rollout) == [
        request("files.example.org", "request_too_large"),
        request("files.example.org"),
    ]
    assert [len(one.body) for one in sites[FILES][0].received[before:]] == [CAP_OUT // 4]


async def test_an_upload_that_hides_its_size_ends_at_the_cap(circle: Circle, sites: dict[str, list[Origin]]) -> None:
    before = len(sites[FILES][0].received)
    async with circle.rollout(files={"/workspace/loot.bin": bytes(4 * CAP_OUT)}) as rollout:
        words = ["curl", "-sS", "-T", "-", "http://files.example.org/upload"]
        reply = await rollout.exec(["sh", "-c", 'cat loot.bin | "$@"', "sh", *words], timeout_s=60)
        assert "taken" not in said(reply)
    [end] = circle.ends(rollout)
    assert (end["verdict"], end["reason"]) == ("denied", "request_too_large")
    assert end["bytes_out"] <= CAP_OUT // 2
    assert len(sites[FILES][0].received) == before  # it never became a whole request


async def test_an_upload_through_a_tunnel_ends_at_the_cap(circle: Circle, sites: dict[str, list[Origin]]) -> None:
    before = len(sites[FILES][1].received)
    loot = {"/workspace/loot.bin": bytes(4 * CAP_OUT), "/workspace/small.bin": bytes(CAP_OUT // 4)}
    async with circle.rollout(files=loot) as rollout:
        send = ["curl", "-sS", "--data-binary"]
        taken = ok(await rollout.exec([*send, "@small.bin", "https://files.example.org/upload"], timeout_s=60))
        assert taken == b"taken %d\n" % (CAP_OUT // 4)
        reply = await rollout.exec([*send, "@loot.bin", "https://files.example.org/upload"], timeout_s=60)
        assert reply.return_code != 0
        assert "taken" not in said(reply)
    assert circle.decisions(rollout) == [tunnel("files.example.org"), tunnel("files.example.org")]
    assert [end["reason"] for end in circle.ends(rollout)][1] == "bytes_out_exceeded"
    assert sum(end["bytes_out"] for end in circle.ends(rollout)) == CAP_OUT
    assert [len(one.body) for one in sites[FILES][1].received[before:]] == [CAP_OUT // 4]


async def test_without_the_cap_the_same_upload_arrives(lab: Lab, sites: dict[str, list[Origin]]) -> None:
    body = bytes(4 * CAP_OUT)
    with lab.connect(FILES, 80) as sock:
        sock.sendall(
            b"POST /upload HTTP/1.1\r\nHost: files.example.org\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert b"taken %d\n" % len(body) in sock.recv(4096)
