"""The life of a rollout as a table; a move that is not in it is a fault of this program and raises."""

from __future__ import annotations

from enum import StrEnum

from stockade.errors import RunError


class Stage(StrEnum):
    """Where a rollout is. The wire's words are in :data:`WIRE_STATUS`."""

    ADMITTED = "admitted"  # recorded, nothing made yet
    STARTING = "starting"  # its sandbox is being made
    RUNNING = "running"
    ENDED = "ended"  # no process left; its files can still be collected
    SEALED = "sealed"  # record closed, files gone
    FAILED = "failed"  # it never ran; record closed


MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.ADMITTED: frozenset({Stage.STARTING, Stage.FAILED}),
    Stage.STARTING: frozenset({Stage.RUNNING, Stage.FAILED}),
    Stage.RUNNING: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset({Stage.SEALED}),
    Stage.SEALED: frozenset(),
    Stage.FAILED: frozenset(),
}

WIRE_STATUS: dict[Stage, str] = {
    Stage.ADMITTED: "starting",
    Stage.STARTING: "starting",
    Stage.RUNNING: "running",
    Stage.ENDED: "stopped",
    Stage.SEALED: "stopped",
    Stage.FAILED: "error",
}


class Lifecycle:
    """One rollout's place in the table."""

    def __init__(self) -> None:
        self._stage = Stage.ADMITTED

    @property
    def stage(self) -> Stage:
        """Where it is now."""
        return self._stage

    def move(self, to: Stage) -> None:
        """Go on to ``to``; raises RunError if the table has no such move."""
        if to not in MOVES[self._stage]:
            raise RunError(f"a rollout cannot go from {self._stage} to {to}")
        self._stage = to
