"""The episode API as an unchanged protocol-2 client sees it, on a real agent."""

from __future__ import annotations

import base64
import gzip
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents import SMALL, open_run

pytestmark = pytest.mark.anyio
AUTH = "OPENSANDBOX-EPISODE-BROKER-AUTH"


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client that knows nothing but HTTP, with the token."""
    async with open_run(tmp_path, SMALL, max_episodes=3) as run:
        environment = run.environment
        transport = httpx.AsyncHTTPTransport(uds=environment["STOCKADE_BROKER_SOCKET"])
        headers = {AUTH: environment["STOCKADE_BROKER_TOKEN"]}
        async with httpx.AsyncClient(transport=transport, base_url="http://b", headers=headers, timeout=60) as client:
            yield client


async def create(wire: httpx.AsyncClient, **body: Any) -> str:
    answer = await wire.post("/episodes", json={"image": "host", **body})
    assert answer.status_code == 201, answer.text
    assert answer.json()["status"] == "running"
    return str(answer.json()["episode_id"])


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.promise("S5.5")
async def test_a_plain_protocol_2_session(wire: httpx.AsyncClient) -> None:
    health = (await wire.get("/health")).json()
    assert health["status"] == "ok"
    assert health["protocol_version"] == "2"
    episode = await create(
        wire, workdir="/workspace", env={"GREETING": "hello"}, files_b64={"/workspace/in": b64(b"x\0y")}
    )
    assert episode.startswith("ep_")
    assert (await wire.get(f"/episodes/{episode}")).json() == {"status": "running"}

    done = (await wire.post(f"/episodes/{episode}/exec", json={"command": "echo $GREETING; echo e >&2; exit 7"})).json()
    assert (done["stdout"], done["stderr"], done["return_code"], done["error_type"]) == ("hello\n", "e\n", 7, None)

    got = await wire.get(f"/episodes/{episode}/files", params={"path": "/workspace/in"})
    assert got.json() == {"content_b64": b64(b"x\0y")}
    put = await wire.put(f"/episodes/{episode}/files", json={"path": "/workspace/a/b", "content_b64": b64(b"new")})
    assert (put.status_code, put.content) == (204, b"")

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("deep/c")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"cc"))
    body = {"path": "/workspace/a", "archive_b64": b64(packed.getvalue())}
    assert (await wire.put(f"/episodes/{episode}/dirs", json=body)).status_code == 204
    back = (await wire.get(f"/episodes/{episode}/dirs", params={"path": "/workspace"})).json()
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(back["archive_b64"])), mode="r:gz") as tar:
        assert sorted(tar.getnames()) == ["a/b", "a/deep/c", "in"]
    assert (await wire.delete(f"/episodes/{episode}")).json()["closed"] is True
    gone = await wire.get(f"/episodes/{episode}")
    assert (gone.status_code, gone.json()["code"]) == (404, "episode_not_found")


@pytest.mark.promise("S5.4")
async def test_every_route_wants_the_token(wire: httpx.AsyncClient) -> None:
    episode = await create(wire)
    routes = [
        ("GET", "/health"),
        ("POST", "/episodes"),
        ("GET", f"/episodes/{episode}"),
        ("DELETE", f"/episodes/{episode}"),
        ("POST", f"/episodes/{episode}/exec"),
        ("PUT", f"/episodes/{episode}/files"),
        ("GET", f"/episodes/{episode}/files"),
        ("PUT", f"/episodes/{episode}/dirs"),
        ("GET", f"/episodes/{episode}/dirs"),
    ]
    for token in ("", "wrong", wire.headers[AUTH][:-1]):
        for method, path in routes:
            answer = await wire.request(method, path, headers={AUTH: token})
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), (method, path)
    assert (await wire.get(f"/episodes/{episode}")).status_code == 200, "nothing was deleted meanwhile"


@pytest.mark.promise("S5.4")
async def test_the_socket_is_the_owners_alone(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        socket = Path(run.environment["STOCKADE_BROKER_SOCKET"])
        assert socket.stat().st_mode & 0o777 == 0o600
        assert socket.parent.stat().st_mode & 0o777 == 0o700


CREATE_REFUSALS: list[tuple[dict[str, Any], int, str]] = [
    ({"provider_options": {"privileged": True}}, 400, "field_not_allowed"),
    ({"image": "python:3.12"}, 403, "image_not_approved"),
    ({"image": "ho st"}, 400, "invalid_request"),
    ({"resources": {"memory_mib": 1 << 20}}, 400, "quota_exceeded"),
    ({"resources": {"cpu": 99}}, 400, "quota_exceeded"),
    ({"resources": {"gpu": 1}}, 400, "quota_exceeded"),
    ({"metadata": {"nemo-rl-job-id": "other"}}, 400, "field_not_allowed"),
    ({"metadata": {"not a key": "v"}}, 400, "invalid_request"),
    ({"env": {"NEMO_RL_X": "1"}}, 400, "field_not_allowed"),
    ({"env": {"A=B": "1"}}, 400, "invalid_request"),
    ({"env": {"A": "x\0y"}}, 400, "invalid_request"),
    ({"workdir": "relative"}, 400, "invalid_request"),
    ({"workdir": "/a/../b"}, 400, "invalid_request"),
    ({"files_b64": {"/workspace/../etc/x": ""}}, 400, "invalid_request"),
    ({"files_b64": {"/workspace/x": "not base64!"}}, 400, "invalid_request"),
    ({"volumes": ["/:/host"]}, 422, "invalid_request"),
    ({"ext": {"role": "root"}}, 422, "invalid_request"),
    ({"ext": {"finding": "looks bad"}}, 422, "invalid_request"),
    ({"ttl_s": -1}, 400, "invalid_request"),
]


@pytest.mark.promise("S5.5")
async def test_what_a_create_may_not_ask_for(wire: httpx.AsyncClient) -> None:
    for body, status, code in CREATE_REFUSALS:
        answer = await wire.post("/episodes", json={"image": "host", **body})
        assert (answer.status_code, answer.json()["code"]) == (status, code), (body, answer.text)
        assert set(answer.json()) == {"error", "code"}
    for raw in (b"", b"[]", b"{", b'{"image": 1}', b"\xff\xfe"):
        answer = await wire.post("/episodes", content=raw)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), raw


async def test_what_an_exec_may_not_ask_for(wire: httpx.AsyncClient) -> None:
    episode = await create(wire)
    table: list[tuple[dict[str, Any], int, str]] = [
        ({"command": ""}, 422, "invalid_request"),
        ({"command": "id", "user": "root"}, 501, "unsupported_operation"),
        ({"command": "id", "user": 0}, 501, "unsupported_operation"),
        ({"command": "id", "timeout_s": 0}, 400, "invalid_request"),
        ({"command": "id", "cwd": "x"}, 400, "invalid_request"),
        ({"command": "id", "env": {"": "x"}}, 400, "invalid_request"),
        ({"command": "a\0b"}, 400, "invalid_request"),
        ({"ext": {"argv": []}}, 400, "invalid_request"),
        ({"command": "id", "nope": 1}, 422, "invalid_request"),
    ]
    for body, status, code in table:
        answer = await wire.post(f"/episodes/{episode}/exec", json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code), (body, answer.text)
    ok = await wire.post(f"/episodes/{episode}/exec", json={"command": "id -u", "user": 1000})
    assert ok.json()["stdout"] == "1000\n"


async def test_no_more_episodes_than_allowed(wire: httpx.AsyncClient) -> None:
    episodes = [await create(wire) for _ in range(3)]
    full = await wire.post("/episodes", json={"image": "host"})
    assert (full.status_code, full.json()["code"]) == (429, "quota_exceeded")
    await wire.delete(f"/episodes/{episodes[0]}")
    await create(wire)


async def test_a_body_that_is_too_large_is_not_read_to_its_end(wire: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * (1 << 20)

    answer = await wire.post("/episodes", content=endless())
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")


@pytest.mark.parametrize("name", ["../escape", "/etc/x", "link", "device"])
async def test_archives_that_would_leave_the_directory(wire: httpx.AsyncClient, name: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        if name == "device":
            member.type = tarfile.CHRTYPE
        tar.addfile(member)
    episode = await create(wire)
    body = {"path": "/workspace", "archive_b64": b64(packed.getvalue())}
    answer = await wire.put(f"/episodes/{episode}/dirs", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


async def test_a_gzip_bomb_is_refused(wire: httpx.AsyncClient) -> None:
    episode = await create(wire)
    bomb = gzip.compress(b"\0" * (300 << 20), compresslevel=9)
    assert len(bomb) < 1 << 20
    answer = await wire.put(f"/episodes/{episode}/dirs", json={"path": "/workspace", "archive_b64": b64(bomb)})
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")


async def test_unknown_routes_and_methods_answer_in_the_same_form(wire: httpx.AsyncClient) -> None:
    for method, path in (("GET", "/nope"), ("POST", "/health"), ("GET", "/docs"), ("GET", "/openapi.json")):
        answer = await wire.request(method, path)
        assert answer.status_code in (404, 405)
        assert set(answer.json()) == {"error", "code"}


async def test_ext_carries_argv_stdin_usage_and_truth_about_bytes(wire: httpx.AsyncClient) -> None:
    episode = await create(wire)
    ext = {"argv": ["cat"], "stdin_b64": b64(b"\xff\x00raw")}
    done = (await wire.post(f"/episodes/{episode}/exec", json={"ext": ext})).json()
    assert base64.b64decode(done["ext"]["stdout_b64"]) == b"\xff\x00raw"
    assert done["ext"]["truncated"] == {"stdout": False, "stderr": False}
    assert done["ext"]["usage"]["wall_ns"] > 0
    assert done["ext"]["exit"] == "exited"
    late = (await wire.post(f"/episodes/{episode}/exec", json={"command": "sleep 30", "timeout_s": 0.3})).json()
    assert (late["error_type"], late["ext"]["exit"], late["ext"]["fault"]) == ("timeout", "timeout", "candidate")


@pytest.mark.promise("S5.6")
async def test_only_two_grading_episodes_may_be_joined(wire: httpx.AsyncClient) -> None:
    grading = await create(wire, ext={"role": "grading"})
    rollout = await create(wire, ext={"role": "rollout"})
    other = await create(wire, ext={"role": "grading"})
    for first, second in ((grading, rollout), (rollout, grading), (grading, grading)):
        peer = {"episode_id": second, "argv": ["true"]}
        answer = await wire.post(f"/episodes/{first}/exec", json={"ext": {"argv": ["true"], "peer": peer}})
        assert (answer.status_code, answer.json()["code"]) == (400, "field_not_allowed")
    script = "import os; os.write(4, b'ping'); print(os.read(3, 9).decode())"
    echo = "import os; os.write(4, os.read(3, 9)[::-1])"
    peer = {"episode_id": other, "argv": ["python3", "-c", echo]}
    done = (
        await wire.post(f"/episodes/{grading}/exec", json={"ext": {"argv": ["python3", "-c", script], "peer": peer}})
    ).json()
    assert done["stdout"] == "gnip\n"
    assert done["ext"]["peer"]["return_code"] == 0
