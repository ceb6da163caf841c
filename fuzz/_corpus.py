"""The corpus on disk: one file a target, one input a line, readable as far as the bytes are.

libFuzzer wants a folder with a file for each input; thousands of those are nothing for a repository.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fuzz._seeds import seeds

FOLDER = Path(__file__).resolve().parent / "corpus"


def found(name: str) -> list[bytes]:
    """Return what was found for a target and kept."""
    path = FOLDER / f"{name}.txt"
    lines = path.read_text("ascii").splitlines() if path.exists() else []
    return [line.encode("ascii").decode("unicode_escape").encode("latin-1") for line in lines]


def inputs(name: str) -> list[bytes]:
    """Return seeds and findings of a target."""
    return [*seeds(name), *found(name)]


def keep(name: str, samples: list[bytes]) -> int:
    """Write the corpus of a target, shortest first; seeds are not repeated. Return the size of its file in bytes."""
    known = set(seeds(name))
    lines = sorted({sample for sample in samples if sample not in known}, key=lambda sample: (len(sample), sample))
    text = "".join(f"{sample.decode('latin-1').encode('unicode_escape').decode('ascii')}\n" for sample in lines)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.txt"
    if text:
        path.write_text(text, "ascii")
    else:
        path.unlink(missing_ok=True)
    return len(text)


def unpack(samples: list[bytes], folder: Path) -> None:
    """Write each sample into a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for sample in samples:
        (folder / hashlib.sha256(sample).hexdigest()[:32]).write_bytes(sample)
