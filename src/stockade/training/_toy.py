"""A toy family of coding tasks, the noisy teacher of the warm-up, and the tests that the policy never sees.

A task says in one comment line what ``f(x)`` must compute (``# x plus 3 then times 4``). In *service tasks* one
operand is the word ``rate``: a number that only a service outside the sandbox knows, and that a right program asks
for with ``get('rate')``. The noisy teacher also shows ``get('cost')``, whose path the example's policy denies, so
denied requests come up by themselves.

Half of the teacher's programs are wrong on purpose: the warmed-up policy then has something to unlearn, and the
rise of the reward shows the plumbing (rollout, graded verdict, better policy), not the art of programming.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Final, NamedTuple

from stockade.gym import SOLUTION, Task, make_task
from stockade.training._toolbox import FETCHED, PRELUDE, TOOLBOX, VISIBLE_RUN

RATE: Final = "rate"
FORBIDDEN: Final = "cost"
WORDS: Final = {"plus": "+", "minus": "-", "times": "*"}
DIGITS: Final = tuple(range(2, 10))
INPUTS: Final = (-7, 0, 1, 2, 13)
"""Arguments of the hidden tests. All five results must be right for a reward: partial credit pays a constant."""


class Step(NamedTuple):
    """One operation on the running value: ``plus 3``, or ``times rate``."""

    word: str
    operand: int | str

    def __str__(self) -> str:
        return f"{self.word} {self.operand}"


@dataclass(frozen=True, slots=True)
class ToyTask:
    """One task: one or two steps applied to ``x``."""

    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        """Stable identity, e.g. ``toy/plus-3/times-4``: used as ``task_id`` in the record."""
        return "toy/" + "/".join(f"{word}-{operand}" for word, operand in self.steps)

    @property
    def needs_service(self) -> bool:
        """Whether a right program has to ask the service for the rate."""
        return any(step.operand == RATE for step in self.steps)

    @property
    def prompt(self) -> str:
        """What the policy model is given: one comment line."""
        return f"# x {' then '.join(map(str, self.steps))}\n"

    @property
    def held_out(self) -> bool:
        """About one task in five, chosen by name: never trained on, by no seed."""
        return zlib.crc32(self.name.encode()) % 5 == 0

    def expected(self, x: int, rate: int) -> int:
        """Return the right result for ``x``. Computed by the grader's side only."""
        for word, operand in self.steps:
            value = rate if isinstance(operand, str) else operand
            x = x + value if word == "plus" else x - value if word == "minus" else x * value
        return x

    def as_task(self, completion: str, *, rate: int, timeout_s: float) -> Task:
        """Return the task with ``completion`` as its program, and with its hidden tests.

        The tests carry the expected values, so they go to the grader only; a rollout gets the program.
        """
        checks = "".join(f"    assert candidate({x}) == {self.expected(x, rate)}\n" for x in INPUTS)
        return make_task(
            {
                "task_id": self.name,
                "entry_point": "f",
                "solution": (PRELUDE if self.needs_service else "") + completion + VISIBLE_RUN,
                "tests": f"def check(candidate):\n{checks}",
                "prompt": self.prompt,
                "timeout_s": timeout_s,
                "artifacts": [SOLUTION, FETCHED, TOOLBOX] if self.needs_service else [SOLUTION],
            }
        )


def all_tasks() -> Iterator[ToyTask]:
    """Yield every task once, in a fixed order. ``rate`` occurs at most once in a task."""
    operands: tuple[int | str, ...] = (*DIGITS, RATE)
    single = [Step(word, operand) for word in WORDS for operand in operands]
    for first in single:
        yield ToyTask((first,))
    for first, second in product(single, single):
        if not first.operand == second.operand == RATE:
            yield ToyTask((first, second))


class Pool(NamedTuple):
    """Tasks of one split, those that need the service apart, so that a share of them can be drawn."""

    plain: tuple[ToyTask, ...]
    service: tuple[ToyTask, ...]

    def draw(self, count: int, service_share: float, rng: Random) -> list[ToyTask]:
        """Return ``count`` tasks drawn with replacement, each a service task with chance ``service_share``."""
        return [rng.choice(self.service if rng.random() < service_share else self.plain) for _ in range(count)]

    def sample(self, count: int, service_share: float, rng: Random) -> list[ToyTask]:
        """Return up to ``count`` different tasks with as many service tasks as the share says, rounded."""
        service = min(len(self.service), round(count * service_share))
        return [
            *rng.sample(self.plain, min(len(self.plain), count - service)),
            *rng.sample(self.service, service),
        ]


def pool(*, held_out: bool) -> Pool:
    """Return the tasks of one split."""
    tasks = [task for task in all_tasks() if task.held_out is held_out]
    return Pool(
        tuple(task for task in tasks if not task.needs_service),
        tuple(task for task in tasks if task.needs_service),
    )


def program(steps: tuple[Step, ...], *, key: str = RATE) -> str:
    """Return a right program for ``steps``; another ``key`` asks the service for the wrong thing."""
    expression = "x"
    for index, (word, operand) in enumerate(steps):
        if index and word == "times":
            expression = f"({expression})"
        value = f"get('{key}')" if operand == RATE else str(operand)
        expression = f"{expression} {WORDS[word]} {value}"
    return f"def f(x):\n    return {expression}\n"


def wrong_program(task: ToyTask, rng: Random) -> str:
    """Return a plausible wrong program: constant, operator, a dropped step, syntax, or a forbidden request."""
    steps = list(task.steps)
    index = rng.randrange(len(steps))
    word, operand = steps[index]
    slips = ["operator", "syntax"] + (["dropped"] if len(steps) > 1 else [])
    slips += ["forbidden", "forbidden"] if task.needs_service else ["constant"]
    match rng.choice(slips):
        case "constant":
            steps[index] = Step(word, rng.choice([digit for digit in DIGITS if digit != operand]))
        case "operator":
            steps[index] = Step(rng.choice([other for other in WORDS if other != word]), operand)
        case "dropped":
            steps.pop(index)
        case "forbidden":
            return program(task.steps, key=FORBIDDEN)
        case _:
            return program(task.steps).replace("def f(x):", "def f(x)")
    return program(tuple(steps))


class Row(NamedTuple):
    """One example of the warm-up."""

    prompt: str
    completion: str


def teacher(count: int, *, wrong_share: float, service_share: float, rng: Random) -> list[Row]:
    """Return ``count`` examples of the noisy teacher, from training tasks only."""
    rows = []
    for task in pool(held_out=False).draw(count, service_share, rng):
        right = rng.random() >= wrong_share
        rows.append(Row(task.prompt, program(task.steps) if right else wrong_program(task, rng)))
    return rows
