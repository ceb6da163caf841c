"""The shipped seccomp filters: an allow list, compiled beforehand, read as bytes.

A node needs neither libseccomp nor a compiler: the program in ``_filters/<machine>.bpf`` goes to the
isolator on a descriptor (``bwrap --seccomp FD``). ``_filters/filters.json`` holds its digest, the
libseccomp version whose numbers were used, and every call with its number and answer; what each
group is for stands in ``_seccomp_table``. ``tools/build_seccomp.py`` writes all of them.
"""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from stockade.errors import NodeError

# uname -m says "aarch64" on Linux; other systems and container tools say "arm64" and "amd64".
_SAME_MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}
_INSTRUCTION_BYTES = 8


def _folder() -> Traversable:
    return files("stockade.sandbox") / "_filters"


def _read(name: str) -> bytes:
    return (_folder() / name).read_bytes()


@cache
def _load(machine: str) -> tuple[bytes, str]:
    try:
        shipped = {name: entry["digest"] for name, entry in json.loads(_read("filters.json"))["machines"].items()}
        expected = shipped.get(machine)
        program = b"" if expected is None else _read(f"{machine}.bpf")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NodeError(f"the seccomp filters cannot be read: {error}", hint="install stockade again") from error
    if expected is None:
        raise NodeError(
            f"there is no seccomp filter for machine {machine!r}",
            hint=f"filters exist for {', '.join(sorted(shipped))}; without one no sandbox is started",
        )
    digest = "sha256:" + hashlib.sha256(program).hexdigest()
    # An empty or cut program may still be valid BPF that allows more than the whole one.
    if digest != expected or not program or len(program) % _INSTRUCTION_BYTES:
        raise NodeError(
            f"the seccomp filter for {machine} is not the one that was shipped", hint="install stockade again"
        )
    return program, digest


def _normal(machine: str | None) -> str:
    name = platform.machine() if machine is None else machine
    return _SAME_MACHINE.get(name.lower(), name)


def filter_bytes(machine: str | None = None) -> bytes:
    """The filter as ``struct sock_filter[]`` (seccomp(2)), for ``machine`` (default: this one).

    Raises :class:`NodeError` for a machine without a filter and for files that were changed.
    """
    return _load(_normal(machine))[0]


def filter_digest(machine: str | None = None) -> str:
    """``sha256:<hex>`` of :func:`filter_bytes`, for reports and the run's record."""
    return _load(_normal(machine))[1]
