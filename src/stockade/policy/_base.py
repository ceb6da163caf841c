"""What every model of a file shares: strictness, the version, and where a value came from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from stockade.policy._errors import BadValue, found

UNREAD = frozenset({"source_line", "source_name"})
"""Fields that say where a rule came from: no key of a file, no part of a digest."""


def _exact_version(value: object) -> object:
    if type(value) is not int:  # True and 1.0 equal 1
        raise BadValue(f"{found(value)} is not a version of this format", hint="this stockade reads version 1")
    return value


Version = Annotated[Literal[1], BeforeValidator(_exact_version)]
SourceLine = Annotated[SkipJsonSchema[int], Field(ge=0, repr=False)]
SourceName = Annotated[SkipJsonSchema[str], Field(max_length=80, repr=False)]


class StrictModel(BaseModel):
    """Base of everything that is read from a file: frozen, no unknown keys, no conversion between types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True, allow_inf_nan=False
    )

    reserved_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that a later version will give a meaning; until then they are refused by this name."""
