"""``python -m stockade.cli``: the same as the ``stockade`` program."""

from __future__ import annotations

from stockade.cli import main

main()
