"""Entry of the training process; see :mod:`stockade.training._process`."""

from __future__ import annotations

import sys

from stockade.training._process import main

if __name__ == "__main__":
    sys.exit(main())
