"""Every input that fuzzing began with or found, looked at again; atheris is not needed for that."""

from __future__ import annotations

import random

import pytest

import fuzz.__main__ as runner
from fuzz._corpus import FOLDER, found, inputs, keep
from fuzz._seeds import seeds
from fuzz._targets import TARGETS

MAX_BYTES = 1 << 20


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_once_holds(name: str) -> None:
    check = TARGETS[name].check()
    for sample in inputs(name):
        check(sample)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_fit_and_are_no_strangers(name: str) -> None:
    """A seed over the length that is fuzzed would be cut; a target whose seeds are all refused would learn nothing."""
    assert seeds(name)
    assert max(map(len, inputs(name))) <= TARGETS[name].max_len


def test_the_corpus_is_small_and_belongs_to_targets() -> None:
    files = list(FOLDER.iterdir())
    assert {path.stem for path in files} <= set(TARGETS)
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


def test_a_corpus_is_read_as_it_was_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fuzz._corpus.FOLDER", tmp_path)
    chance = random.Random(1)
    samples = {bytes(range(256)), b"", b"\\x00\n", b"\x85\x1c\r\n", *(chance.randbytes(40) for _ in range(50))}
    keep("socks", [*samples, *seeds("socks")])
    assert set(found("socks")) == samples
    assert len(found("socks")) == len(samples)


def test_what_is_found_is_told_and_kept(tmp_path, monkeypatch) -> None:
    """77 is how atheris ends after an exception, -1 one that had to be ended."""
    for status in (77, -1):
        monkeypatch.setattr(runner, "_child", lambda *_, status=status: (status, "AssertionError: broken"))
        outcome = runner.fuzz("socks", 1, keeping=True, out=tmp_path)
        assert f"exit status {status}" in outcome.problem
        assert "AssertionError: broken" in outcome.problem
        assert (tmp_path / "socks.log").read_text() == "AssertionError: broken"
