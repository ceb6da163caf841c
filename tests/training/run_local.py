"""Runs a job in this process with the local doors: ``run_local.py JOB.json [FAULTS]``.

FAULTS is a comma-separated list of ``STEP:GROUP:ATTEMPT:FAULT``. Prints the progress lines, then a line with counts.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from stockade.training import ResolvedJob, require_engine, serve_rates
from stockade.training._process import _set_environment, forbid_processes
from stockade.training._progress import Progress
from tests.training.doubles import LocalClient


def main() -> int:
    job = ResolvedJob.model_validate_json(Path(sys.argv[1]).read_bytes())
    faults = dict((line.rsplit(":", 1) for line in sys.argv[2].split(",")) if len(sys.argv) > 2 else ())
    seen = []

    def fault(fields: dict[str, object]) -> str | None:
        group = str(fields.get("group_id")).rpartition(".")[2]
        key = f"{fields.get('train_step')}:{group}:{fields.get('attempt')}"
        if key in faults:
            seen.append(key)
        return faults.get(key)

    require_engine()
    _set_environment(job)
    with tempfile.TemporaryDirectory() as folder, serve_rates("127.0.0.1", 0, job.rate) as port:
        socket = f"{folder}/daemon"
        daemon = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("local_daemon.py")), socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert daemon.stdout is not None
        assert daemon.stdin is not None
        daemon.stdout.readline()
        try:
            job = job.model_copy(update={"service_url": f"http://127.0.0.1:{port}"})
            campaign = importlib.import_module("stockade.training._campaign")
            importlib.import_module("stockade.training._quiet").silence()
            forbid_processes()
            client = LocalClient(socket, fault)
            campaign.run_job(job, lambda: client, Progress(sys.stdout))
        finally:
            daemon.stdin.close()
            daemon.wait(10)
    Progress(sys.stdout).say("counts", **client.counts, faults=seen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
