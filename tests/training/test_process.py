from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stockade.policy import load_policy
from stockade.training import load_job, resolve_job
from tests.support import ROOT

HIDDEN = ("torch", "transformers", "trl", "datasets", "accelerate", "altair", "vl_convert")


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), **variables}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


HIDE = f"""
import sys
from importlib.abc import MetaPathFinder
class Hide(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HIDDEN!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {HIDDEN!r} else real(name, package)
"""


@pytest.fixture
def job(tmp_path) -> Path:
    made = load_job(ROOT / "examples" / "grpo" / "short.yaml")
    resolved = resolve_job(made, load_policy(Path(made.policy))).model_copy(update={"output": str(tmp_path / "out")})
    path = tmp_path / "resolved.json"
    path.write_text(resolved.model_dump_json())
    return path


def test_the_package_imports_without_the_engine():
    code = HIDE + "import stockade.training as t; print(len(t.__all__), 'torch' in sys.modules)"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "False"


def test_importing_the_package_does_not_import_the_engine():
    done = python("import sys, stockade.training; print(sorted({'torch', 'trl', 'altair'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]"


def test_a_missing_engine_is_one_clear_line(job):
    done = python(HIDE + "from stockade.training import main; sys.exit(main(sys.argv[1:]))", "--job", str(job))
    assert done.returncode == 2
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["event"] == "failed"
    assert "torch" in line["message"]
    assert line["hint"] == "pip install 'stockade[train]'"
    assert not done.stderr


@pytest.mark.parametrize(("text", "words"), [(None, "cannot be read"), ("{", "not a resolved job"), ("{}", "version")])
def test_a_bad_resolved_job_is_one_clear_line(tmp_path, text, words):
    path = tmp_path / "resolved.json"
    if text is not None:
        path.write_text(text)
    done = python("import sys; from stockade.training import main; sys.exit(main(sys.argv[1:]))", "--job", str(path))
    assert done.returncode == 2
    (line,) = map(json.loads, done.stdout.splitlines())
    assert words in line["message"]


def test_a_resolved_job_with_a_policy_in_it_is_refused(job):
    fields = json.loads(job.read_text())
    job.write_text(json.dumps({**fields, "policy": "/secret/policy.yaml"}))
    done = python("import sys; from stockade.training import main; sys.exit(main(sys.argv[1:]))", "--job", str(job))
    assert done.returncode == 2
    assert json.loads(done.stdout)["event"] == "failed"


ATTEMPTS = """
import json, multiprocessing, os, subprocess, sys
from stockade.training._process import forbid_processes

def attempts():
    yield "fork", lambda: os.fork() or os._exit(0)
    yield "system", lambda: os.system("true")
    yield "run", lambda: subprocess.run(["true"])
    yield "spawn", lambda: os.posix_spawn("/bin/true", ["true"], {})
    yield "multiprocessing", lambda: multiprocessing.get_context("fork").Process(target=print).start()
    if guarded:
        yield "exec", lambda: os.execv("/bin/true", ["true"])

guarded = sys.argv[1] == "guarded"
if guarded:
    forbid_processes()
said = {}
for name, attempt in attempts():
    try:
        attempt()
        said[name] = "started"
    except OSError as error:
        said[name] = str(error)
sys.stdout.write(json.dumps(said))
"""


def test_the_training_process_starts_no_process():
    free = python(ATTEMPTS, "free")
    assert set(json.loads(free.stdout.splitlines()[-1]).values()) == {"started"}, free.stderr
    guarded = json.loads(python(ATTEMPTS, "guarded").stdout)
    assert len(guarded) == 6
    assert all("must not start processes" in answer for answer in guarded.values()), guarded


def test_progress_has_its_stream_to_itself(job):
    # Whatever prints in the training process goes to stderr, the lines of JSON stay whole.
    code = HIDE + (
        "import stockade.training._process as p\n"
        "real_run = p._run\n"
        "p._run = lambda job, progress: (print('chatter', flush=True), real_run(job, progress))[1]\n"
        "sys.exit(p.main(sys.argv[1:]))"
    )
    done = python(code, "--job", str(job))
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["failed"]
    assert done.stderr == "chatter\n"
