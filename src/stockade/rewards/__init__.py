"""Graders and the integrity of the reward (docs/grading.md)."""

from __future__ import annotations

from stockade.rewards._admission import NULL_BASELINES, REFERENCE_RUNS, Admission, admit_task
from stockade.rewards._attempt import NO_ROLLOUT, attempt
from stockade.rewards._batch import BatchResult, run_batch
from stockade.rewards._grader import Grader
from stockade.rewards._results import ResultLog
from stockade.rewards._verdict import Grade, Sample, Usage, Verdict

__all__ = [
    "NO_ROLLOUT",
    "NULL_BASELINES",
    "REFERENCE_RUNS",
    "Admission",
    "BatchResult",
    "Grade",
    "Grader",
    "ResultLog",
    "Sample",
    "Usage",
    "Verdict",
    "admit_task",
    "attempt",
    "run_batch",
]
