"""Real processes on one store: at once, killed at every step, at the limit, locked down."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from stockade.egress._store import Store
from stockade.egress._store_tool import prepare_store
from tests.egress.store.kit import MIB, fetch, found, opened, record_key, size_of
from tests.support import ROOT, requires_root


def act(*arguments, **kwargs):
    """Run a command of actors.py and return its answer."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [sys.executable, "-m", "tests.egress.store.actors", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, env=environ, check=False, timeout=110, cwd=ROOT, **kwargs)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.promise("S3.17")
@pytest.mark.parametrize("heir", ["heir", "other"])
@pytest.mark.parametrize("unnamed", ["unnamed", "named"])
def test_a_recorder_killed_at_any_step_leaves_all_or_nothing(place, unnamed, heir):
    place.mkdir()
    told = act("crash", place, unnamed, heir)
    assert told["faults"] == []
    assert told["steps"] > 20
    assert 1 < told["kept"] < told["steps"], "some died before and some after their entry had its name"


@pytest.mark.parametrize("unnamed", ["unnamed", "named"])
def test_of_two_that_record_the_same_at_once_one_wins(place, unnamed):
    told = act("race", place, 4, unnamed)
    assert told["statuses"] == [0] * 4
    workers = told["workers"]
    assert len(workers) == 4
    assert sorted(index for worker in workers for index in worker["won"]) == list(range(20))
    assert all(worker["good"] for worker in workers)
    seen = workers[0]["seen"]
    assert all(worker["seen"] == seen for worker in workers)
    assert all(seen[index] == str(worker["by"]) for worker in workers for index in worker["won"])
    with opened(place) as store:
        assert store.space.used() == size_of(place)
        assert [found(store, record_key(f"/race/{number}")).headers[0][1].decode() for number in range(20)] == seen


@pytest.mark.promise("S3.17")
def test_however_many_write_the_limit_holds(place):
    limit = 6 * MIB
    told = act("fill", place, 6, limit)
    assert told["most"] <= limit
    assert told["killed"] == 3
    assert told["damaged"] == []
    assert told["counted"] == told["size"] <= told["before"] <= limit
    assert told["full"] == limit


@pytest.mark.parametrize("unnamed", ["unnamed", "named"])
@pytest.mark.parametrize("user", ["own", "other"])
def test_a_locked_down_worker_needs_nothing_but_the_directory(place, unnamed, user):
    uid = os.geteuid()
    if user == "other":
        requires_root()
        uid = 54321
    fd = prepare_store(place, uid, uid if user == "other" else os.getegid())
    try:
        told = act("locked", fd, uid, unnamed, pass_fds=[fd])
        if told["landlock"]:
            assert told["elsewhere"] is False
        assert told == {
            "uid": uid,
            "landlock": told["landlock"],
            "elsewhere": told["elsewhere"],
            "kept": [True, False, True],
            "whole": True,
            "sent": True,
            "listed": 2,
        }
        assert {one.stat().st_uid for one in place.rglob("*")} == {uid}
        store = Store(fd, 0)
        try:
            assert len(fetch(store, record_key("/crash"))) == 128 * 1024
        finally:
            store.close()
    finally:
        os.close(fd)
