"""The service that some toy tasks need: it knows one number. It runs on the launcher's side, never in the trainer.

The policy of a job names the service's address and port (``services:``), and that is where it listens: a policy
that a person has read is the policy that holds, nothing is rewritten. It answers two paths, ``/v1/rate`` and
``/v1/cost``, so that it is the policy alone which keeps rollouts from the second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address, ip_network
from pathlib import Path
from threading import Thread
from typing import Final

from stockade.errors import JobError, NodeError
from stockade.policy import Policy, Service
from stockade.training._job import Job, ResolvedJob, Settings

PATHS: Final = ("/v1/rate", "/v1/cost")
LOOPBACK: Final = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
COST: Final = 1_000_003
SOCKET_TIMEOUT_S: Final = 10
RATE_SPAN: Final = 80
SMALLEST_RATE: Final = 11


def rate_for(seed: int) -> int:
    """Return the rate of a job: two digits, no operand of any task, the same for the same seed."""
    return SMALLEST_RATE + seed * 37 % RATE_SPAN


def resolve_job(job: Job, policy: Policy) -> ResolvedJob:
    """Return what the training process is told, from a job and the policy that it names.

    Raises:
        JobError: the policy has no such service, the service is not on this machine, or right programs may not ask it.
    """
    service = service_of(job, policy)
    return ResolvedJob(
        **{name: getattr(job, name) for name in Settings.model_fields if name != "output"},
        output=str(Path(job.output).absolute()),
        service_url=f"http://{service.host}:{service.port}",
        rate=rate_for(job.grpo.seed),
    )


def service_of(job: Job, policy: Policy) -> Service:
    """Return the policy's entry for the service that the tasks of ``job`` need; raises as :func:`resolve_job`."""
    known = {service.name: service for service in policy.services}
    service = known.get(job.tasks.service)
    if service is None:
        raise JobError(
            f"has no service {job.tasks.service!r}, which the job's tasks need",
            path=job.policy,
            key="services",
            hint=f"it has: {', '.join(sorted(known)) or 'none'}",
        )
    problem = None
    if not _is_loopback(service.address):
        problem = f"{service.address} is not this machine, where the toy service runs", "write 127.0.0.1"
    elif "GET" not in service.methods or not any(glob.matches(PATHS[0]) for glob in service.paths):
        problem = f"does not allow GET {PATHS[0]}, so that no service task can be solved", f"add {PATHS[0]} to paths"
    if problem is not None:
        raise JobError(
            problem[0], path=job.policy, line=service.source_line, key=f"services ({service.name})", hint=problem[1]
        )
    return service


def _is_loopback(address: str) -> bool:
    here = ip_address(address)
    return any(here in network for network in LOOPBACK if network.version == here.version)


@contextmanager
def serve_rates(address: str, port: int, rate: int) -> Iterator[int]:
    """Run the service on a thread of the calling process; the value is its port (useful when ``port`` is 0).

    Raises:
        NodeError: the address is taken.
    """
    answers = {path: json.dumps({"value": value}).encode() for path, value in zip(PATHS, (rate, COST), strict=True)}

    class Handler(_Quiet):
        table = answers

    try:
        server = ThreadingHTTPServer((address, port), Handler)
    except OSError as error:
        raise NodeError(
            f"the service cannot listen on {address}:{port}: {error.strerror}",
            hint="end what uses the port, or give the service another one in the policy",
        ) from None
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, name="rates-service", kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Quiet(BaseHTTPRequestHandler):
    table: dict[str, bytes]
    timeout = SOCKET_TIMEOUT_S
    server_version = "rates"
    sys_version = ""

    def do_GET(self) -> None:
        body = self.table.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing: the record has every request, with the rollout it came from."""
