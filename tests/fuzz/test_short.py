"""The short form of ``make fuzz``: a few seconds for each target, so that a harness that rots is seen."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

import pytest

from fuzz.__main__ import fuzz
from fuzz._targets import TARGETS
from tests.support import requires

SECONDS = 5


@pytest.mark.timeout(400)  # a busy machine fuzzes less in its five seconds, and needs longer to begin
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found_in_a_few_seconds(name: str, tmp_path: Path) -> None:
    wheel = platform.machine() == "x86_64" and sys.version_info < (3, 14)
    requires(importlib.util.find_spec("atheris"), "atheris has no wheel for this machine", must_run_in_ci=wheel)
    outcome = fuzz(name, SECONDS, out=tmp_path)
    assert not outcome.problem, outcome.problem
    assert outcome.runs > 0
    assert outcome.coverage > 0, "the package is followed"
