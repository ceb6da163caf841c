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
    from stockade.egress._pool import EgressPool
    from stockade.egress._slot import Detached, EgressFault, PoolStats
    from stockade.egress._usage import Usage

__all__ = ["Detached", "EgressFault", "EgressPool", "PoolStats", "Usage"]

__getattr__ = lazy(
    __name__,
    {
        "Detached": "stockade.egress._slot",
        "EgressFault": "stockade.egress._slot",
        "EgressPool": "stockade.egress._pool",
        "PoolStats": "stockade.egress._slot",
        "Usage": "stockade.egress._usage",
    },
)
