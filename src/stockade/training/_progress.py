"""What the training process says to its launcher: one JSON object a line, on a descriptor of its own.

================  ===========================================================================
``event``         other fields
================  ===========================================================================
``phase``         ``phase`` (warm_up, evaluate, grpo, control, save), ``total`` steps or null
``step``          ``phase``, ``step``, ``total``, and for GRPO ``reward``
``warning``       ``message``
``held``          ``message``: nothing was learned from the last batch, a person must look
``done``          the summary, as ``summary.json`` has it
``failed``        ``message``, ``hint``
================  ===========================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TextIO


class Progress:
    """Writes the lines; one flush each, so that a progress bar moves when the work does."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, event: str, **fields: object) -> None:
        """Write one line. Numbers that JSON has no word for become null."""
        self._stream.write(to_line({"event": event, **fields}))
        self._stream.flush()

    def phase(self, phase: str, total: int | None = None) -> None:
        """Begin a phase of ``total`` steps."""
        self.say("phase", phase=phase, total=total)

    def step(self, phase: str, step: int, total: int, **fields: object) -> None:
        """Report that ``step`` steps of a phase are done."""
        self.say("step", phase=phase, step=step, total=total, **fields)


def to_line(fields: Mapping[str, object]) -> str:
    """Return ``fields`` as one line of strict JSON: NaN and infinities, which it does not have, become null."""
    return json.dumps({key: _finite(value) for key, value in fields.items()}, allow_nan=False) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return value
