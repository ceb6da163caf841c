"""The worker as a process: what it gives up, whom it obeys, when it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stockade.egress import _wire
from stockade.egress._channel import worker_environment
from stockade.egress._ledger import make_ledger, memory_file
from stockade.egress._wire import WireError
from tests.egress.netlab import NetLab
from tests.egress.proxy.harness import Worker, rules, running
from tests.support import requires, requires_root


def status(pid: int) -> dict[str, str]:
    """Return /proc/PID/status as a mapping."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_the_worker_says_what_was_enforced(worker: Worker) -> None:
    ready = worker.ready
    assert ready["landlock"].startswith("abi-") or ready["landlock"] == "unenforced"
    assert ready["seccomp"].startswith("sha256:") or ready["seccomp"] == "unenforced"
    assert ready["nofile"] >= 1024
    assert status(worker.process.pid)["NoNewPrivs"] == "1"
    requires(ready["landlock"] != "unenforced", "no Landlock")


def test_a_root_worker_drops_to_the_uid_it_is_given(lab: NetLab, tmp_path: Path) -> None:
    requires_root()
    with running(lab, tmp_path, uid=65534, gid=65534) as worker:
        found = status(worker.process.pid)
        assert found["Uid"].split() == ["65534"] * 4
        assert found["Gid"].split() == ["65534"] * 4
        assert found["Groups"] == ""
        assert found["CapEff"].strip("0") == ""
        rollout = worker.attach()
        with rollout.connect() as client:
            assert client.connect("evil.example.org").status == 403
        assert rollout.last("net.connect")["verdict"] == "denied"


PLAIN: dict[str, Any] = {"settings": "{}", "parts": [], "place": 0, "places": 1, "own_addresses": []}


def test_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = theirs.fileno()
    code = (
        "import subprocess, sys\n"
        f"argv = [sys.executable, '-m', 'stockade.egress', '--control-fd', '{fd}']\n"
        f"subprocess.Popen(argv, pass_fds=[{fd}])\n"
        "sys.stdin.read()\n"
    )
    env = worker_environment()
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd], env=env, stdin=subprocess.PIPE) as parent:
        theirs.close()
        ours.settimeout(15)
        _wire.send(ours, _wire.encode({"op": "configure", "id": 1, **PLAIN}))
        answer = _wire.receive(ours)
        assert answer is not None
        assert answer[0]["ok"] is True
        parent.kill()
        # We hold the control socket open, so only the death of the parent can end the worker.
        deadline = time.monotonic() + 5
        while (received := _wire.receive(ours)) is not None:
            assert "event" in received[0]
            assert time.monotonic() < deadline
    ours.close()


def test_the_worker_ends_when_the_control_socket_closes(lab: NetLab, tmp_path: Path) -> None:
    with Worker(lab, tmp_path) as worker:
        worker.attach()
        worker.control.shutdown(socket.SHUT_RDWR)
        assert worker.process.wait(5) == 0


def test_shutdown_is_answered(lab: NetLab, tmp_path: Path) -> None:
    with Worker(lab, tmp_path) as worker:
        assert worker.ask("ping")["now_ns"] > 0
        assert worker.ask("shutdown")["ok"] is True
        assert worker.process.wait(5) == 0


@pytest.mark.parametrize(
    ("op", "fields", "what"),
    [
        ("attach", {"rollout_id": "x", "roles": ["proxy"]}, "attach takes record"),
        ("attach", {"rollout_id": "x", "roles": ["window"]}, "ValueError"),
        ("detach", {"rollout_id": "unknown"}, "not attached"),
        ("revoke", {"rollout_id": "unknown"}, "not attached"),
        ("configure", PLAIN, "already configured"),
        ("frobnicate", {}, "unknown operation"),
        ("attach", {}, "rollout_id"),
    ],
)
def test_a_request_that_cannot_be_done_is_an_error_answer(
    op: str, fields: dict[str, Any], what: str, worker: Worker
) -> None:
    answer = worker.ask(op, **fields)
    assert what in answer["error"]
    assert worker.ask("ping")["ok"] is True


def test_egress_case_091_rules_that_cannot_be_read_are_refused(worker: Worker, tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    fd = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    fields = {"rollout_id": "ep_x", "context": {"run_id": "r", "rollout_id": "ep_x", "policy_digest": "d"}}
    ledger = make_ledger()
    for broken in ("", "[]", "{}", "null", json.dumps({**json.loads(rules().to_json()), "surprise": 1})):
        document = memory_file("rules", broken.encode())
        answer = worker.ask("attach", (fd, ledger, document, listener.fileno()), roles=["proxy"], **fields)
        assert "ValueError" in answer["error"], broken
        os.close(document)
    listener.close()
    os.close(ledger)
    os.close(fd)


def test_settings_that_others_could_still_change_are_refused(worker: Worker, tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    fd = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    document = os.memfd_create("rules")
    os.write(document, rules().to_json().encode())
    open_ledger = os.memfd_create("ledger")
    os.ftruncate(open_ledger, 1 << 20)
    fields = {"rollout_id": "ep_x", "context": {"run_id": "r", "rollout_id": "ep_x", "policy_digest": "d"}}
    sealed, fitting = memory_file("rules", rules().to_json().encode()), make_ledger()
    for ledger, given, what in (
        (fitting, document, "not sealed"),
        (open_ledger, sealed, "not sealed"),
        (fitting, sealed, "does not fit"),
    ):
        answer = worker.ask("attach", (fd, ledger, given, listener.fileno()), roles=["proxy"], **fields)
        assert what in answer["error"]
    listener.close()
    for each in (fd, document, open_ledger, sealed, fitting):
        os.close(each)


@pytest.mark.parametrize("packet", [b"not json", b"[]", b'{"op":"ping"}'])
def test_nonsense_on_the_control_socket_ends_the_worker(packet: bytes, lab: NetLab, tmp_path: Path) -> None:
    with Worker(lab, tmp_path) as worker:
        worker.control.send(packet)
        assert worker.process.wait(5) == 0


def test_descriptors_do_not_pile_up(worker: Worker) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{worker.process.pid}/fd"))

    before = count()
    for _ in range(20):
        rollout = worker.attach()
        with rollout.connect() as client:
            client.connect("evil.example.org")
        worker.ask("detach", rollout_id=rollout.rollout_id)
        rollout.close()
        worker.ask("attach", rollout_id="ep_y")
    assert count() == before


def test_detach_ends_connections_and_the_listener(worker: Worker) -> None:
    rollout = worker.attach()
    with rollout.connect() as client:
        client.send(b"GET http://")
        time.sleep(0.1)
        answer = worker.ask("detach", rollout_id=rollout.rollout_id)
        assert client.rest() == b""
    rollout.close()
    assert answer["ok"]
    with pytest.raises(ConnectionRefusedError):
        rollout.connect()


def test_wire_refuses_what_is_too_large() -> None:
    with pytest.raises(WireError):
        _wire.encode({"op": "x" * _wire.MAX_MESSAGE_BYTES})


def test_wire_closes_descriptors_of_a_bad_packet() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        _wire.send(ours, b"nonsense", [ours.fileno(), theirs.fileno()])
        with pytest.raises(WireError):
            _wire.receive(theirs)
        assert len(os.listdir("/proc/self/fd")) == before
