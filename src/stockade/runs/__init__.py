"""The life of a run and of its rollouts: directory, admission, stages of a rollout, state on this node, report."""

from __future__ import annotations

from stockade.runs._admission import Admitted, Ask, Held, RunState, admit
from stockade.runs._layout import LAYOUT_VERSION, RunDirectory, StopRequest, runs_in
from stockade.runs._lifecycle import MOVES, WIRE_STATUS, Lifecycle, Stage
from stockade.runs._report import ReportFiles, Section, write_report
from stockade.runs._rows import (
    DenialRow,
    ExitRow,
    HostRow,
    IncidentRow,
    RecordState,
    RolloutRow,
    RunSummary,
    StopRow,
)
from stockade.runs._state import state_dir
from stockade.runs._summary import summarise

__all__ = [
    "LAYOUT_VERSION",
    "MOVES",
    "WIRE_STATUS",
    "Admitted",
    "Ask",
    "DenialRow",
    "ExitRow",
    "Held",
    "HostRow",
    "IncidentRow",
    "Lifecycle",
    "RecordState",
    "ReportFiles",
    "RolloutRow",
    "RunDirectory",
    "RunState",
    "RunSummary",
    "Section",
    "Stage",
    "StopRequest",
    "StopRow",
    "admit",
    "runs_in",
    "state_dir",
    "summarise",
    "write_report",
]
