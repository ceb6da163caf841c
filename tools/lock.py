"""Write requirements/*.txt: the exact versions installed in the environment this runs in.

Usage: ``.venv/bin/python tools/lock.py`` in an environment where every extra is installed. Each file holds the closure
of one part of pyproject.toml; train and dev leave out what core holds, and are complete with it.
"""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"


def closure(requirements: list[str]) -> dict[str, str]:
    """Return canonical name → exact pin of everything that ``requirements`` need on this interpreter.

    The marker of what is named in ``requirements`` stays with its pin: elsewhere there may be no such package.
    """
    pins: dict[str, str] = {}
    queue: list[tuple[Requirement, frozenset[str]]] = [(Requirement(text), frozenset()) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement, extras = queue.pop()
        wanted = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if requirement.marker and not any(requirement.marker.evaluate(environment) for environment in wanted):
            continue
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        distribution = metadata.distribution(requirement.name)
        # "+cpu" and the like name one index's build; the same release must install from any.
        pins[key[0]] = f"{distribution.metadata['Name']}=={distribution.version.partition('+')[0]}"
        queue += [(Requirement(text), key[1]) for text in distribution.requires or []]
    for requirement in map(Requirement, requirements):
        if requirement.marker and canonicalize_name(requirement.name) in pins:
            pins[canonicalize_name(requirement.name)] += f"; {requirement.marker}"
    return pins


def main() -> None:
    """Write the four files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    parts = {
        "build": project["build-system"]["requires"],
        "core": project["project"]["dependencies"],
        "train": extras["train"],
        "dev": extras["dev"],
    }
    core = closure(parts["core"])
    for name, requirements in parts.items():
        pins = closure(requirements)
        with_core = name in ("train", "dev")
        lines = [pin for key, pin in sorted(pins.items()) if not (with_core and key in core)]
        head = f"# Exact versions for {name}; written by tools/lock.py."
        (LOCKS / f"{name}.txt").write_text("\n".join([head, *lines]) + "\n")
        print(f"requirements/{name}.txt: {len(lines)} pins")


if __name__ == "__main__":
    main()
