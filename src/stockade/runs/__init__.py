"""The life of a run and of its rollouts: directory, admission, stages of a rollout, state on this node, report."""

from __future__ import annotations

from stockade.runs._admission import Admitted, Ask, Held, RunState, admit
from stockade.runs._layout import LAYOUT_VERSION, RunDirectory, StopRequest, runs_in
from stockade.runs._lifecycle import MOVES, WIRE_STATUS, Lifecycle, Stage
from stockade.runs._state import state_dir

__all__ = [
    "LAYOUT_VERSION",
    "MOVES",
    "WIRE_STATUS",
    "Admitted",
    "Ask",
    "Held",
    "Lifecycle",
    "RunDirectory",
    "RunState",
    "Stage",
    "StopRequest",
    "admit",
    "runs_in",
    "state_dir",
]
