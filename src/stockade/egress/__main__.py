"""``python -m stockade.egress``: the worker process."""

from __future__ import annotations

import sys

from stockade.egress._worker import main

if __name__ == "__main__":
    sys.exit(main())
