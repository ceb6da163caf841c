"""A client that is wrong, or means harm, gets an answer of the closed list and costs nobody else anything."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stockade.broker import AUTH_HEADER
from stockade.client import Run
from stockade.events import verify_run
from tests.agents import SMALL, open_run
from tests.broker.test_api import b64, create

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    """A run whose record must be whole in the end, whatever was asked of it."""
    async with open_run(tmp_path, SMALL, max_episodes=3) as run:
        yield run
    report = verify_run(run.directory)
    assert report.ok, report.problems


@pytest.fixture
async def wire(run: Run) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=run.environment["STOCKADE_BROKER_SOCKET"])
    headers = {AUTH_HEADER: run.environment["STOCKADE_BROKER_TOKEN"]}
    async with httpx.AsyncClient(transport=transport, base_url="http://b", headers=headers, timeout=60) as client:
        yield client


async def sh(wire: httpx.AsyncClient, episode: str, command: str) -> None:
    done = (await wire.post(f"/episodes/{episode}/exec", json={"command": command})).json()
    assert done["return_code"] == 0, done


@pytest.mark.parametrize(
    "body",
    [
        {"ext": {"train_step": 1 << 60}},
        {"ext": {"attempt": -1}},
        {"metadata": {"label": "x" * (1 << 20)}},
        {"metadata": {f"label{number}": "" for number in range(65)}},
        {"env": {f"V{number}": "" for number in range(60_000)}},
        {"env": {"V" * (1 << 20): ""}},
        {"workdir": "/" + "x" * (1 << 20)},
        {"resources": {"disk_gib": 1e308}},
        {"resources": {"disk_gib": -1e308}},
        {"files_b64": {"/workspace/" + "x" * 300: ""}},
        {"files_b64": {"/etc/passwd": ""}},
    ],
    ids=lambda body: "-".join(body)[:20],
)
async def test_a_bad_wish_is_refused_and_leaves_the_record_whole(wire: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """It was the node's failure before, and an empty file in the record that no verification accepted."""
    answer = await wire.post("/episodes", json={"image": "host", **body})
    assert answer.status_code in (400, 422), answer.text


@pytest.mark.parametrize(
    "body",
    [{"env": {f"V{number}": "" for number in range(60_000)}}, {"cwd": "/" + "x" * (1 << 20)}],
    ids=["env", "cwd"],
)
async def test_a_command_too_long_for_the_record_does_not_end_the_rollout(
    wire: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    """A line of the record has an end; what did not fit ended the rollout as a fault of the node."""
    episode = await create(wire)
    answer = await wire.post(f"/episodes/{episode}/exec", json={"command": "true", **body})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    await sh(wire, episode, "true")


def sparse_archive(size_bytes: int) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w:", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("holes")
        member.pax_headers = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.name": "holes",
            "GNU.sparse.size": str(size_bytes),
            "GNU.sparse.numblocks": "1",
            "GNU.sparse.map": "0,0",
        }
        tar.addfile(member)
    return gzip.compress(plain.getvalue())


def test_without_the_check_a_sparse_member_is_as_large_as_it_says() -> None:
    with tarfile.open(fileobj=io.BytesIO(sparse_archive(1 << 20)), mode="r:gz") as tar:
        (member,) = tar
        content = tar.extractfile(member)
        assert member.isreg()
        assert content is not None
        assert len(content.read()) == 1 << 20


async def test_an_archive_of_holes_is_refused(run: Run, wire: httpx.AsyncClient) -> None:
    """200 bytes made the agent hold 6 GiB, and stand still for half a minute."""
    episode = await create(wire)
    body = {"path": "/workspace", "archive_b64": b64(sparse_archive(8 << 30))}
    answer = await wire.put(f"/episodes/{episode}/dirs", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert run._process is not None
    peak = next(line for line in Path(f"/proc/{run._process.pid}/status").read_text().splitlines() if "VmHWM" in line)
    assert int(peak.split()[1]) < 1 << 20


async def test_a_name_that_is_no_utf_8_does_not_spoil_the_collection(wire: httpx.AsyncClient) -> None:
    """One link with such a name made every collection of the directory a failure of the node."""
    episode = await create(wire)
    await sh(wire, episode, "ln -s /etc \"$(printf '\\377')\" && echo fine > kept")
    got = await wire.get(f"/episodes/{episode}/dirs", params={"path": "/workspace"})
    assert got.status_code == 200, got.text
    assert got.json()["ext"]["skipped"] == [{"path": "\\udcff", "reason": "symbolic_link"}]


LEASE = """
import fcntl, os, signal, time
file = open("/workspace/leased", "w+")
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
if os.fork() == 0:
    for number in range(3):
        os.close(number)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    time.sleep(60)
"""


async def test_what_a_program_does_to_its_files_is_never_the_nodes_fault(wire: httpx.AsyncClient) -> None:
    """A client that trusts ``backend_error`` would mask the sample of whoever can bring one about."""
    episode = await create(wire)
    await wire.put(
        f"/episodes/{episode}/files", json={"path": "/workspace/lease.py", "content_b64": b64(LEASE.encode())}
    )
    await sh(wire, episode, "python3 lease.py && cp /bin/sleep busy && (./busy 60 >/dev/null 2>&1 &) && sleep 0.2")
    await sh(wire, episode, "mkdir closed && echo x > closed/file && chmod 0 closed && mkfifo fifo && ln -s / link")
    names = ("leased", "busy", "closed/file", "fifo", "link", "link/file", "n" * 300)
    for name in names:
        path = f"/workspace/{name}"
        read = await wire.get(f"/episodes/{episode}/files", params={"path": path})
        wrote = await wire.put(f"/episodes/{episode}/files", json={"path": path, "content_b64": ""})
        for answer in (read, wrote):
            assert answer.status_code == 200 or answer.json()["code"] == "invalid_request", (name, answer.text)
    got = await wire.get(f"/episodes/{episode}/dirs", params={"path": "/workspace"})
    assert got.status_code == 200, got.text
    await sh(wire, episode, "chmod 0 /workspace")
    got = await wire.get(f"/episodes/{episode}/dirs", params={"path": "/workspace"})
    assert got.json()["code"] == "invalid_request"
