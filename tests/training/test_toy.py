from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from stockade.training._toolbox import PRELUDE, VISIBLE_RUN, toolbox
from stockade.training._toy import INPUTS, RATE, Step, ToyTask, all_tasks, pool, program, teacher, wrong_program

TASKS = list(all_tasks())


def test_there_are_747_different_tasks_and_names():
    assert len(TASKS) == len({task.name for task in TASKS}) == 747
    assert len({task.prompt for task in TASKS}) == 747
    assert sum(task.needs_service for task in TASKS) == 147


def test_held_out_tasks_are_never_trained_on():
    train, held = pool(held_out=False), pool(held_out=True)
    assert not {*train.plain, *train.service} & {*held.plain, *held.service}
    assert 0.15 < (len(held.plain) + len(held.service)) / 747 < 0.25
    taught = {row.prompt for row in teacher(5000, wrong_share=0.5, service_share=0.2, rng=Random(1))}
    assert not taught & {task.prompt for task in (*held.plain, *held.service)}


def run(source: str, rate: int = 42) -> list[object]:
    names: dict[str, object] = {"get": {"rate": rate}.__getitem__}
    exec(compile(source, "solution", "exec"), names)
    function = names["f"]
    assert callable(function)
    return [function(x) for x in INPUTS]


def test_the_right_program_of_every_task_is_right():
    for task in TASKS:
        assert run(program(task.steps)) == [task.expected(x, 42) for x in INPUTS], task.name


def test_prompts_and_programs_read_as_documented():
    task = ToyTask((Step("plus", 3), Step("times", 4)))
    assert task.prompt == "# x plus 3 then times 4\n"
    assert program(task.steps) == "def f(x):\n    return (x + 3) * 4\n"
    assert program((Step("minus", RATE),)) == "def f(x):\n    return x - get('rate')\n"


def test_wrong_programs_are_wrong_and_some_ask_for_what_is_forbidden():
    rng = Random(5)
    forbidden = 0
    for task in TASKS:
        code = wrong_program(task, rng)
        assert code != program(task.steps)
        forbidden += "get('cost')" in code
        if "get('cost')" in code or "def f(x)\n" in code:
            continue
        assert run(code) != [task.expected(x, 42) for x in INPUTS], (task.name, code)
    assert forbidden > 20


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_teacher_is_wrong_as_often_as_asked(share):
    rows = teacher(400, wrong_share=share, service_share=0.2, rng=Random(2))
    right = {task.prompt: program(task.steps) for task in TASKS}
    wrong = sum(row.completion != right[row.prompt] for row in rows) / len(rows)
    assert wrong == pytest.approx(share, abs=0.08)


def test_the_same_seed_draws_the_same_tasks():
    draws = [pool(held_out=False).draw(50, 0.3, Random(7)) for _ in range(2)]
    assert draws[0] == draws[1]
    assert 0.1 < sum(task.needs_service for task in draws[0]) / 50 < 0.5


def test_an_evaluation_sample_has_different_tasks_and_its_share_of_service_tasks():
    tasks = pool(held_out=True).sample(32, 0.25, Random(1))
    assert len(set(tasks)) == 32
    assert sum(task.needs_service for task in tasks) == 8


def test_a_rollout_gets_the_program_and_no_expected_value():
    for task in TASKS[:200]:
        made = task.as_task("def f(x):\n    return 0\n", rate=918273, timeout_s=5.0)
        shown = made.solution + made.prompt + repr(made.prompt_view) + repr(made.artifacts)
        assert "918273" not in shown
        assert "candidate(" not in shown
        assert made.tests.count("assert") == len(INPUTS)


def test_service_tasks_carry_their_helper_and_others_do_not():
    service = ToyTask((Step("plus", RATE),)).as_task("X", rate=1, timeout_s=5.0)
    plain = ToyTask((Step("plus", 2),)).as_task("X", rate=1, timeout_s=5.0)
    assert service.solution == PRELUDE + "X" + VISIBLE_RUN
    assert service.artifacts == ("solution.py", "fetched.json", "toolbox.py")
    assert plain.solution == "X" + VISIBLE_RUN
    assert plain.artifacts == ("solution.py",)


def test_the_helper_reads_what_was_collected_and_asks_nobody(tmp_path):
    (tmp_path / "toolbox.py").write_bytes(toolbox("http://127.0.0.1:9"))
    (tmp_path / "fetched.json").write_text('{"rate": 42}')
    (tmp_path / "solution.py").write_text(PRELUDE + "def f(x):\n    return x + get('rate')\n" + VISIBLE_RUN)
    command = [sys.executable, "-I", "-S", "solution.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "45\n"


def test_the_helper_knows_the_address_of_its_job():
    assert b'RATES_URL = "http://rates.stockade.internal:18473"' in toolbox("http://rates.stockade.internal:18473")
