"""``report.html`` and ``report.json``: what a run did, for people and for programs.

The page stands alone: no script, no link, nothing loaded from anywhere, and a content security policy that would
forbid it. Much of what it shows was chosen by model-written code (paths, hosts, evidence), so every text is escaped
twice over: what cannot be printed is spelled out, then HTML is.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from markupsafe import Markup

from stockade.errors import RunError
from stockade.runs._curves import Curves, read_curves
from stockade.runs._rows import RolloutRow, RunSummary
from stockade.runs._summary import UNENDED, summarise

if TYPE_CHECKING:
    import jinja2

SCHEMA = "stockade.report/1"
_MOST_ROWS = 300
_MOST_DENIALS = 100
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Section:
    """A table that another room adds to the report: a title, what to know, column names, and rows of text."""

    title: str
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    note: str = ""


class ReportFiles(NamedTuple):
    """Where a report was written."""

    html: Path
    json: Path


def write_report(
    run_dir: Path,
    *,
    metrics: Path | None = None,
    control: Path | None = None,
    extra: Sequence[Section] = (),
    notices: Sequence[str] = (),
) -> ReportFiles:
    """Write both files into ``run_dir``, each whole or not at all, and return their paths.

    ``metrics`` and ``control`` are metrics files of a training and of its control. ``notices`` are single lines that
    a reader must not miss; they stand at the top, with unsafe exemptions and waivers.

    Raises :class:`stockade.errors.RecordError` if there is no readable record, :class:`RunError` if a metrics file
    cannot be read or a report cannot be written.
    """
    summary = summarise(run_dir)
    curves = read_curves(metrics, control)
    found = ReportFiles(run_dir / "report.html", run_dir / "report.json")
    _write(found.json, _as_json(summary, curves, extra, notices))
    _write(found.html, render(summary, curves, extra, notices).encode("utf-8"))
    return found


def render(summary: RunSummary, curves: Curves, extra: Sequence[Section] = (), notices: Sequence[str] = ()) -> str:
    """Return the page."""
    style = _resource("_report.css")
    shown, hidden = _shown_rollouts(summary.rollouts)
    return (
        _environment()
        .from_string(_resource("_report.html"))
        .render(
            s=summary,
            style=Markup(style),  # noqa: S704 - our own file, named by its hash in the page's policy
            style_digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
            charts=curves.charts(),
            extra=extra,
            notices=notices,
            rollouts=shown,
            rollouts_hidden=hidden,
            denials=summary.denials[:_MOST_DENIALS],
            denials_hidden=summary.denied - sum(row.count for row in summary.denials[:_MOST_DENIALS]),
            durations=_durations([row.duration_ns for row in summary.rollouts if row.exit != UNENDED]),
        )
    )


def visible(text: str) -> str:
    r"""Return ``text`` with everything that is not printable spelled out as ``\u{202e}``.

    That covers controls, bidirectional overrides, invisible and private characters and lone surrogates, with which
    a text could pass for another (CVE-2021-42574).
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\u{{{ord(char):x}}}" for char in text)


def human_bytes(size: int) -> str:
    """Return a size as people say it."""
    value, unit = float(size), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def human_duration(duration_ns: int) -> str:
    """Return a duration as people say it."""
    seconds = duration_ns / _NS
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def utc(time_ns: int) -> str:
    """Return a time of the record as UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_ns // _NS))
    except (ValueError, OverflowError, OSError):
        return str(time_ns)


def _durations(values_ns: Sequence[int]) -> str:
    if not values_ns:
        return ""
    ordered = sorted(values_ns)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    parts = (("median", ordered[len(ordered) // 2]), ("95 % within", p95), ("longest", ordered[-1]))
    return ", ".join(f"{name} {human_duration(value)}" for name, value in parts)


def _shown_rollouts(rows: Sequence[RolloutRow]) -> tuple[list[RolloutRow], int]:
    """Return the rows to show, those with something to look at first, and how many are left out."""
    ordered = sorted(rows, key=lambda row: (not (row.fault or row.denied or row.exit == UNENDED), row.started_ns))
    return ordered[:_MOST_ROWS], max(0, len(rows) - _MOST_ROWS)


def _finalize(value: object) -> object:
    return value if isinstance(value, Markup) else visible(str(value))


def _environment() -> jinja2.Environment:
    import jinja2  # late: the agent imports this room, and everything is forked from the agent

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters |= {"bytes": human_bytes, "duration": human_duration, "utc": utc, "n": lambda n: f"{n:,}"}
    return environment


def _resource(name: str) -> str:
    return files("stockade.runs").joinpath(name).read_text(encoding="utf-8")


def _as_json(summary: RunSummary, curves: Curves, extra: Sequence[Section], notices: Sequence[str]) -> bytes:
    whole: Mapping[str, object] = {
        "schema": SCHEMA,
        **asdict(summary),
        "curves": {"training": curves.main, "control": curves.control},
        "notices": list(notices),
        "sections": [asdict(section) for section in extra],
    }
    return msgspec.json.format(msgspec.json.encode(_encodable(whole)), indent=2) + b"\n"


def _encodable(value: object) -> object:
    """Return ``value`` with lone surrogates spelled out, which JSON in UTF-8 cannot hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value


def _write(path: Path, data: bytes) -> None:
    draft: str | None = None
    try:
        fd, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.rename(draft, path)
        draft = None
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if draft is not None:
            with contextlib.suppress(OSError):
                os.unlink(draft)
