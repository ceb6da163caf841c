"""``stockade egress recordings``: what of the internet is kept on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from stockade.cli._output import emit, err, fail, out, printable, reporting, table
from stockade.cli._run import Json, Operator
from stockade.errors import ConfigError


def recordings(
    *,
    store: Annotated[
        Path | None,
        typer.Option("--store", help="The store; default: the operator's, else the one of the state directory."),
    ] = None,
    operator: Operator = None,
    check: Annotated[bool, typer.Option("--check", help="Read everything, and name what is damaged.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="With --check: remove what is damaged.")] = False,
    discard: Annotated[str | None, typer.Option("--discard", metavar="NAME", help="Remove a recording.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --discard: do not ask.")] = False,
    json_: Json = False,
) -> None:
    """List the recordings of a store; check or remove them."""
    if repair and not check:
        fail("--repair goes with --check", as_json=json_)
    if check and discard is not None:
        fail("--check and --discard are two different things", as_json=json_)
    with reporting(as_json=json_):
        path = store if store is not None else _default(operator)
        with _opened(path) as fd:
            if check:
                _check(fd, path, repair=repair, as_json=json_)
            elif discard is not None:
                _discard(fd, path, discard, yes=yes, as_json=json_)
            else:
                _list(fd, path, as_json=json_)


def _default(operator: Path | None) -> Path:
    """Return where an agent would keep answers that is started now."""
    from stockade.agent import default_store, operator_file
    from stockade.policy import load_operator

    site = load_operator(operator_file(None if operator is None else str(operator)))
    return default_store() if site.store is None else Path(site.store.path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        hint = "nothing was recorded on this machine yet, or it is elsewhere: give --store"
        raise ConfigError(f"there is no store: {error.strerror}", path=path, hint=hint) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _list(fd: int, path: Path, *, as_json: bool) -> None:
    from stockade.egress import list_entries, list_recordings, recount_store

    rows = []
    for name in list_recordings(fd):
        found = list(list_entries(fd, name))
        rows.append(
            {
                "recording": name,
                "answers": len(found),
                "hosts": len({entry.asked.host for entry in found if entry.asked is not None}),
                "bytes": sum(entry.size for entry in found),
                "damaged": sum(bool(entry.problem) for entry in found),
                "latest": max((entry.kept_ns for entry in found), default=None),
            }
        )
    used = recount_store(fd)
    if as_json:
        emit({"store": str(path), "bytes_used": used, "recordings": rows})
        return
    shown = [(*list(row.values())[:-1], _when(row["latest"])) for row in rows]
    table(
        f"{path}: {used:,} bytes used, bodies that recordings share counted once",
        ("recording", "answers", "hosts", "bytes", "damaged", "latest"),
        shown,
    )


def _when(kept_ns: object) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(kept_ns / 1e9)) if isinstance(kept_ns, int) else "-"


def _check(fd: int, path: Path, *, repair: bool, as_json: bool) -> None:
    from stockade.egress import check_store, recount_store

    damages = [{"path": one.path, "problem": one.problem} for one in check_store(fd, remove=repair)]
    used = recount_store(fd)
    if as_json:
        emit({"store": str(path), "ok": not damages, "damaged": damages, "removed": repair, "bytes_used": used})
    else:
        for damage in damages:
            out.print(printable(f"{damage['path']}: {damage['problem']}"), markup=False)
        what = "[green]good[/]" if not damages else f"[bold red]{len(damages)} damaged[/]"
        out.print(f"{what}{': removed, they will be fetched anew' if damages and repair else ''}")
    raise typer.Exit(1 if damages and not repair else 0)


def _discard(fd: int, path: Path, name: str, *, yes: bool, as_json: bool) -> None:
    from stockade.egress import discard_recording, list_entries, list_recordings

    if name not in list_recordings(fd):
        fail(f"there is no recording {name!r} in {path}", hint="see: stockade egress recordings", as_json=as_json)
    count = sum(1 for _ in list_entries(fd, name))
    if not yes:
        err.print(f"remove {count} answers of the recording {name} for good? [y/N] ", end="", markup=False)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            err.print("nothing was removed")
            raise typer.Exit(1)
    used = discard_recording(fd, name)
    if as_json:
        emit({"store": str(path), "recording": name, "removed": count, "bytes_used": used})
    else:
        out.print(f"removed {count} answers; {used:,} bytes are used now", markup=False)
