"""The closed list of reasons: each one is answered, and each one has a test that makes it happen."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import h11
import pytest

from stockade.egress.gate import TLS_ACCESS_DENIED, Reason, error_response, socks_reply, status_of

GATE = Path(__file__).resolve().parent
TESTS = GATE.parents[1]

STATUS = {
    Reason.MALFORMED_REQUEST: 400,
    Reason.MALFORMED_HOST: 400,
    Reason.MALFORMED_PATH: 400,
    Reason.MALFORMED_BODY: 400,
    Reason.UNSUPPORTED_SCHEME: 400,
    Reason.HEADER_TIMEOUT: 408,
    Reason.REQUEST_TOO_LARGE: 413,
    Reason.QUERY_TOO_LARGE: 414,
    Reason.HOST_MISMATCH: 421,
    Reason.RATE_LIMITED: 429,
    Reason.TOO_MANY_CONNECTIONS: 429,
    Reason.HEADER_TOO_LARGE: 431,
    Reason.TOO_MANY_HEADERS: 431,
    Reason.INTERNAL_ERROR: 500,
    Reason.UNSUPPORTED_CODING: 501,
    Reason.UNSUPPORTED_COMMAND: 501,
    Reason.RESOLVE_FAILED: 502,
    Reason.UPSTREAM_FAILED: 502,
    Reason.UPSTREAM_MALFORMED: 502,
    Reason.UPSTREAM_CLOSED: 502,
    Reason.UPSTREAM_TLS: 502,
    Reason.RECORD_FAILED: 503,
    Reason.STORE_FULL: 503,
    Reason.STORE_FAILED: 503,
    Reason.IDLE_TIMEOUT: 504,
    Reason.TOTAL_TIMEOUT: 504,
    Reason.NOT_RECORDED: 504,
}
"""Every other reason is a refusal by rule: 403, which asks nobody for credentials and promises nothing (case 104)."""

SHELL = {
    Reason.BYTES_IN_EXCEEDED,
    Reason.CLIENT_CLOSED,
    Reason.CLIENT_TLS,
    Reason.COMPLETED,
    Reason.HEADER_TIMEOUT,
    Reason.IDLE_TIMEOUT,
    Reason.INSPECTED,
    Reason.INTERNAL_ERROR,
    Reason.NOT_RECORDED,
    Reason.RECORD_FAILED,
    Reason.REVOKED,
    Reason.SECRET_FOUND,
    Reason.STORE_FAILED,
    Reason.STORE_FULL,
    Reason.TOO_MANY_NAMES,
    Reason.TOTAL_TIMEOUT,
    Reason.UPSTREAM_CLOSED,
    Reason.UPSTREAM_FAILED,
    Reason.UPSTREAM_TLS,
}
"""What only the processes around the gate make happen: their tests are outside this folder."""


@pytest.mark.parametrize("reason", list(Reason))
def test_status_of_each_reason(reason):
    assert status_of(reason) == STATUS.get(reason, 403)
    assert re.fullmatch(r"[a-z][a-z_]{2,30}", reason.value)
    assert reason.name == reason.value.upper()


@pytest.mark.parametrize("reason", list(Reason))
def test_egress_case_104_each_reason_has_an_answer_that_clients_read(reason):
    raw = error_response(status_of(reason), reason, "detail \r\n\x1b", retry_after_s=3)
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "a.example")]))
    client.send(h11.EndOfMessage())
    client.receive_data(raw)
    head = client.next_event()
    assert isinstance(head, h11.Response)
    assert head.status_code == status_of(reason) != 407
    fields = dict(head.headers)
    assert fields[b"x-stockade-reason"] == reason.value.encode()
    assert (b"retry-after" in fields) is (head.status_code == 429)
    body = client.next_event()
    assert isinstance(body, h11.Data)
    assert reason.value.encode() in bytes(body.data)


@pytest.mark.parametrize("reason", list(Reason))
def test_each_reason_has_a_socks_reply(reason):
    version, code, *rest = socks_reply(reason)
    assert (version, rest) == (5, [0, 1, 0, 0, 0, 0, 0, 0])
    assert code in (0, 1, 2, 4, 5, 7)
    if status_of(reason) in (403, 429):
        assert code in (0, 2)


def test_the_alert_is_one_record():
    assert TLS_ACCESS_DENIED[:1] == b"\x15"
    assert TLS_ACCESS_DENIED[3:5] == (2).to_bytes(2, "big")
    assert TLS_ACCESS_DENIED[5:] == b"\x02\x31"


@cache
def spoken_of(*, gate: bool) -> frozenset[str]:
    """Return the reasons of which tests of the gate, or all others, speak: by name, or as a record's value."""
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        if path == Path(__file__) or (path.parent == GATE) is not gate:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason":
                found.add(node.attr.lower())
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


@pytest.mark.parametrize("reason", list(Reason))
def test_each_reason_has_a_test_that_makes_it_happen(reason):
    gate = reason not in SHELL
    where = "tests/egress/gate" if gate else "tests outside tests/egress/gate"
    if reason.value not in spoken_of(gate=gate):
        pytest.fail(f"nothing in {where} makes {reason.value} happen")
