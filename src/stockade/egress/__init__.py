"""The one way out of a sandbox: a gate that decides and a proxy that moves bytes.

``gate`` is pure: bytes and values in, verdicts out. Around it, a worker process (``python -m stockade.egress``) runs an
HTTP/1.1 forward proxy on ``epoll`` and ``splice``; the node agent holds an :class:`EgressPool` of them and hands each
rollout's listening socket over. Nothing is imported before it is used: a worker never loads asyncio, and an agent
never loads the proxy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade._lazy import lazy

if TYPE_CHECKING:
    from stockade.egress._authority import Authority, make_authority
    from stockade.egress._counts import COUNTED
    from stockade.egress._pool import EgressPool
    from stockade.egress._roles import Role
    from stockade.egress._settings import ChainSettings, Equipment, Settings, StoreSettings
    from stockade.egress._slot import Detached, EgressFault, PoolStats
    from stockade.egress._store_tool import (
        check_store,
        discard_recording,
        list_entries,
        list_recordings,
        prepare_store,
        recount_store,
    )
    from stockade.egress._trust import system_roots, trust_env, trust_files
    from stockade.egress._usage import Usage

__all__ = [
    "COUNTED",
    "Authority",
    "ChainSettings",
    "Detached",
    "EgressFault",
    "EgressPool",
    "Equipment",
    "PoolStats",
    "Role",
    "Settings",
    "StoreSettings",
    "Usage",
    "check_store",
    "discard_recording",
    "list_entries",
    "list_recordings",
    "make_authority",
    "prepare_store",
    "recount_store",
    "system_roots",
    "trust_env",
    "trust_files",
]

__getattr__ = lazy(
    __name__,
    {
        "COUNTED": "stockade.egress._counts",
        "Authority": "stockade.egress._authority",
        "make_authority": "stockade.egress._authority",
        "check_store": "stockade.egress._store_tool",
        "discard_recording": "stockade.egress._store_tool",
        "list_entries": "stockade.egress._store_tool",
        "list_recordings": "stockade.egress._store_tool",
        "prepare_store": "stockade.egress._store_tool",
        "recount_store": "stockade.egress._store_tool",
        "system_roots": "stockade.egress._trust",
        "trust_env": "stockade.egress._trust",
        "trust_files": "stockade.egress._trust",
        "ChainSettings": "stockade.egress._settings",
        "Equipment": "stockade.egress._settings",
        "Role": "stockade.egress._roles",
        "Settings": "stockade.egress._settings",
        "StoreSettings": "stockade.egress._settings",
        "Detached": "stockade.egress._slot",
        "EgressFault": "stockade.egress._slot",
        "EgressPool": "stockade.egress._pool",
        "PoolStats": "stockade.egress._slot",
        "Usage": "stockade.egress._usage",
    },
)
