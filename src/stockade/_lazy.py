"""Attribute access that imports on first use (PEP 562).

Two reasons: a command line that answers in a tenth of a second, and a spawner process so small that forking
it a thousand times is cheap. Both import one leaf of a package and must not pay for the rest of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy(package: str, exports: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for ``package``; ``exports`` maps public name → defining module."""

    def get(name: str) -> object:
        module = exports.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)

    return get
