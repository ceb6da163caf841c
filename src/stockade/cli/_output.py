"""How the command line speaks: one JSON object or one table, errors on one line, exit code 2."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stockade.errors import StockadeError

USAGE_ERROR = 2
OWN_ERROR = 125
"""Exit code of ``stockade run`` for its own errors, so that it cannot be taken for the command's (as in env(1))."""

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def emit(value: object) -> None:
    """Print one JSON value on standard output; ASCII only, so that text from inside cannot reach the terminal."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; every cell is shown as plain text."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(escape(printable(str(cell))) for cell in row))
    out.print(shown)


def printable(text: str) -> str:
    """Return ``text`` with every control, format and private character escaped: terminals and bidi obey those."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def fail(message: str, *, hint: str | None = None, code: int = USAGE_ERROR, as_json: bool = False) -> NoReturn:
    """Print one line and leave with ``code``."""
    if as_json:
        emit({"error": message, "hint": hint})
    line = printable(message) + (f" ({printable(hint)})" if hint else "")
    err.print(f"[bold red]error:[/] {escape(line)}")
    raise typer.Exit(code)


@contextlib.contextmanager
def reporting(*, code: int = USAGE_ERROR, as_json: bool = False) -> Iterator[None]:
    """Turn every error raised on purpose, and those of the file system, into one line."""
    try:
        yield
    except StockadeError as error:
        fail(error.message, hint=error.hint, code=code, as_json=as_json)
    except OSError as error:
        fail(str(error), code=code, as_json=as_json)
    except KeyboardInterrupt:
        err.print("interrupted; what was recorded is kept")
        raise typer.Exit(130) from None
