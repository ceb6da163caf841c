"""What crosses the control socket beside plain text: chain heads and contexts, as JSON; and what a rollout used."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, cast

from stockade.egress._wire import Json, Message, number, text
from stockade.events import ChainHead, Context


class Usage(NamedTuple):
    """What a rollout used up so far; ``requests`` and ``denied`` count decisions."""

    bytes_out: int = 0
    bytes_in: int = 0
    requests: int = 0
    denied: int = 0


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
