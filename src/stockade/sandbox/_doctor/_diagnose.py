"""Run every probe on its own and put the findings in order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from stockade.sandbox._doctor import _host, _kernel, _tools
from stockade.sandbox._doctor._report import Finding, Report, Status

_STEPS = ("userns", "netns", "tmpfs", "overlay")


def _trial() -> dict[str, str]:
    """Answers of ``_trial``, run as an unprivileged uid when root: that is how sandboxes are made."""
    source = (files("stockade.sandbox._doctor") / "_trial.py").read_bytes()
    try:
        done = _tools.run([_tools.trial_python(), "-I", "-S", "-"], data=source, drop=True)
        if done.returncode == 0:
            answers = json.loads(done.stdout)
            return {name: str(answers[name]) for name in _STEPS}
        failed = _tools.first_line(done.stderr[-2000:]) or f"status {done.returncode}"
    except Exception as error:  # noqa: BLE001 -- whatever went wrong is the finding
        failed = f"{type(error).__name__}: {error}"
    return dict.fromkeys(_STEPS, f"the trial did not run: {failed}")


def _default_state() -> Path:
    for name, tail in (("STOCKADE_STATE", ""), ("XDG_STATE_HOME", "stockade")):
        if os.environ.get(name):
            return Path(os.environ[name]) / tail
    return Path(f"/tmp/stockade-{os.getuid()}")  # noqa: S108 -- the documented last resort; only looked at here


def _guarded(name: str, probe: Callable[[], Finding], *, needed: bool) -> Finding:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 -- one broken probe must not hide the others
        return Finding(name, Status.MISSING, f"the probe failed: {type(error).__name__}: {error}", needed=needed)


def diagnose(*, state_dir: Path | None = None) -> Report:
    """Try out what this node allows; takes a second, leaves nothing behind, contacts nobody.

    ``state_dir`` is the directory whose file system is judged (default: where the state would go). A probe that
    fails is a finding of status ``missing`` with the reason; nothing is raised.
    """
    trial = _trial()
    who = f"uid {_tools.UNPRIVILEGED}" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    state = _default_state() if state_dir is None else state_dir
    probes: tuple[tuple[str, Callable[[], Finding], bool], ...] = (
        ("kernel", _kernel.kernel, False),
        ("user namespaces", lambda: _kernel.user_namespaces(trial, who), True),
        ("bubblewrap", _tools.bubblewrap, True),
        ("interpreter", _tools.system_python, False),
        ("seccomp", _kernel.seccomp, True),
        ("landlock", _kernel.landlock, False),
        ("cgroup", _kernel.cgroups, False),
        ("sized tmpfs", lambda: _kernel.tmpfs(trial), True),
        ("overlay", lambda: _kernel.overlay(trial), False),
        ("kvm", _kernel.kvm, False),
        ("gvisor", _tools.gvisor, False),
        ("apptainer", _tools.apptainer, False),
        ("firecracker", _tools.firecracker, False),
        ("slurm", _tools.slurm, False),
        ("internet", _host.internet, False),
        ("state directory", lambda: _host.state_directory(state), False),
        ("memory", _host.memory, False),
        ("swap", _host.swap, False),
        ("cpus", _host.cpus, False),
        ("processes", _host.processes, False),
        ("open files", _host.open_files, False),
    )
    return Report(tuple(_guarded(name, probe, needed=needed) for name, probe, needed in probes))
