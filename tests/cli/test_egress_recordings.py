"""``stockade egress recordings``, and recording on a machine whose operators never thought of a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import events_of
from tests.clients.lab import Lab
from tests.egress import netlab
from tests.support import ROOT, requires

SITE = "11.0.0.10"
POLICY = """
version: 1
egress:
  mode: %s
  recording: week-1
  allow: [{host: site.test, methods: [GET], ports: [80]}]
"""
FETCH = "import sys, urllib.request as u\nfor path in sys.argv[1:]: print(u.urlopen('http://site.test' + path).read().decode())"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    requires(Lab.possible(), "no network namespace can be made here")
    with Lab() as lab:
        lab.add_host("site.test", SITE)
        yield lab


@pytest.fixture(scope="module")
def origin(lab: Lab) -> netlab.Origin:
    return lab.http(SITE, respond=lambda request: netlab.response(b"answer to " + request.line.split()[1]))


def stockade(lab: Lab, folder: Path, *words: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the program with a state directory of its own."""
    argv = lab.command([sys.executable, "-m", "stockade.cli", *map(str, words)])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "STOCKADE_STATE": str(folder / "s"),
        "COLUMNS": "200",
    }
    return subprocess.run(argv, cwd=folder, input=stdin, env=environment, capture_output=True, timeout=100, check=False)


def run(lab: Lab, folder: Path, mode: str, *paths: str, name: str | None = None) -> subprocess.CompletedProcess[bytes]:
    (folder / "policy.yaml").write_text(POLICY % mode, "utf-8")
    (folder / "operator.yaml").write_text(f'version: 1\nresolvers: ["{netlab.RESOLVER}"]\n', "utf-8")
    given = ["-p", "policy.yaml", "--operator", "operator.yaml", *(["--run-id", name] if name else [])]
    return stockade(lab, folder, "run", *given, "--", "python3", "-c", FETCH, *paths)


def recordings(lab: Lab, folder: Path, *words: str) -> dict[str, Any]:
    done = stockade(lab, folder, "egress", "recordings", "--json", *words)
    assert done.returncode in (0, 1), done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_answers_are_recorded_listed_replayed_checked_and_removed(
    lab: Lab, origin: netlab.Origin, tmp_path: Path
) -> None:
    store = tmp_path / "s" / "store"
    done = run(lab, tmp_path, "record", "/a", "/b", "/a")
    assert done.stdout.decode().split("\n")[:2] == ["answer to /a", "answer to /b"]
    assert f"stockade: answers were recorded in {store} (recording week-1)" in done.stderr.decode()
    assert origin.connections == 2
    told = recordings(lab, tmp_path)
    assert told["store"] == str(store)
    [row] = told["recordings"]
    assert (row["recording"], row["answers"], row["hosts"], row["bytes"], row["damaged"]) == ("week-1", 2, 1, 24, 0)

    lab.dns.queries.clear()
    done = run(lab, tmp_path, "replay", "/b", "/c", name="again")
    assert done.stdout == b"answer to /b\n"
    assert b"HTTP Error 504" in done.stderr
    assert f"stockade: answers came from {store} (recording week-1)" in done.stderr.decode()
    assert (origin.connections, lab.dns.queries) == (2, [])
    sources = [event.get("source") for event in events_of(tmp_path / "runs" / "again", "net.request")]
    assert sources == ["store", None]

    assert recordings(lab, tmp_path, "--check")["ok"]
    blob = max((store / "blobs").iterdir())
    blob.chmod(0o600)
    blob.write_bytes(b"another one!")
    checked = stockade(lab, tmp_path, "egress", "recordings", "--check")
    assert checked.returncode == 1
    assert f"blobs/{blob.name}: its content is not what its name says" in checked.stdout.decode()
    repaired = recordings(lab, tmp_path, "--check", "--repair")
    assert (repaired["ok"], len(repaired["damaged"])) == (False, 2)
    assert recordings(lab, tmp_path, "--check")["ok"]

    asked = stockade(lab, tmp_path, "egress", "recordings", "--discard", "week-1", stdin=b"n\n")
    assert (asked.returncode, b"nothing was removed" in asked.stderr) == (1, True)
    assert recordings(lab, tmp_path)["recordings"][0]["answers"] == 1
    asked = stockade(lab, tmp_path, "egress", "recordings", "--discard", "week-1", stdin=b"y\n")
    assert (asked.returncode, asked.stdout[:17]) == (0, b"removed 1 answers")
    assert recordings(lab, tmp_path, "--discard", "week-1", "--yes")["removed"] == 0
    assert list((store / "blobs").iterdir()) == []


def test_the_table_for_a_person(lab: Lab, origin: netlab.Origin, tmp_path: Path) -> None:
    run(lab, tmp_path, "record", "/a")
    shown = stockade(lab, tmp_path, "egress", "recordings").stdout.decode()
    assert "bytes used" in shown
    assert "week-1" in shown
    elsewhere = stockade(lab, tmp_path, "egress", "recordings", "--store", tmp_path / "s" / "store")
    assert elsewhere.stdout.decode() == shown


def test_the_operators_store_comes_first(lab: Lab, origin: netlab.Origin, tmp_path: Path) -> None:
    (tmp_path / "operator.yaml").write_text(f"version: 1\nstore: {{path: {tmp_path}/theirs}}\n", "utf-8")
    done = stockade(lab, tmp_path, "egress", "recordings", "--operator", "operator.yaml")
    assert done.returncode == 2
    assert f"{tmp_path}/theirs: there is no store" in done.stderr.decode()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no store"),
        (("--store", "/dev/null"), "there is no store"),
        (("--store", "."), "it was not prepared"),
        (("--repair",), "goes with --check"),
        (("--check", "--discard", "x"), "two different things"),
    ],
)
def test_what_cannot_be_done(lab: Lab, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = stockade(lab, tmp_path, "egress", "recordings", *words)
    assert (done.returncode, message in done.stderr.decode()) == (2, True), done.stderr


def test_a_recording_that_is_not_there(lab: Lab, origin: netlab.Origin, tmp_path: Path) -> None:
    run(lab, tmp_path, "record", "/a")
    done = stockade(lab, tmp_path, "egress", "recordings", "--discard", "../x", "--yes")
    assert (done.returncode, b"there is no recording '../x'" in done.stderr) == (2, True)


def test_a_live_run_mentions_no_store(lab: Lab, origin: netlab.Origin, tmp_path: Path) -> None:
    done = run(lab, tmp_path, "live", "/a")
    assert (done.stdout, done.stderr) == (b"answer to /a\n", b"")
    assert not (tmp_path / "s" / "store").exists()
