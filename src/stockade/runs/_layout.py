"""The directory of a run: made whole or not at all, and opened only if this version understands it.

::

    <root>/<run_id>/
      manifest.yaml                               what the run was started with; written once
      events/<node>/<rollout>.<producer>.jsonl    the record (stockade.events)
      blobs/                                      content-addressed outputs
      STOP                                        its presence stops the run, for good
      report.html, report.json

It may lie on a shared filesystem. Every file has one writer; STOP may be made by anybody who may write here, with
``touch`` if need be.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from stockade.errors import RunError
from stockade.events import (
    EVENTS_DIR,
    MANIFEST,
    Producer,
    chain_name,
    clip,
    is_node_name,
    is_run_sealed,
    iter_events,
)
from stockade.ids import RUN_SCOPE, RolloutId, RunId, parse_run_id
from stockade.runs._files import read_regular
from stockade.runs._manifest import dump_manifest, load_manifest

LAYOUT_VERSION = 1
"""The ``layout`` of manifests that this version writes and reads."""

STOP = "STOP"
_NEEDED_BYTES = 32 << 20
_NEEDED_INODES = 64
_MANIFEST_LIMIT_BYTES = 4 << 20
_STOP_LIMIT_BYTES = 16 << 10
_REASON_BYTES = 1024
_PERSON_BYTES = 256
_NOT_IN_NODE_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class StopRequest(NamedTuple):
    """Why a run has to stop, and who wants it; ``person`` is ``None`` if the file does not say."""

    reason: str
    person: str | None


class RunDirectory:
    """One run's directory. Made by :meth:`create`, found again by :meth:`open`; both raise :class:`RunError`.

    ``node`` is the name under which this process writes its part of the record, or ``None`` for a reader.
    """

    def __init__(
        self, path: Path, run_id: RunId, manifest: Mapping[str, object], manifest_digest: str, node: str | None
    ) -> None:
        self.path = path
        self.run_id = run_id
        self.manifest = manifest
        self.manifest_digest = manifest_digest
        self.node = node

    @classmethod
    def create(
        cls,
        root: Path,
        run_id: RunId,
        manifest: Mapping[str, object],
        *,
        node: str | None = None,
        needed_bytes: int = _NEEDED_BYTES,
    ) -> RunDirectory:
        """Make the directory of a new run below ``root``, with its manifest.

        The directory is filled under another name and then renamed, so it is there whole or not at all, and of two
        runs with one ID exactly one succeeds. ``node`` defaults to the host's name. Refused if fewer than
        ``needed_bytes`` are free: a run that cannot write its record only fails later, with less to say.
        """
        name = _node_name(os.uname().nodename if node is None else node)
        whole = {"layout": LAYOUT_VERSION, "run_id": str(run_id), "created": _now(), **manifest}
        if whole["layout"] != LAYOUT_VERSION or whole["run_id"] != run_id:
            raise RunError("a manifest cannot set 'layout' or 'run_id'")
        data = dump_manifest(whole)
        path = root / parse_run_id(run_id)
        draft: Path | None = None
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_room(root, needed_bytes)
            if path.exists():
                raise _exists(path)
            draft = Path(tempfile.mkdtemp(prefix=f".{run_id}-", dir=root))
            _fill(draft, name, data)
            _publish(draft, path)
        except OSError as error:
            raise RunError(f"cannot make {path}: {error.strerror}", hint=_hint_for(error)) from error
        finally:
            if draft is not None:
                shutil.rmtree(draft, ignore_errors=True)
        return cls(path.absolute(), run_id, whole, _digest(data), name)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory of an existing run, to read it or to stop it."""
        data = _read_manifest(path)
        manifest = load_manifest(data, path / MANIFEST)
        layout = manifest.get("layout")
        if layout != LAYOUT_VERSION:
            raise RunError(
                f"{path}: layout {layout!r} is not the layout {LAYOUT_VERSION} of this version of stockade",
                hint="read it with the version of stockade that wrote it; its manifest.yaml names that",
            )
        run_id = str(manifest.get("run_id"))
        if run_id != path.resolve().name:
            raise RunError(f"{path} holds run {run_id}", hint=f"rename the directory back to {run_id}")
        return cls(path.absolute(), parse_run_id(run_id), manifest, _digest(data), None)

    # ------------------------------------------------------------------------------------- the record

    def claim_node(self, node: str) -> str:
        """Take a place for another agent of this run, and return its name: ``node``, or ``node.2`` and so on.

        One name has one writer, so an agent that starts again never touches what its predecessor wrote.
        """
        wanted = _node_name(node)
        for name in (wanted, *(f"{wanted}.{number}" for number in range(2, 1000))):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path / EVENTS_DIR / name, 0o700)
                self.node = name
                return name
        raise RunError(f"{self.path}: no name is left for node {wanted}")

    def record_path(self, rollout: RolloutId, producer: Producer) -> Path:
        """Return where this node's chain of ``producer`` for ``rollout`` lies."""
        if self.node is None:
            raise RunError(f"{self.path} was opened for reading: no node writes to it here")
        return self.path / EVENTS_DIR / self.node / chain_name(rollout, producer)

    def open_record(self, rollout: RolloutId, producer: Producer) -> int:
        """Make a new, empty record file and return its descriptor (append only, close-on-exec).

        Raises :class:`RunError` if it exists: a chain has one writer.
        """
        path = self.record_path(rollout, producer)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return os.open(path.name, flags, 0o600, dir_fd=directory)
            finally:
                os.close(directory)
        except FileExistsError as error:
            raise RunError(f"{rollout} has a record by {producer} already") from error
        except OSError as error:
            raise RunError(f"cannot make a record file: {path}: {error.strerror}", hint=_hint_for(error)) from error

    def sealed(self) -> bool:
        """Return whether the run is over and its record closed."""
        return is_run_sealed(self.path)

    # --------------------------------------------------------------------------------------- stopping

    def request_stop(self, reason: str, person: str) -> StopRequest:
        """Stop the run, for good. Returns the request that holds: the first one, if there was one before.

        Raises :class:`RunError` only if the file cannot be made at all: its presence is what stops, so a full disk
        may cost the reason but not the stop.
        """
        request = StopRequest(clip(reason, _REASON_BYTES).text, clip(person, _PERSON_BYTES).text)
        try:
            fd = os.open(self.path / STOP, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return self.stop_requested() or request
        except OSError as error:
            raise RunError(
                f"cannot write {self.path / STOP}: {error.strerror}", hint="end the run's agent with SIGTERM instead"
            ) from error
        try:
            with contextlib.suppress(OSError):
                os.write(fd, msgspec.json.encode({"time": _now(), **request._asdict()}) + b"\n")
        finally:
            os.close(fd)
        return request

    def stop_requested(self) -> StopRequest | None:
        """Return the request to stop, if there is one. Anything called STOP counts, whatever it is or says.

        Raises ``OSError`` if that cannot be found out, also if the whole directory is gone; who cannot ask must stop.
        """
        try:
            os.lstat(self.path / STOP)
        except FileNotFoundError:
            os.lstat(self.path)
            return None
        return _read_stop(self.path / STOP)

    def stop_confirmed(self) -> bool:
        """Return whether every node of the run has recorded that all its processes were killed."""
        with os.scandir(self.path / EVENTS_DIR) as entries:
            nodes = sum(entry.is_dir(follow_symlinks=False) for entry in entries)
        kills = sum(1 for _ in iter_events(self.path, rollout=RUN_SCOPE, kinds={"control.kill"}))
        return nodes > 0 and kills >= nodes


def runs_in(root: Path) -> Iterator[Path]:
    """Yield the run directories below ``root`` in the order of their names; none if there is no such directory."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(root)):
            if not name.startswith(".") and (root / name / MANIFEST).is_file():
                yield root / name


def _fill(draft: Path, node: str, manifest: bytes) -> None:
    (draft / EVENTS_DIR / node).mkdir(mode=0o700, parents=True)
    os.chmod(draft / EVENTS_DIR, 0o700)
    (draft / "blobs").mkdir(mode=0o700)
    fd = os.open(draft / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())


def _publish(draft: Path, path: Path) -> None:
    try:
        os.rename(draft, path)
    except OSError as error:
        # Renaming onto a directory that is not empty fails, and a run's directory never is.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _exists(path) from error
        raise


def _require_room(root: Path, needed_bytes: int) -> None:
    room = os.statvfs(root)
    free_bytes = room.f_bavail * room.f_frsize
    if free_bytes < needed_bytes:
        raise RunError(
            f"{root}: only {free_bytes >> 20} MiB are free, a run needs {needed_bytes >> 20} MiB", hint=_FULL_HINT
        )
    # Filesystems without a fixed number of inodes report none at all.
    if room.f_files and room.f_favail < _NEEDED_INODES:
        raise RunError(f"{root}: only {room.f_favail} more files fit", hint=_FULL_HINT)


_FULL_HINT = "free space there, or name another directory for runs"


def _hint_for(error: OSError) -> str | None:
    return _FULL_HINT if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES) else None


def _exists(path: Path) -> RunError:
    return RunError(f"run {path.name} exists already: {path}", hint="choose another run ID; a record is never reused")


def _read_manifest(path: Path) -> bytes:
    try:
        data = read_regular(path / MANIFEST, _MANIFEST_LIMIT_BYTES + 1)
    except OSError as error:
        raise RunError(
            f"{path} is no run directory: {MANIFEST}: {error.strerror}", hint="name runs/<run id>"
        ) from error
    if len(data) > _MANIFEST_LIMIT_BYTES:
        raise RunError(f"{path / MANIFEST} is too long to be a manifest")
    return data


def _read_stop(path: Path) -> StopRequest:
    """Return what a STOP file says, as far as it says anything."""
    try:
        data = read_regular(path, _STOP_LIMIT_BYTES)
    except OSError:
        return StopRequest("a STOP file that cannot be read", None)
    try:
        said = msgspec.json.decode(data, type=dict[str, str])
    except ValueError:
        said = {"reason": clip(data.strip(), _REASON_BYTES).text}
    person = said.get("person")
    return StopRequest(
        _printable(said.get("reason", ""), _REASON_BYTES) or "a STOP file without a reason",
        None if person is None else _printable(person, _PERSON_BYTES),
    )


def _printable(text: str, limit_bytes: int) -> str:
    """Return ``text`` as it is if it is harmless already, which our own is, else escaped."""
    fits = len(text) <= 4 * limit_bytes and text.isascii() and text.isprintable()
    return text if fits else clip(text, limit_bytes).text


def _node_name(text: str) -> str:
    name = _NOT_IN_NODE_NAMES.sub("-", text).strip("-._")[:64] or "node"
    if not is_node_name(name):
        raise RunError(f"{text!r} cannot name a node")
    return name


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
