"""What crosses the control socket beside plain text: usage, chain heads and contexts, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from stockade.egress._wire import Json, Message, WireError, number, table, text
from stockade.events import ChainHead, Context


@dataclass(frozen=True, slots=True)
class Usage:
    """What a rollout used up so far.

    ``budget`` is :meth:`stockade.egress.gate.Budget.export`, with ``bytes_out`` and ``bytes_in`` among it;
    ``requests`` and ``denied`` count decisions.
    """

    budget: Mapping[str, int]
    requests: int = 0
    denied: int = 0

    @property
    def bytes_out(self) -> int:
        """Bytes sent to the outside."""
        return self.budget.get("bytes_out", 0)

    @property
    def bytes_in(self) -> int:
        """Bytes received from the outside."""
        return self.budget.get("bytes_in", 0)

    def to_json(self) -> Message:
        """Return the JSON form."""
        return {"budget": dict(self.budget), "requests": self.requests, "denied": self.denied}

    @classmethod
    def from_json(cls, message: Mapping[str, Json]) -> Usage:
        """Return the usage in its JSON form, or raise :class:`WireError`."""
        budget = table(message, "budget")
        counts = [number(message, key) for key in ("requests", "denied")]
        if min(counts) < 0:
            raise WireError("control message: a count is negative")
        return cls({key: number(budget, key) for key in budget}, *counts)


def head_json(head: ChainHead) -> Message:
    """Return the JSON form of a chain's head."""
    return {"seq": head.seq, "hash": head.hash}


def head_from(message: Mapping[str, Json]) -> ChainHead:
    """Return the head in its JSON form, or raise :class:`WireError`."""
    return ChainHead(number(message, "seq"), text(message, "hash"))


def context_json(context: Context) -> Message:
    """Return the JSON form of a chain's context."""
    return cast("Message", {key: value for key, value in dataclasses.asdict(context).items() if value is not None})


def context_from(message: Mapping[str, Json]) -> Context:
    """Return the context in its JSON form, or raise :class:`WireError`."""

    def text_or_none(key: str) -> str | None:
        return text(message, key) if key in message else None

    def number_or_none(key: str) -> int | None:
        return number(message, key) if key in message else None

    return Context(
        run_id=text(message, "run_id"),
        rollout_id=text(message, "rollout_id"),
        policy_digest=text(message, "policy_digest"),
        task_id=text_or_none("task_id"),
        group_id=text_or_none("group_id"),
        train_step=number_or_none("train_step"),
        attempt=number_or_none("attempt"),
        stage=number_or_none("stage"),
    )
