"""Libraries that talk by default are told not to.

Not cosmetics: TRL's warning about a masked sample prints the completion, and model-written text does not belong on
an operator's terminal unescaped.
"""

from __future__ import annotations

import logging
import warnings

import datasets
import transformers


def silence() -> None:
    """Switch off progress bars and library chatter below the level of errors."""
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
