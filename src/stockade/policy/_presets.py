"""Rules that ship: what a package index, a forge or a hub needs for fetching, and nothing by which it can be written.

A preset is a YAML file of this package, read as strictly as a policy. Its rules come before those of the policy that
names it, and say so wherever a rule is named.
"""

from __future__ import annotations

import functools
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, WithJsonSchema

from stockade.policy._base import StrictModel, Version
from stockade.policy._errors import BadValue, nearest, shown
from stockade.policy._rules import DenyRule, HostRule
from stockade.policy._values import Line

AnyRule = TypeVar("AnyRule", HostRule, DenyRule)

PRESETS = ("debian-read", "github-read", "huggingface-read", "npm-read", "pypi-read")
"""The names that ``egress.presets`` may list."""


def _known(name: str) -> str:
    if name not in PRESETS:
        raise BadValue(f"there is no preset {shown(name)}", hint=nearest(name, PRESETS))
    return name


PresetName = Annotated[str, AfterValidator(_known), WithJsonSchema({"enum": list(PRESETS)})]


class Preset(StrictModel):
    """One file of rules that ships."""

    version: Version
    about: Line
    allow: Annotated[tuple[HostRule, ...], Field(min_length=1, max_length=100)]
    deny: Annotated[tuple[DenyRule, ...], Field(max_length=100)] = ()

    @property
    def source_name(self) -> str:
        """How its rules are named: ``preset pypi-read``."""
        return self.allow[0].source_name


@functools.cache
def load_preset(name: str) -> Preset:
    """Return the preset ``name`` of :data:`PRESETS`; each of its rules carries ``source_name``."""
    from importlib import resources

    from stockade.policy._bind import parse_document
    from stockade.policy._yaml import Source

    source = f"preset {_known(name)}"
    text = resources.files("stockade.policy").joinpath("presets", f"{name}.yaml").read_text("utf-8")
    preset = parse_document(text, Preset, Source(source))

    def named(rule: AnyRule) -> AnyRule:
        return rule.model_copy(update={"source_name": source})

    return preset.model_copy(update={"allow": tuple(map(named, preset.allow)), "deny": tuple(map(named, preset.deny))})
