"""Training jobs: GRPO on TRL, with every model-written program run and graded through the broker.

Importing this package needs neither torch nor TRL; only the training process does, and says so where they miss.
"""

from __future__ import annotations

from stockade.training._arithmetic import (
    Judged,
    Settled,
    coin_flips,
    reason_to_hold,
    settle,
)
from stockade.training._job import Job, ResolvedJob, load_job, parse_job
from stockade.training._process import main, require_engine
from stockade.training._service import rate_for, resolve_job, serve_rates, service_of

__all__ = [
    "Job",
    "Judged",
    "ResolvedJob",
    "Settled",
    "coin_flips",
    "load_job",
    "main",
    "parse_job",
    "rate_for",
    "reason_to_hold",
    "require_engine",
    "resolve_job",
    "serve_rates",
    "service_of",
    "settle",
]
