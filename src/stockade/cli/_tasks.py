"""``stockade tasks``: check task files, and write the ones that ship."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stockade.cli._output import emit, fail, out, reporting

if TYPE_CHECKING:
    from stockade.gym import Task

app = typer.Typer(help="Task files: one JSON object a line (docs/tasks.md).", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def humaneval(
    to: Annotated[Path, typer.Option("--out", "-o", help="The file to write; must not exist.")],
    *,
    candidate: Annotated[
        list[str] | None, typer.Option("--candidate", help="reference, or a cheat; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first problems.")] = None,
    json_: Json = False,
) -> None:
    """Write HumanEval's problems with the named candidate programs as tasks."""
    from stockade.gym import Candidate, humaneval_tasks

    names = candidate or ["reference"]
    unknown = sorted(set(names) - {item.value for item in Candidate})
    if unknown:
        fail(
            f"no such candidate: {', '.join(unknown)}",
            hint=f"there are: {', '.join(item.value for item in Candidate)}",
            as_json=json_,
        )
    with reporting(as_json=json_):
        count = _write(
            to,
            (
                task
                for name in names
                for task in _named(name, limit, tag=len(names) > 1, tasks=humaneval_tasks(Candidate(name)))
            ),
        )
    if json_:
        emit({"file": str(to), "tasks": count})
    else:
        out.print(f"{to}: {count} tasks", markup=False)


def _named(name: str, limit: int | None, *, tag: bool, tasks: Iterable[Task]) -> Iterable[Task]:
    import itertools

    import msgspec

    for task in itertools.islice(tasks, limit):
        yield msgspec.structs.replace(task, task_id=f"{task.task_id}:{name}") if tag else task


def _write(to: Path, tasks: Iterable[Task]) -> int:
    import msgspec

    count = 0
    with open(to, "xb") as file:
        for task in tasks:
            file.write(msgspec.json.encode(task) + b"\n")
            count += 1
    return count


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The task file.")],
    *,
    json_: Json = False,
) -> None:
    """Read a task file as strictly as ``batch`` does and run nothing."""
    from stockade.gym import load_tasks

    with reporting(as_json=json_):
        tasks = load_tasks(file)
    if json_:
        emit({"file": str(file), "tasks": [task.task_id for task in tasks]})
    else:
        out.print(f"{file}: {len(tasks)} tasks", markup=False)
