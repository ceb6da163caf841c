"""Path globs of rules as regular expressions that never backtrack far.

The meaning is that of ``stockade.policy.PathGlob`` (a test holds the two together): ``*`` stands for characters of
one segment (alone in it: at least one), ``**`` for any number of whole segments, and a closing ``/**`` needs its
slash. The gate does not import it because a worker starts without pydantic. Every ``*`` takes the first place that
fits and is then atomic, which is enough for globs and keeps the work linear: the path is the attacker's.
"""

from __future__ import annotations

import re

_ANY = "**"
_END = r"(?=/|\Z)"


def compile_glob(text: str, *, fold: bool = False) -> re.Pattern[str]:
    """Return a pattern to ``fullmatch`` normal paths with; ``fold`` ignores case.

    Deny rules fold: a server that does not tell ``/Secret`` from ``/secret`` must not open a way around.
    Raises ValueError for text that is no glob.
    """
    segments = text[1:].split("/")
    if not text.startswith("/") or any(_ANY in s and s != _ANY for s in segments):
        raise ValueError(f"{text!r} is not a path glob")
    below = segments[-1] == _ANY
    runs: list[list[str]] = [[]]
    for segment in segments[:-1] if below else segments:
        if segment == _ANY:
            runs.append([])
        else:
            runs[-1].append(segment)
    first, *rest = runs
    pattern = _run(first)
    if rest:
        *middle, last = rest
        floating = [*middle, last] if below else middle
        pattern += "".join(f"(?>(?:/[^/]*+)*?{_run(run)})" for run in floating if run)
        if not below:
            pattern += f"(?:/[^/]*+)*{_run(last)}"
    if below:
        pattern += "(?:/[^/]*+)+"
    return re.compile(pattern, re.IGNORECASE | re.ASCII if fold else re.ASCII)


def _run(segments: list[str]) -> str:
    """Return the pattern of segments in a row, each with its slash."""
    return "".join(f"/{_segment(segment)}" for segment in segments)


def _segment(glob: str) -> str:
    if glob == "*":
        return "[^/]++"
    first, *parts = glob.split("*")
    if not parts:
        return re.escape(first) + _END
    *middle, last = parts
    floating = "".join(f"(?>[^/]*?{re.escape(part)})" for part in middle if part)
    return f"{re.escape(first)}{floating}[^/]*{re.escape(last)}{_END}"
