"""The shipped seccomp filters of the egress worker: allow lists, compiled beforehand, read as bytes.

``tools/worker_calls.py`` says what is allowed and why; ``tools/build_seccomp.py`` compiles it into ``plain/`` and
``unix/``: a ``<machine>.bpf`` for each machine and a ``filters.json`` with every call's answer and the digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from stockade.errors import NodeError

VARIANTS = ("plain", "unix")
"""Without and with UNIX sockets."""

_INSTRUCTION_BYTES = 8
_FOLDER = Path(__file__).resolve().parent


class Filter(NamedTuple):
    """``program`` is ``struct sock_filter[]`` (seccomp(2)), ``digest`` is ``sha256:<hex>`` of it."""

    program: bytes
    digest: str


@cache
def load(variant: str) -> Filter | None:
    """Return the filter for this machine, or None where there is none; raise :class:`NodeError` if it was damaged.

    Cached: a worker loads both before it gives up the right to read them.
    """
    machine = os.uname().machine
    if sys.maxsize < 1 << 32:  # a 32-bit interpreter makes calls of another architecture
        return None
    try:
        shipped = json.loads((_FOLDER / variant / "filters.json").read_bytes())["machines"]
        if machine not in shipped:
            return None
        expected = shipped[machine]["digest"]
        program = (_FOLDER / variant / f"{machine}.bpf").read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NodeError(
            f"the worker's seccomp filter cannot be read: {error}", hint="install stockade again"
        ) from error
    digest = "sha256:" + hashlib.sha256(program).hexdigest()
    # An empty or cut program may still be valid BPF that allows more than the whole one.
    if digest != expected or not program or len(program) % _INSTRUCTION_BYTES:
        raise NodeError("the worker's seccomp filter is not the one that was shipped", hint="install stockade again")
    return Filter(program, digest)
