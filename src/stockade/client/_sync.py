"""The same API without ``async``, for scripts and notebooks: one loop in one thread, each call waits.

::

    with stockade.connect_sync("policy.yaml") as run, run.rollout(task_id="hello") as rollout:
        print(rollout.exec(["python3", "-c", "print(6 * 7)"]).stdout)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from stockade.client._broker import ClosedEpisode, CollectedFiles, Episode, ExecReply
from stockade.client._connect import Run, connect

_T = TypeVar("_T")


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stockade", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C while waiting: what was asked for must not go on unseen
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncRollout:
    """An :class:`Episode` whose methods wait."""

    def __init__(self, loop: _Loop, run: Run, wish: dict[str, Any]) -> None:
        self._loop = loop
        self._run = run
        self._wish = wish
        self._episode: Episode | None = None

    def __enter__(self) -> Self:
        self._episode = self._loop.wait(self._run.client.create(**self._wish))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.wait(self.episode.__aexit__(kind, error, trace))

    @property
    def episode(self) -> Episode:
        """The async episode below."""
        if self._episode is None:
            raise RuntimeError("the rollout is not open; use it in a with block")
        return self._episode

    @property
    def id(self) -> str:
        """The rollout's ID."""
        return self.episode.id

    def exec(self, argv: Sequence[str] | None = None, **options: Any) -> ExecReply:
        """Run a command; the options are those of :meth:`Episode.exec`."""
        return self._loop.wait(self.episode.exec(argv, **options))

    def read_file(self, path: str) -> bytes:
        """Return a regular file's content."""
        return self._loop.wait(self.episode.read_file(path))

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file."""
        self._loop.wait(self.episode.write_file(path, data))

    def put_dir(self, path: str, files: Mapping[str, bytes]) -> None:
        """Write several files."""
        self._loop.wait(self.episode.put_dir(path, files))

    def get_dir(self, path: str) -> CollectedFiles:
        """Collect the regular files below ``path``."""
        return self._loop.wait(self.episode.get_dir(path))

    def close(self) -> ClosedEpisode:
        """End the rollout."""
        return self._loop.wait(self.episode.close())


class SyncRun:
    """A :class:`Run` whose methods wait."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._loop: _Loop | None = None

    def __enter__(self) -> Self:
        self._loop = _Loop()
        try:
            self._loop.wait(self._run.start())
        except BaseException:
            self._loop.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = self._open_loop()
        try:
            loop.wait(self._run.close())
        finally:
            loop.stop()
            self._loop = None

    def _open_loop(self) -> _Loop:
        if self._loop is None:
            raise RuntimeError("the run is not open; use it in a with block")
        return self._loop

    @property
    def run_id(self) -> str:
        """The run's ID."""
        return self._run.run_id

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._run.directory

    def rollout(self, **wish: Any) -> SyncRollout:
        """Return a context manager; the options are those of :meth:`Run.rollout`."""
        return SyncRollout(self._open_loop(), self._run, wish)


def connect_sync(policy: str | Path, **options: Any) -> SyncRun:
    """Return a run to be opened with ``with``; the options are those of :func:`stockade.connect`."""
    return SyncRun(connect(policy, **options))
