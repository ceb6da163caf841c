"""Identities: parsed once at the door, then carried as types.

A rollout's ID names its files and is sent on the wire as *episode*, so its grammar leaves no room for a path,
a shell or a log line to misread it.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import NewType

from stockade.errors import StockadeError

RunId = NewType("RunId", str)
RolloutId = NewType("RolloutId", str)

RUN_SCOPE = RolloutId("_run")
"""The ``rollout_id`` of events that concern a whole run."""

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ROLLOUT_ID = re.compile(r"ep_[A-Za-z0-9_-]{22}")


class BadId(StockadeError, ValueError):
    """Text that is not an ID of the kind asked for."""


def parse_run_id(text: str) -> RunId:
    """Return ``text`` as a run ID, or raise :class:`BadId`."""
    if not _RUN_ID.fullmatch(text) or ".." in text:
        raise BadId(
            f"{text!r} is not a run ID",
            hint="use lower-case letters, digits, '.', '_' and '-', at most 63, starting with a letter or digit",
        )
    return RunId(text)


def parse_rollout_id(text: str) -> RolloutId:
    """Return ``text`` as a rollout ID, or raise :class:`BadId`."""
    if text == RUN_SCOPE:
        return RUN_SCOPE
    if not _ROLLOUT_ID.fullmatch(text):
        raise BadId(f"{text!r} is not a rollout ID", hint="a rollout ID is 'ep_' and 22 URL-safe characters")
    return RolloutId(text)


def new_run_id() -> RunId:
    """Return a fresh run ID that sorts by the time of its making (UTC)."""
    return RunId(time.strftime("run-%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3))


def new_rollout_id() -> RolloutId:
    """Return a fresh rollout ID with 128 bits of chance."""
    return RolloutId("ep_" + secrets.token_urlsafe(16))
