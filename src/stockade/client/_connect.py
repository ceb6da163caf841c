"""Starting a run from Python: a node agent of its own, and the handle to it.

::

    async with stockade.connect(policy="policy.yaml") as run:
        async with run.rollout(task_id="hello") as rollout:
            reply = await rollout.exec(["python3", "-c", "print(6 * 7)"])

The agent is a process of its own: a busy trainer never stalls the proxy, and a dead trainer never leaves a
sandbox. Leaving the block ends every rollout, seals the record and waits for the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stockade import errors
from stockade.client._broker import BrokerClient, Episode, Role
from stockade.errors import AgentGone, StockadeError

_START_S = 60.0
_SEAL_S = 30.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to start a run; paths may be relative to the working directory.

    ``learn``: nothing leaves that the policy does not allow, but what rollouts ask for is met and recorded.
    ``metrics``: an address and port of loopback (any, with ``unsafe_metrics_anywhere``) for a Prometheus server to read.
    """

    policy: Path
    runs: Path = Path("runs")
    run_id: str | None = None
    operator: Path | None = None
    max_episodes: int = 256
    metadata: Mapping[str, str] | None = None
    learn: bool = False
    metrics: str | None = None
    unsafe_metrics_anywhere: bool = False

    def spec(self) -> dict[str, object]:
        """Return what the agent is told."""
        return {
            "policy": str(self.policy.absolute()),
            "runs": str(self.runs.absolute()),
            "run_id": self.run_id,
            "operator": None if self.operator is None else str(self.operator.absolute()),
            "max_episodes": self.max_episodes,
            "metadata": dict(self.metadata or {}),
            "learn": self.learn,
            "metrics": self.metrics,
            "unsafe_metrics_anywhere": self.unsafe_metrics_anywhere,
            "owner_pid": os.getpid(),
        }


class Run:
    """A live run. ``run_id`` and ``directory`` name its record."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._client: BrokerClient | None = None
        self._told: Mapping[str, Any] = {}

    @property
    def run_id(self) -> str:
        """The run's ID."""
        return str(self._told["run_id"])

    @property
    def directory(self) -> Path:
        """The run's directory, with its manifest and its record."""
        return Path(self._told["run_dir"])

    @property
    def store(self) -> Mapping[str, str] | None:
        """Where answers are recorded or come from (``mode``, ``path``, ``recording``); None in the other modes."""
        store: Mapping[str, str] | None = self._told.get("store")
        return store

    @property
    def client(self) -> BrokerClient:
        """The broker's client."""
        if self._client is None:
            raise AgentGone("the run is not open", hint="use: async with stockade.connect(...) as run")
        return self._client

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which another process of yours finds this run's broker."""
        return {"STOCKADE_BROKER_SOCKET": str(self._told["socket"]), "STOCKADE_BROKER_TOKEN": str(self._told["token"])}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the agent and wait until it serves. Raises the agent's own error if it cannot."""
        spec_read, spec_write = os.pipe()
        read, write = os.pipe()
        try:
            _write_all(spec_write, json.dumps(self._options.spec()).encode())  # far below what a pipe holds
            self._process = await asyncio.create_subprocess_exec(
                # -P: with -m, Python would import from the working directory first, where collected files may lie.
                *(sys.executable, "-P", "-m", "stockade.agent", "--ready-fd", str(write)),
                stdin=spec_read,
                pass_fds=(write,),
                start_new_session=True,  # Ctrl-C reaches the agent through close(), after the rollouts
            )
        finally:
            os.close(spec_read)
            os.close(write)
        try:
            said = await asyncio.wait_for(asyncio.to_thread(_read_all, read), _START_S)
        except TimeoutError as error:
            self._process.kill()
            raise AgentGone(
                f"the node agent did not start within {_START_S:g} s", hint="see: stockade doctor"
            ) from error
        except asyncio.CancelledError:
            await self.close()  # an agent to which nobody has a handle must not go on
            raise
        if not said:
            await self._end(self._process)
            raise AgentGone(
                "the node agent ended before it served", hint="its message stands above; see: stockade doctor"
            )
        self._told = json.loads(said)
        if "error" in self._told:
            await self._end(self._process)
            raise _rebuilt(self._told)
        self._client = BrokerClient(
            self.environment["STOCKADE_BROKER_SOCKET"], self.environment["STOCKADE_BROKER_TOKEN"]
        )

    async def close(self) -> None:
        """End every rollout, seal the record, wait for the agent; idempotent."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the agent has ended; one that does not is killed, and that is an error."""
        try:
            await asyncio.wait_for(process.wait(), _SEAL_S)
        except TimeoutError as error:
            process.kill()
            await process.wait()
            hint = "the record is not sealed"
            raise AgentGone(f"the node agent did not end within {_SEAL_S:g} s", hint=hint) from error

    def rollout(
        self,
        *,
        role: Role = "rollout",
        task_id: str | None = None,
        group_id: str | None = None,
        train_step: int | None = None,
        attempt: int | None = None,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> _Opening:
        """Return an async context manager whose value is a fresh :class:`Episode`."""
        return _Opening(
            self,
            {
                "role": role,
                "task_id": task_id,
                "group_id": group_id,
                "train_step": train_step,
                "attempt": attempt,
                "env": env,
                "files": files,
            },
        )


class _Opening:
    """A rollout that begins with the block and ends with it."""

    def __init__(self, run: Run, wish: dict[str, Any]) -> None:
        self._run = run
        self._wish = wish
        self._episode: Episode | None = None

    async def __aenter__(self) -> Episode:
        self._episode = await self._run.client.create(**self._wish)
        return self._episode

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._episode is not None:
            await self._episode.__aexit__(kind, error, trace)


def connect(
    policy: str | Path,
    *,
    runs: str | Path = "runs",
    run_id: str | None = None,
    operator: str | Path | None = None,
    max_episodes: int = 256,
) -> Run:
    """Return a run to be opened with ``async with``; nothing is started before that."""
    return Run(
        RunOptions(
            policy=Path(policy),
            runs=Path(runs),
            run_id=run_id,
            operator=None if operator is None else Path(operator),
            max_episodes=max_episodes,
        )
    )


def _write_all(fd: int, data: bytes) -> None:
    with open(fd, "wb") as file:
        file.write(data)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def _rebuilt(told: Mapping[str, Any]) -> StockadeError:
    """The agent's error as one of ours; its message already names file, line and key."""
    kind = getattr(errors, str(told.get("kind")), StockadeError)
    if not (isinstance(kind, type) and issubclass(kind, StockadeError)) or issubclass(kind, errors.BrokerError):
        kind = StockadeError
    return kind(str(told["error"]), hint=told.get("hint"))
