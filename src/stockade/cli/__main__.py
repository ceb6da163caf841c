"""``python -m stockade.cli``: the same as the ``stockade`` program."""

from stockade.cli import main

main()
