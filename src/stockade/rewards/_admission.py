"""P5: a task is worth training on only if doing nothing fails it and its reference passes it, again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from stockade.gym import SOLUTION
from stockade.rewards._verdict import Verdict

if TYPE_CHECKING:
    from stockade.gym import Task
    from stockade.rewards._grader import Grader

REFERENCE_RUNS: Final = 2

NULL_BASELINES: Final = {
    "no file content": "",
    "returns nothing": "def {name}(*args, **kwargs):\n    pass\n",
    "returns True": "def {name}(*args, **kwargs):\n    return True\n",
    "returns 0": "def {name}(*args, **kwargs):\n    return 0\n",
    "returns ''": "def {name}(*args, **kwargs):\n    return ''\n",
    "returns []": "def {name}(*args, **kwargs):\n    return []\n",
    "returns its argument": "def {name}(*args, **kwargs):\n    return args[0] if args else None\n",
    "exits with 0": "import os\n\n\ndef {name}(*args, **kwargs):\n    os._exit(0)\n",
    "raises": "def {name}(*args, **kwargs):\n    raise ValueError\n",
}
"""Programs that solve nothing; ``{name}`` is the entry point."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a task may be trained on, and every reason against it."""

    task_id: str
    problems: tuple[str, ...]

    @property
    def admitted(self) -> bool:
        """No reason against it was found."""
        return not self.problems


async def admit_task(grader: Grader, task: Task, *, reference: str | None = None) -> Admission:
    """Grade the null baselines and, twice, the reference (default: ``task.solution``).

    Costs eleven gradings; meant for when a task is taken into a set, not for each run. Raises what
    :meth:`Grader.grade` raises, so tests without an assert are refused with :class:`TaskError`. A fault of the
    infrastructure or a stop is a problem too: nothing was shown.
    """
    problems: list[str] = []
    program = task.solution if reference is None else reference
    for number in range(1, REFERENCE_RUNS + 1):
        grade = await grader.grade(task, {SOLUTION: program.encode("utf-8")})
        if grade.verdict is not Verdict.OK:
            problems.append(f"the reference got {grade.verdict.value} on run {number}: {grade.evidence}")
            break
    for label, text in NULL_BASELINES.items():
        null = text.replace("{name}", task.entry_point)
        grade = await grader.grade(task, {SOLUTION: null.encode("utf-8")})
        if grade.reward != 0:
            problems.append(f"a program that {label} got {grade.verdict.value}")
    return Admission(task_id=task.task_id, problems=tuple(problems))
