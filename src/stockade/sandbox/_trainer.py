"""The trainer's own cage: everything it needs to train, nothing of the run it trains in.

Rewards must not depend on what the monitor thinks, and the surest way is that the trainer cannot look: not at the
record, not at the index, not at the policy. Landlock can only allow, so this lists what a Python with its
libraries, a GPU driver and an output directory need.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from stockade.sandbox._landlock import Access, Rule
from stockade.sandbox._launch import LaunchSpec

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
_FACTS = ("/proc", "/sys")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the trainer's own node, not a file of ours
_GPU = ("nvidia", "dri", "kfd", "infiniband")


def trainer_launch(
    *,
    argv: Sequence[str],
    env: Mapping[str, str],
    output: Path,
    reads: Sequence[Path],
    hidden: Sequence[Path],
    keep_fds: Sequence[int],
    report_fd: int,
) -> bytes:
    """Return the launch spec of a training process (:mod:`stockade.sandbox._launch`).

    It may write below ``output``, read ``reads``, its interpreter and the system; ``hidden`` is what it must not be
    able to open: the launcher tries each and refuses to start if a rule lets it through.
    """
    rules = [Rule(path, Access.READ_EXEC, optional=True) for path in (*_SYSTEM, *_interpreter())]
    rules += [Rule(path, Access.READ, optional=True) for path in _FACTS]
    rules += [Rule(path, Access.DEVICES, optional=True) for path in (*_DEVICES, *_gpu_nodes())]
    rules.append(Rule(_SHARED_MEMORY, Access.WRITE, optional=True))  # semaphores and tensors of data loaders
    rules += [Rule(str(path), Access.READ, optional=False) for path in reads]
    rules.append(Rule(str(output), Access.WRITE, optional=False))
    spec = LaunchSpec(
        argv=tuple(argv),
        env=dict(env),
        rules=tuple(rules),
        cwd=str(output),
        hidden=tuple(str(path) for path in hidden),
        keep_fds=tuple(keep_fds),
        report_fd=report_fd,
    )
    return spec.to_json()


def _interpreter() -> list[str]:
    """Where this Python, its environment and stockade itself lie."""
    package = Path(__file__).resolve().parents[2]
    roots = {sys.prefix, sys.base_prefix, str(package), *site.getsitepackages(), *sysconfig.get_paths().values()}
    # Several agents of one process tree may have been started from a checkout whose parent holds the runs too:
    # only the package's own directory is named, never the checkout.
    return sorted(root for root in roots if os.path.isabs(root) and os.path.isdir(root))


def _gpu_nodes() -> list[str]:
    return [f"/dev/{name}" for name in os.listdir("/dev") if name.startswith(_GPU)]
