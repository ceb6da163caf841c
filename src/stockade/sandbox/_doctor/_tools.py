"""Probes of programs: bubblewrap, the interpreter, other isolators, Slurm."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stockade.errors import NodeError
from stockade.sandbox._doctor._report import Finding, Status
from stockade.sandbox._tools import find_bubblewrap, find_interpreter

UNPRIVILEGED = 65534
TIMEOUT_S = 2.0
_SYSTEM_PYTHON = "/usr/bin/python3"
_APPTAINER_SAFE = (1, 4, 5)
"""CVE-2025-65105: before it, a container undoes flags of the runtime."""


def run(
    command: Sequence[str], *, data: bytes = b"", fds: Sequence[int] = (), drop: bool = False
) -> subprocess.CompletedProcess[bytes]:
    """Run a short command with an empty environment; ``drop`` leaves root for an unprivileged uid first."""
    drop = drop and os.geteuid() == 0
    return subprocess.run(
        list(command),
        input=data,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        pass_fds=tuple(fds),
        user=UNPRIVILEGED if drop else None,
        group=UNPRIVILEGED if drop else None,
        extra_groups=[] if drop else None,
    )


def first_line(data: bytes) -> str:
    """The first line of output as printable text of bounded length."""
    text = data.decode("utf-8", "replace").strip().partition("\n")[0]
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]


def trial_python() -> str:
    """The interpreter for the trial: the system's where there is one, because any uid may run it."""
    return _SYSTEM_PYTHON if os.access(_SYSTEM_PYTHON, os.X_OK) else os.path.realpath(sys.executable)


def bubblewrap() -> Finding:
    """Which bubblewrap, whether it is setuid, and whether it makes a sandbox as an unprivileged user."""
    try:
        tool = find_bubblewrap()
    except NodeError as error:
        return Finding(
            "bubblewrap",
            Status.MISSING,
            str(error),
            "Please install bubblewrap, not setuid (CVE-2026-41163).",
            needed=True,
        )
    if os.stat(tool.path).st_mode & stat.S_ISUID:
        ask = "Please remove the setuid bit of bubblewrap (CVE-2026-41163)."
        return Finding("bubblewrap", Status.MISSING, f"{tool.path} is setuid: refused", ask, needed=True)
    # By descriptor, as the holder does: the uid may not enter the directory it lies in.
    with open(tool.path, "rb") as program:
        command = [f"/proc/self/fd/{program.fileno()}", "--unshare-user", "--unshare-all", "--die-with-parent"]
        command += ["--cap-drop", "ALL", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/bin/true"]
        done = run(command, fds=[program.fileno()], drop=True)
    detail = f"{tool.version} at {tool.path}"
    if done.returncode == 0:
        return Finding("bubblewrap", Status.OK, f"{detail}, not setuid, makes a sandbox", needed=True)
    said = first_line(done.stderr) or f"status {done.returncode}"
    ask = "Please let ordinary users run bubblewrap on the compute nodes (user namespaces and mounts in them)."
    return Finding("bubblewrap", Status.MISSING, f"{detail}, but: {said}", ask, needed=True)


def system_python() -> Finding:
    """Whether the sandbox's agent runs on the system's Python, or on a copy."""
    if os.access(_SYSTEM_PYTHON, os.X_OK) and os.path.realpath(_SYSTEM_PYTHON).startswith("/usr/"):
        # A state directory that cannot be made keeps the search from copying anything.
        found = find_interpreter(Path("/proc/stockade-doctor-stages-nothing"))
        version = first_line(run([found.path, "--version"]).stdout)
        return Finding("interpreter", Status.OK, f"{found.path}, {version}")
    detail = f"no {_SYSTEM_PYTHON}: a copy of {os.path.realpath(sys.executable)} is staged in the state directory"
    return Finding("interpreter", Status.LIMITED, detail, "Please install python3 on the compute nodes.")


def _version(name: str, *arguments: str) -> tuple[str, str] | None:
    path = shutil.which(name)
    if path is None:
        return None
    done = run([path, *arguments])
    return path, first_line(done.stdout or done.stderr)


def gvisor() -> Finding:
    """Whether runsc is installed; it is optional."""
    found = _version("runsc", "--version")
    if found is None:
        return Finding("gvisor", Status.MISSING, "no runsc on PATH")
    return Finding("gvisor", Status.LIMITED, f"{found[1]} at {found[0]}; not used by this version")


def apptainer() -> Finding:
    """Whether Apptainer is installed and past its known escapes; it is optional."""
    found = _version("apptainer", "--version") or _version("singularity", "--version")
    if found is None:
        return Finding("apptainer", Status.MISSING, "neither apptainer nor singularity on PATH")
    path, said = found
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    version = tuple(int(part) for part in match.groups()) if match else ()
    if "apptainer" in path and version < _APPTAINER_SAFE:
        ask = f"Please update Apptainer to {'.'.join(map(str, _APPTAINER_SAFE))} or newer (CVE-2025-65105)."
        return Finding("apptainer", Status.LIMITED, f"{said} at {path}", ask)
    return Finding("apptainer", Status.LIMITED, f"{said} at {path}; not used by this version")


def firecracker() -> Finding:
    """Whether Firecracker is installed; it is optional."""
    found = _version("firecracker", "--version")
    if found is None:
        return Finding("firecracker", Status.MISSING, "not on PATH")
    return Finding("firecracker", Status.LIMITED, f"{found[1]} at {found[0]}; not used by this version")


def slurm() -> Finding:
    """Slurm's programs and whether this is inside a job."""
    programs = [name for name in ("sbatch", "srun", "squeue", "scancel") if shutil.which(name)]
    job = os.environ.get("SLURM_JOB_ID", "")
    inside = f"inside job {job}" if job.isdecimal() else "not inside a job"
    if not programs:
        status = Status.LIMITED if job.isdecimal() else Status.MISSING
        return Finding("slurm", status, f"no programs on PATH; {inside}")
    return Finding("slurm", Status.OK, f"{', '.join(programs)}; {inside}")
