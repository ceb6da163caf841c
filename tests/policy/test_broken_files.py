"""Each file of testdata is broken in one way; expected.txt holds what a person is told, word for word.

Names that start with case_NNN refer to the bypass cases of the egress table that a policy can invite.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stockade.errors import PolicyError
from stockade.policy import load_policy

TESTDATA = Path(__file__).parent / "testdata"
FILES = sorted(TESTDATA.glob("*.yaml"))
EXPECTED = {line.split(".yaml")[0]: line for line in (TESTDATA / "expected.txt").read_text("utf-8").splitlines()}
WHOLE_FILE = {"empty", "only_comment", "only_marker"}


def test_each_file_has_a_message_and_each_message_a_file():
    assert [path.stem for path in FILES] == list(EXPECTED)


@pytest.mark.promise("S1.1")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_broken_file(path, monkeypatch):
    monkeypatch.chdir(TESTDATA)
    with pytest.raises(PolicyError) as caught:
        load_policy(Path(path.name))
    error = caught.value
    assert str(error) == EXPECTED[path.stem]
    assert error.path == path.name
    assert (error.line is None) == (path.stem in WHOLE_FILE)
    assert "\n" not in str(error)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_message_cannot_write_to_the_terminal(path):
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    message = str(caught.value).replace(str(path), "")
    assert message.replace("§", "").isascii()
    assert message.isprintable()


def test_every_case_of_the_table_that_a_policy_can_invite_is_here():
    cases = {int(match[1]) for path in FILES if (match := re.match(r"case_(\d+)_", path.stem))}
    assert cases >= {17, 18, 19, 20, 91, 92, 98}
