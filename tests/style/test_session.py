"""The rules of tests/conftest.py can fail: each is broken once, in a pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

from tests import leaks
from tests.support import OPTIONAL, ROOT, requires


def _session(tmp_path, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``body`` as a test module under the conftest of this tree."""
    path = tmp_path / "test_sample.py"
    path.write_text("import os, subprocess, tempfile\nimport pytest\nfrom tests.support import requires\n" + body)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "STOCKADE_MUST_RUN")}
    return subprocess.run(
        [*words, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), str(path)],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_clean_session_passes(tmp_path):
    done = _session(tmp_path, "def test_x():\n    with tempfile.TemporaryDirectory():\n        pass\n")
    assert done.returncode == 0, done.stdout


def test_what_is_left_behind_fails_the_session(tmp_path):
    body = (
        "def test_x():\n"
        "    os.open('/etc/passwd', os.O_RDONLY)\n"
        "    subprocess.Popen(['sleep', '9']).returncode = 0\n"
        "    os.close(tempfile.mkstemp(prefix='a-file')[0])\n"
        "    tempfile.mkdtemp(prefix='a-folder')\n"
    )
    done = _session(tmp_path, body)
    assert done.returncode == 1, done.stdout
    for message in ("descriptor ", "process ", "temporary folder: a-file", "temporary folder: a-folder"):
        assert message in done.stdout


def test_an_orphan_fails_the_session(tmp_path):
    """Its parent is gone, so it is no descendant any more; it was seen before."""
    body = (
        "def test_x():\n"
        "    global child\n"
        "    child = subprocess.Popen(['sh', '-c', 'sleep 9 & echo; wait'], stdout=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
        "def test_y():\n"
        "    child.kill()\n"
        "    child.wait()\n"
        "    child.stdout.close()\n"
    )
    done = _session(tmp_path, body)
    assert done.returncode == 1, done.stdout
    assert "still alive" in done.stdout


SKIPS = (
    "def test_plain():\n    pytest.skip('just so')\n"
    "@pytest.mark.skip(reason='just so')\ndef test_marked():\n    pass\n"
    "@pytest.mark.xfail(reason='just so')\ndef test_xfail():\n    assert False\n"
    "def test_required():\n    requires(False, 'just so')\n"
    "def test_optional():\n    requires(False, 'no such hardware', must_run_in_ci=False)\n"
)


def test_a_skipped_must_run_test_fails_the_session(tmp_path):
    done = _session(tmp_path, SKIPS, CI="true")
    assert done.returncode == 1, done.stdout
    for name in ("plain", "marked", "xfail"):
        assert re.search(rf"must run here, but was skipped: .*::test_{name}: .*just so", done.stdout), name
    assert "this must run here, and cannot: just so" in done.stdout
    assert "skipped: no such hardware" not in done.stdout


def test_a_skipped_module_fails_the_session(tmp_path):
    done = _session(tmp_path, "pytest.skip('just so', allow_module_level=True)\n", STOCKADE_MUST_RUN="1")
    assert done.returncode == 1, done.stdout
    assert "just so" in done.stdout


def test_elsewhere_a_skip_is_a_skip(tmp_path):
    assert _session(tmp_path, SKIPS).returncode == 0


def test_an_optional_skip_is_fine_everywhere(tmp_path):
    done = _session(tmp_path, SKIPS[SKIPS.index("def test_optional") :], CI="true")
    assert done.returncode == 0, done.stdout


def test_requires_lets_a_met_condition_pass():
    requires(1, "nothing is missing")
    assert OPTIONAL.startswith("[")


def test_descendants_and_descriptors_are_seen():
    before = leaks.take()
    with tempfile.TemporaryFile(), subprocess.Popen(["sleep", "9"]) as child:
        found = leaks._difference(before, leaks.take(), all_mounts=True, own="")
        child.kill()
    assert any(line.startswith("descriptor") for line in found)
    assert any(line.startswith(f"process {child.pid}") for line in found)
    assert leaks.new_since(before, all_mounts=False, own="/nowhere") == []
