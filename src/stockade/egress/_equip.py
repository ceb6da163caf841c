"""Making a worker's equipment out of its settings and the descriptors that came along, before it is locked down."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stockade.egress._chain import Chain
from stockade.egress._ledger import Ledger, live_accounts, read_memory
from stockade.egress._mint import Mint, upstream_context
from stockade.egress._question import Server
from stockade.egress._reception import gateway_context, load_pair
from stockade.egress._rollout import Shell
from stockade.egress._settings import MEMORY_PARTS, ChainSettings, Settings
from stockade.egress._store import Store
from stockade.egress._wire import WireError
from stockade.egress.gate import Account, RuleLimits

_NO_MEMORY = ("store", "run")
_PARTS = frozenset({*MEMORY_PARTS, *_NO_MEMORY})
_GATEWAY = frozenset({"gateway_cert", "gateway_key", "gateway_ca"})


@dataclass(slots=True)
class Parts:
    """What came along, as the worker uses it. ``store_fd`` is the only directory that it may reach afterwards."""

    store: Store | None = None
    store_fd: int | None = None
    run_fd: int | None = None
    run: Account | None = None
    memory: Mapping[str, bytes] = field(default_factory=dict)


def equip(shell: Shell, settings: Settings, names: Sequence[str], fds: list[int]) -> Parts:
    """Fill ``shell``, and take the descriptors that stay open out of ``fds``; the others are read and left in it.

    Raises :class:`WireError` for parts that do not fit, ssl.SSLError and ValueError for keys that are none.
    """
    if len(names) != len(fds) or len(set(names)) != len(names) or not _PARTS.issuperset(names):
        raise WireError("configure: descriptors and parts do not fit")
    given = dict(zip(names, fds, strict=True))
    parts = Parts(memory={name: read_memory(fd) for name, fd in given.items() if name not in _NO_MEMORY})
    memory = parts.memory
    shell.resolver.servers = [Server.parse(text) for text in settings.resolvers]
    if "authority_key" in memory:
        shell.mint = Mint(memory["authority_cert"], memory["authority_key"])
    if "roots" in memory:
        shell.upstream_context = upstream_context(memory["roots"])
    if settings.chain is not None:
        shell.chain = Chain(settings.chain, shell.resolver, _chain_context(settings.chain, memory))
    if not _GATEWAY.isdisjoint(memory):
        if not memory.keys() >= _GATEWAY:
            raise WireError("configure: a gateway without certificate, key or the authorities of its clients")
        shell.gateway_context = gateway_context(memory)
    for name in _NO_MEMORY:
        if name in given:
            fds.remove(given[name])
    parts.store_fd, parts.run_fd = given.get("store"), given.get("run")
    if settings.store is not None:
        if parts.store_fd is None:
            raise WireError("configure: a store without its directory")
        parts.store = Store(parts.store_fd, settings.store.max_bytes, recording=settings.store.recording)
    return parts


def run_account(parts: Parts, limits: RuleLimits | None, place: int, places: int) -> Account | None:
    """Return the account that all rollouts of the run share, whichever worker serves them."""
    if limits is None:
        return None
    if parts.run_fd is None:
        raise WireError("configure: limits of the run without their memory")
    ledger = Ledger(parts.run_fd, accounts=1 + live_accounts(places))
    shared = ledger.live(places)
    shared[place] = 0  # whoever had this place before is gone, and its connections with it
    return Account(limits, ledger.account(0), now=time.monotonic(), guard=ledger.lock, live=shared, place=place)


def _chain_context(chain: ChainSettings, memory: Mapping[str, bytes]) -> ssl.SSLContext | None:
    """Return what the operator's proxy is greeted with: TLS 1.3, and a certificate of ours if there is one."""
    if chain.kind != "https":
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=memory.get("chain_ca", memory.get("roots", b"")).decode("ascii"))
    if "chain_cert" in memory:
        load_pair(context, memory["chain_cert"], memory["chain_key"])
    return context
