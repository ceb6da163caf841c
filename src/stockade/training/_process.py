"""The training process: ``python -m stockade.training --job RESOLVED.json``.

It is started by ``stockade train``, under Landlock, with the broker's socket and token in its environment. It opens
nothing of the run: not the policy, not the record, not the index. It starts no process either: a fork of a process
with torch in it costs 70 ms, and a child of the trainer would be outside every sandbox.

Exit codes: 0 done (also when it gave up early, with a warning), 2 the job or this machine is wrong, 3 held for a
person or the node agent is gone, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

from pydantic import ValidationError

from stockade.client import BrokerClient
from stockade.errors import BrokerError, JobError, NodeError, StockadeError
from stockade.training._job import ResolvedJob
from stockade.training._progress import Progress

EXTRA: Final = "train"
NEEDED: Final = ("torch", "transformers", "trl", "datasets", "accelerate")
EXIT_OF_END: Final = {"complete": 0, "gave_up": 0, "held": 3, "agent_gone": 3, "interrupted": 130}
BAD_SETUP: Final = 2
HELD: Final = 3
INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stockade.training", description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="the resolved job, as JSON")
    parser.add_argument("--progress-fd", type=int, default=None, help="where progress goes (default: stdout)")
    options = parser.parse_args(arguments)
    with _progress_stream(options.progress_fd) as stream:
        progress = Progress(stream)
        try:
            return _run(_read(options.job), progress)
        except KeyboardInterrupt:
            progress.say("failed", message="interrupted before there was anything to save", hint=None)
            return INTERRUPTED
        except StockadeError as error:
            progress.say("failed", message=error.message, hint=error.hint)
            return HELD if isinstance(error, BrokerError) else BAD_SETUP
        except Exception as error:
            progress.say("failed", message=f"{type(error).__name__}: {error}", hint="this is a defect of stockade")
            raise


def require_engine() -> None:
    """Check that the engine is installed, without importing it.

    Raises:
        NodeError: naming what to install.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NodeError(
            f"training needs {', '.join(missing)}, not installed here",
            hint=f"pip install 'stockade[{EXTRA}]'",
        )


def _read(path: Path) -> ResolvedJob:
    try:
        return ResolvedJob.model_validate_json(path.read_bytes())
    except OSError as error:
        raise JobError(f"cannot be read: {error.strerror}", path=path) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise JobError(f"not a resolved job: {first['msg']}", path=path, key=key) from None


def _run(job: ResolvedJob, progress: Progress) -> int:
    require_engine()
    _set_environment(job)
    # A launcher that ends us politely gets what Ctrl-C gets: the model so far, the metrics, the summary.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Only now: torch reads the number of threads when it is imported.
    campaign = importlib.import_module("stockade.training._campaign")
    quiet = importlib.import_module("stockade.training._quiet")
    quiet.silence()
    forbid_processes()
    end = campaign.run_job(job, BrokerClient.from_environment, progress).end
    return EXIT_OF_END[end]


def _set_environment(job: ResolvedJob) -> None:
    """Keep the libraries offline, on ``threads`` threads, and with their files inside the output directory."""
    cache = job.folder / "cache"
    (cache / "tmp").mkdir(parents=True, exist_ok=True)
    threads = str(job.threads)
    os.environ.update(
        {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(cache / "hf"),
            "XDG_CACHE_HOME": str(cache / "xdg"),
            "TMPDIR": str(cache / "tmp"),
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
    )


def forbid_processes() -> None:
    """From here on, refuse to fork or to start a program from this process. Cannot be taken back."""
    sys.addaudithook(_refuse_processes)


_PROCESS_EVENTS: Final = frozenset(
    ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "subprocess.Popen", "pty.spawn")
)


def _refuse_processes(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _PROCESS_EVENTS:
        raise NodeError(f"the training process must not start processes ({event})")


def _progress_stream(descriptor: int | None) -> TextIO:
    """Return the stream for progress lines; when it is stdout, everything else that prints goes to stderr."""
    if descriptor is not None:
        return os.fdopen(descriptor, "w", encoding="utf-8")
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own
