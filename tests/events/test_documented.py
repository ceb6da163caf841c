"""docs/record.md lists every kind with its fields, and no other."""

from __future__ import annotations

import re

from stockade.events import SCHEMA
from tests.support import ROOT

ANY_KIND = {"rule", "truncated", "full_bytes", "detail"}


def test_the_page_and_the_schema_agree() -> None:
    page = (ROOT / "docs" / "record.md").read_text("utf-8")
    found = {}
    for line in page.splitlines():
        cells = line.split(" | ")
        if line.startswith("| `") and len(cells) == 3:
            kind = cells[0].strip("|` ")
            found[kind] = tuple(frozenset(re.findall(r"`([^`]+)`", cell)) for cell in cells[1:])
    expected = {name: (frozenset(kind.required), frozenset(kind.optional) - ANY_KIND) for name, kind in SCHEMA.items()}
    assert found == expected
