"""The learning side's door: start a run, talk to its broker. Imports nothing of custody."""

from __future__ import annotations

from stockade.client._broker import (
    SOCKET_VARIABLE,
    TOKEN_VARIABLE,
    BrokerClient,
    ClosedEpisode,
    CollectedFiles,
    Episode,
    ExecReply,
    Peer,
    SkippedFile,
    UsageReply,
)
from stockade.client._connect import Run, RunOptions, connect
from stockade.client._sync import SyncRollout, SyncRun, connect_sync

__all__ = [
    "SOCKET_VARIABLE",
    "TOKEN_VARIABLE",
    "BrokerClient",
    "ClosedEpisode",
    "CollectedFiles",
    "Episode",
    "ExecReply",
    "Peer",
    "Run",
    "RunOptions",
    "SkippedFile",
    "SyncRollout",
    "SyncRun",
    "UsageReply",
    "connect",
    "connect_sync",
]
