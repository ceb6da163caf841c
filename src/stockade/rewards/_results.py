"""Results of a batch on disk: one JSON row a rollout, each safe once written.

A row is appended with one write and synced before anyone is told of it. After a crash or a lost node a last,
half-written line is cut off, and the batch goes on with what is missing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from stockade.errors import ConfigError, RunError
from stockade.rewards._verdict import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from stockade.gym import Task


class ResultLog:
    """The results file of one batch, open for appending by one process (advisory lock)."""

    def __init__(self, path: str | Path) -> None:
        """Open or create ``path``; raise :class:`ConfigError` naming the line of a row that is not one."""
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot be opened: {error.strerror}", hint="name a file in a folder that you can write to"
            ) from error
        try:
            self._lock()
            self.samples: dict[str, Sample] = self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was appended is safe already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def append(self, sample: Sample) -> None:
        """Write one row and sync it; on a full disk nothing of it stays, and :class:`RunError` is raised."""
        line = msgspec.json.encode(sample) + b"\n"
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise RunError(
                f"{self.path}: a result cannot be written: {error.strerror}", hint="free space and run it again"
            ) from error
        self.samples[sample.task_id] = sample

    def finished(self, tasks: Iterable[Task]) -> set[str]:
        """IDs of those ``tasks`` (same text, same program) that have a verdict on the candidate already.

        Infrastructure faults and stops are not results; a rerun tries them again.
        """
        done = set()
        for task in tasks:
            sample = self.samples.get(task.task_id)
            if sample is not None and sample.verdict.final and sample.task_digest == task.digest:
                done.add(task.task_id)
        return done

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{self.path}: another batch is writing this file", hint="wait for it, or name another file"
            ) from None

    def _read(self) -> dict[str, Sample]:
        with open(self._fd, "rb", closefd=False) as stream:
            stream.seek(0)
            data = stream.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.ftruncate(self._fd, whole)
        found: dict[str, Sample] = {}
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
            try:
                sample = msgspec.json.decode(line, type=Sample)
            except msgspec.MsgspecError as error:
                raise ConfigError(
                    f"not a result row: {error}",
                    path=self.path,
                    line=number,
                    hint="name the results file of a batch, or a new one",
                ) from None
            found[sample.task_id] = sample
        return found
