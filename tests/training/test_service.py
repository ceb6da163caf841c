from __future__ import annotations

import json
import subprocess
import sys
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from stockade.errors import NodeError
from stockade.training import serve_rates
from stockade.training._toolbox import PRELUDE, VISIBLE_RUN, toolbox


def ask(port: int, path: str) -> int:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return int(json.load(answer)["value"])


def test_the_service_answers_both_paths_so_that_only_the_policy_forbids_one():
    with serve_rates("127.0.0.1", 0, 42) as port:
        assert ask(port, "/v1/rate") == 42
        assert ask(port, "/v1/cost") != 42


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/other", "/v1/rate/", "/v1/rate?x=1"])
def test_the_service_knows_nothing_else(path):
    with serve_rates("127.0.0.1", 0, 42) as port, pytest.raises(HTTPError) as caught:
        ask(port, path)
    assert caught.value.code == 404
    caught.value.close()


def test_a_taken_port_is_one_clear_line():
    with (
        serve_rates("127.0.0.1", 0, 42) as port,
        pytest.raises(NodeError, match=f"cannot listen on 127.0.0.1:{port}"),
        serve_rates("127.0.0.1", port, 42),
    ):
        pass


def test_the_port_is_free_again_afterwards():
    with serve_rates("127.0.0.1", 0, 42) as port:
        pass
    with serve_rates("127.0.0.1", port, 43) as again:
        assert ask(again, "/v1/rate") == 43


def test_a_program_asks_once_and_writes_the_answer_down(tmp_path):
    with serve_rates("127.0.0.1", 0, 42) as port:
        (tmp_path / "toolbox.py").write_bytes(toolbox(f"http://127.0.0.1:{port}"))
        body = "def f(x):\n    return x + get('rate') + get('rate')\n"
        (tmp_path / "solution.py").write_text(PRELUDE + body + VISIBLE_RUN)
        command = [sys.executable, "-I", "solution.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env={})
    assert done.stdout == "87\n"
    assert json.loads((tmp_path / "fetched.json").read_text()) == {"rate": 42}
