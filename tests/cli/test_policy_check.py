"""``stockade policy check`` with presets: one line each, and every rule where somebody asks."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from stockade.cli import app
from stockade.policy import load_preset

POLICY = """
version: 1
egress:
  presets: [pypi-read, github-read]
  allow: [{host: a.example, methods: [GET], store: true}]
"""


def check(folder: Path, *words: str) -> str:
    path = folder / "policy.yaml"
    path.write_text(POLICY, "utf-8")
    done = CliRunner().invoke(app, ["policy", "check", str(path), *words], env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_preset_is_one_line_with_its_hosts(tmp_path: Path) -> None:
    shown = check(tmp_path)
    rows = [line for line in shown.splitlines() if "pypi-read" in line and "preset" in line]
    assert "3 allow: pypi.org, files.pythonhosted.org" in rows[0]
    assert "--all" in rows[0]
    assert "/simple/**" not in shown
    assert "answers are kept and served again" in shown, "of the policy's own rule"
    assert shown.count("preset pypi-read") == 2, "once in each leg of the trifecta"


def test_all_shows_every_rule_and_where_it_stands(tmp_path: Path) -> None:
    shown = check(tmp_path, "--all")
    assert "/simple/**" in shown
    for rule in load_preset("pypi-read").allow:
        assert f"preset pypi-read {rule.source_line}" in shown


def test_json_has_them_all_with_their_source(tmp_path: Path) -> None:
    rules = json.loads(check(tmp_path, "--json"))["rules"]
    presets = {name: load_preset(name) for name in ("pypi-read", "github-read")}
    for name, preset in presets.items():
        own = [rule for rule in rules if rule["source"] == f"preset {name}"]
        assert len(own) == len(preset.allow) + len(preset.deny)
    [last] = [rule for rule in rules if not rule["source"]]
    assert (last["host"], "kept" in last["note"]) == ("a.example", True)
