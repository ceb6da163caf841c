"""The record of a run: hash-chained events, one file per rollout and producer.

``<run directory>/events/<node>/<rollout>.<producer>.jsonl`` holds one JSON object per line;
``_run`` stands for the run itself. :class:`ChainWriter` writes one such file, :func:`verify_run`
finds what was changed afterwards, :func:`iter_events` reads a run in the order of time. Everything
else that stockade shows is an index over this.
"""

from __future__ import annotations

from stockade.events._chain import ChainWriter, Context
from stockade.events._files import (
    EVENTS_DIR,
    MANIFEST,
    ChainName,
    chain_name,
    is_node_name,
    parse_chain_name,
)
from stockade.events._head import ChainHead, SealedHead, format_head, parse_head, recover_head
from stockade.events._line import GENESIS, LINE_LIMIT_BYTES
from stockade.events._read import is_run_sealed, iter_events
from stockade.events._schema import (
    KINDS,
    RUN_PRODUCER,
    SCHEMA,
    Event,
    EventVerdict,
    Kind,
    Producer,
    Trust,
    Value,
)
from stockade.events._text import ARGS_LIMIT_BYTES, Clipped, ClippedArgs, clip, clip_args
from stockade.events._verify import Problem, VerifyReport, verify_run

__all__ = [
    "ARGS_LIMIT_BYTES",
    "EVENTS_DIR",
    "GENESIS",
    "KINDS",
    "LINE_LIMIT_BYTES",
    "MANIFEST",
    "RUN_PRODUCER",
    "SCHEMA",
    "ChainHead",
    "ChainName",
    "ChainWriter",
    "Clipped",
    "ClippedArgs",
    "Context",
    "Event",
    "EventVerdict",
    "Kind",
    "Problem",
    "Producer",
    "SealedHead",
    "Trust",
    "Value",
    "VerifyReport",
    "chain_name",
    "clip",
    "clip_args",
    "format_head",
    "is_node_name",
    "is_run_sealed",
    "iter_events",
    "parse_chain_name",
    "parse_head",
    "recover_head",
    "verify_run",
]
