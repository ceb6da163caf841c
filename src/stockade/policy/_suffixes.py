"""Which names belong to more than one owner: public suffixes and object stores.

A wildcard at or above a public suffix (``*.github.io``, ``*.amazonaws.com``) covers names that anybody can register;
an exact rule on an object store's own name (``s3.amazonaws.com``) covers everybody's buckets. The list is the Public
Suffix List with its private section (https://publicsuffix.org), shipped in the ``publicsuffixlist`` wheel and read
on first use; object stores that it lacks are added below (egress.md cases 20 and 98).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from publicsuffixlist import PublicSuffixList

# Stores addressed by path or by bucket names below these, absent from the list of 2026-10-23.
_STORES = (
    *("storage.googleapis.com", "storage.cloud.google.com", "dfs.core.windows.net", "r2.cloudflarestorage.com"),
    *("backblazeb2.com", "*.backblazeb2.com", "wasabisys.com", "*.wasabisys.com"),
    *("aliyuncs.com", "*.aliyuncs.com", "myqcloud.com", "*.myqcloud.com"),
)


@dataclass(frozen=True)
class _Suffixes:
    public: PublicSuffixList
    parents: frozenset[str]


def is_shared(name: str) -> bool:
    """Tell whether anybody can register names directly below ``name`` (A-labels)."""
    return _suffixes().public.is_public(name) or _is_s3_endpoint(name)


def holds_shared(name: str) -> bool:
    """Tell whether a shared name lies somewhere below ``name``."""
    return name in _suffixes().parents


def _is_s3_endpoint(name: str) -> bool:
    # s3.<region>.<provider>, the path-style endpoint that S3-compatible stores imitate.
    first = name.split(".", 1)[0]
    return first == "s3" or first.startswith("s3-")


@functools.cache
def _suffixes() -> _Suffixes:
    from pathlib import Path

    from publicsuffixlist import PSLFILE, PublicSuffixList

    lines = Path(PSLFILE).read_text("utf-8").splitlines()
    rules = [word for line in lines if (word := line.split(" ", 1)[0].strip()) and not word.startswith("//")]
    rules += _STORES
    parents: set[str] = set()
    for rule in rules:
        labels = rule.lstrip("!").split(".")
        parents.update(".".join(labels[depth:]) for depth in range(1, len(labels)))
    return _Suffixes(PublicSuffixList(rules), frozenset(parents))
