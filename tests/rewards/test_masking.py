"""A failure that looks like the machinery's would be masked: no program may bring that about (reference §6, row 4)."""

from __future__ import annotations

import pytest

from stockade.gym import make_task
from stockade.rewards import Grader, Verdict, attempt
from tests.rewards.hacks import RIGHT, TESTS

pytestmark = pytest.mark.anyio

_LEAVES = {
    "nothing": "os.remove('solution.py')",
    "a-folder": "os.remove('solution.py'); os.mkdir('solution.py')",
    "a-link-out": "os.remove('solution.py'); os.symlink('/etc/passwd', 'solution.py')",
    "a-link-in": "open('right.py', 'w').write(RIGHT); os.remove('solution.py'); os.symlink('right.py', 'solution.py')",
    "a-hard-link": "os.link('solution.py', 'other.py')",
    "a-fifo": "os.remove('solution.py'); os.mkfifo('solution.py')",
    "a-socket": "os.remove('solution.py'); socket.socket(socket.AF_UNIX).bind('solution.py')",
    "no-permission": "os.chmod('solution.py', 0)",
    "a-closed-workspace": "os.chmod('.', 0)",
    "a-sparse-gigabyte": "os.truncate('solution.py', 1 << 30)",
    "two-megabytes": "open('solution.py', 'w').write('#' * (2 << 20))",
    "a-full-disk": "open('full', 'wb').write(bytes(1 << 26))",
    "no-inodes": "[open(f'f{i}', 'w') for i in range(1 << 17)]",
}

_DOES = {
    "kills-everything": "os.kill(-1, signal.SIGKILL)",
    "kills-its-parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "kills-init": "os.kill(1, signal.SIGKILL)",
    "kills-itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "stops-everything": "os.kill(-1, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)",
    "aborts": "os.abort()",
    "exits-with-126": "os._exit(126)",
    "closes-all": "os.closerange(0, 1024)",
    "eats-memory": "x = []\nwhile True: x.append(bytearray(1 << 22))",
    "eats-descriptors": "x = []\nwhile True: x.append(os.open('/dev/null', 0))",
    "forks": "while True: os.fork()",
    "spins": "while True: pass",
    "says-it-was-us": "sys.stderr.write('fault: infrastructure, node_fault, backend_error'); os._exit(125)",
}

_PROGRAM = """\
import os
import signal
import socket
import sys

RIGHT = {right!r}


def f(x):
    return 0


if __name__ == {when!r}:
{what}
"""


def _program(when: str, what: str) -> str:
    body = "\n".join(f"    {line}" for line in what.split("\n"))
    return _PROGRAM.format(right=RIGHT, when=when, what=body)


async def _verdict(client, program: str) -> Verdict:
    fields = {"task_id": "t", "entry_point": "f", "solution": program, "tests": TESTS, "timeout_s": 4}
    sample = await attempt(client, Grader(client), make_task(fields))
    assert sample.reward == 0, sample.evidence
    return sample.verdict


@pytest.mark.parametrize("what", _LEAVES.values(), ids=_LEAVES)
async def test_whatever_a_rollout_leaves(broker, what):
    assert await _verdict(broker, _program("__main__", what)) in (Verdict.WRONG, Verdict.CANDIDATE_FAULT)


@pytest.mark.promise("S7.6")
@pytest.mark.parametrize("when", ["__main__", "candidate"], ids=["rollout", "grading"])
@pytest.mark.parametrize("what", _DOES.values(), ids=_DOES)
async def test_whatever_a_program_does(broker, when, what):
    assert await _verdict(broker, _program(when, what)) in (Verdict.WRONG, Verdict.CANDIDATE_FAULT)


async def test_limits_are_reported_as_what_they_were(broker):
    for what, evidence in ((_DOES["eats-memory"], "memory_limit"), (_DOES["spins"], "timeout")):
        task = make_task(
            {
                "task_id": "t",
                "entry_point": "f",
                "solution": _program("candidate", what),
                "tests": TESTS,
                "timeout_s": 4,
            }
        )
        sample = await attempt(broker, Grader(broker), task)
        assert (sample.verdict, evidence in sample.evidence) == (Verdict.CANDIDATE_FAULT, True), sample.evidence
