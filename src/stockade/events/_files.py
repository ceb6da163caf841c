"""Where chains lie, and how their files are opened: by descriptor, never through a link.

A run directory may have been touched by anybody since it was written. Each step below the directory
that the caller named is opened with ``O_NOFOLLOW`` relative to its parent, so a link put in place
of a directory or a file is an error and not another record; ``O_NONBLOCK`` keeps a FIFO from
hanging the reader.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from stockade.errors import RecordError, StockadeError
from stockade.events._schema import RUN_PRODUCER, Producer
from stockade.ids import RUN_SCOPE, RolloutId, parse_rollout_id

EVENTS_DIR = "events"
MANIFEST = "manifest.yaml"
_SUFFIX = ".jsonl"
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ChainName(NamedTuple):
    """What the name of a chain's file says."""

    rollout: RolloutId
    producer: Producer


def chain_name(rollout: RolloutId, producer: Producer) -> str:
    """Return the name of the file that holds the chain of ``producer`` for ``rollout``."""
    return f"{rollout}.{producer}{_SUFFIX}"


RUN_CHAIN = chain_name(RUN_SCOPE, RUN_PRODUCER)
"""The file of a node that names all its other files."""


def parse_chain_name(name: str) -> ChainName | None:
    """Return what ``name`` says, or ``None`` if no chain is called so."""
    rollout, _, producer = name.removesuffix(_SUFFIX).rpartition(".")
    try:
        parsed = ChainName(parse_rollout_id(rollout), Producer(producer))
    except (StockadeError, ValueError):
        return None
    return parsed if chain_name(*parsed) == name else None


def is_node_name(name: str) -> bool:
    """Return whether a node's directory can be called ``name``."""
    return _NODE.fullmatch(name) is not None


@contextmanager
def open_directory(name: str, parent: int) -> Iterator[int]:
    """Open a directory below the directory ``parent`` for reading.

    Raises ``OSError``, also for a link.
    """
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def open_regular(name: str, parent: int) -> int:
    """Open a regular file below the directory ``parent`` for reading.

    Raises ``OSError`` for anything else.
    """
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{name}: not a regular file")
    return fd


@contextmanager
def open_run(run_dir: Path) -> Iterator[int]:
    """Open a run's directory; raises :class:`RecordError` if there is none."""
    try:
        fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise RecordError(f"{run_dir}: no run directory: {error.strerror}", hint="name runs/<run id>") from error
    try:
        yield fd
    finally:
        os.close(fd)
