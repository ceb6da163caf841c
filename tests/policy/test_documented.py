"""docs/policy.md names every key of a policy and of the operator's file, and its example is valid."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stockade.policy import PRESETS, OperatorConfig, Policy, StrictModel, parse_policy
from tests.support import ROOT

PAGE = (ROOT / "docs" / "policy.md").read_text("utf-8")


def keys(model: type[StrictModel]) -> set[str]:
    """Every key that a file may hold, nested models included, as written in YAML."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        if name in {"source_line", "source_name"}:
            continue
        found.add(str(field.validation_alias or name))
        for part in _models(field.annotation):
            found |= keys(part)
    return found


def _models(annotation: Any) -> list[type[StrictModel]]:
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]


@pytest.mark.parametrize("model", [Policy, OperatorConfig])
def test_every_key_is_on_the_page(model: type[StrictModel]) -> None:
    named = set(re.findall(r"`([a-z_.]+)`", PAGE))
    named |= {part for name in named for part in name.split(".")}
    assert keys(model) - named == set()


def test_the_example_is_valid() -> None:
    example = PAGE.split("```yaml\n")[1].split("```")[0]
    policy = parse_policy(example, source="docs/policy.md")
    assert [rule.host.text for rule in policy.egress.allow][-4:] == [
        *("files.example.org", "*.mirror.example.org", "api.example.org", "git.example.org")
    ]


def test_the_defaults_are_those_on_the_page() -> None:
    policy = parse_policy("version: 1\n", source="x")
    shown = {
        line.split("|")[1].strip(): line.split("|")[3].strip() for line in PAGE.splitlines() if line.count("|") == 4
    }
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "min": 60, "s": 1}

    def value(text: str) -> float:
        number, _, unit = text.partition(" ")
        return float(number) * units.get(unit, 1)

    table = {
        **{name: getattr(policy.egress.limits, name) for name in ("requests_per_minute", "connections", "bytes_out")},
        **{name: getattr(policy.egress.limits, name) for name in ("bytes_in", "bytes_out_per_request", "header_bytes")},
        **{name: getattr(policy.sandbox, name) for name in ("memory", "cpus", "pids", "disk", "inodes", "file_size")},
        **{name: getattr(policy.sandbox, name) for name in ("open_files", "output")},
        **{name: getattr(policy.egress.limits, name) for name in ("header_count", "query_bytes", "names")},
        "wildcard_label": policy.egress.limits.wildcard_label,
        "idle": policy.egress.limits.idle_s,
        "total": policy.egress.limits.total_s,
        "wall": policy.sandbox.wall_s,
        "cpu": policy.sandbox.cpu_s,
    }
    checked = set()
    for cell, defaults in shown.items():
        names = re.findall(r"`([a-z_]+)`", cell)
        values = defaults.split(", ")
        for name, text in zip(names, values, strict=False):
            if name in table and text[0].isdigit():
                assert value(text) == table[name], name
                checked.add(name)
    assert checked == set(table)


def test_every_preset_is_on_the_page() -> None:
    assert set(re.findall(r"^\| `([a-z]+-read)`", PAGE, re.MULTILINE)) == set(PRESETS)
