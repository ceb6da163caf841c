"""The node agent's egress workers: spawned, watched, restarted without losing a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from stockade.egress import _wire
from stockade.egress._channel import Channel, ChannelLost, Refused, answer_table
from stockade.egress._ledger import LedgerFault, live_accounts, make_ledger
from stockade.egress._roles import Role
from stockade.egress._settings import Equipment, Settings
from stockade.egress._slot import Detached, EgressFault, Held, PoolStats, Slot, host_addresses, summed
from stockade.egress._usage import Usage, context_json, head_from, head_json
from stockade.egress._wire import Message, WireError
from stockade.egress.gate import Rules
from stockade.errors import RecordError
from stockade.events import ChainHead, ChainWriter, Context, Producer, recover_head

CRASHES = 3
CRASH_WINDOW_S = 10.0
_SILENCE_S = 10.0
_WATCH_S = 2.0
_REVOKE_S = 0.8
_SETTLE_S = 20.0


def _ignore(_rollout_id: str, _why: str) -> None:
    """Stand in for a callback that was not given."""


class EgressPool:
    """``workers`` egress workers, and the rollouts spread over them.

    The agent keeps a duplicate of every listener and record descriptor. When a worker dies, its connections die
    with it, its listeners queue new ones, and a fresh worker takes both over: the chain goes on where
    :func:`stockade.events.recover_head` finds its end, and budget and fake addresses go on in the memory that the
    dead worker counted in, so a crash forgets not one byte. ``CRASHES`` crashes within ``CRASH_WINDOW_S`` seconds, or a
    record that cannot be taken up again, end the attempts: ``on_fault(rollout_id, why)`` is called for each rollout
    concerned, which then has no way out any more.

    ``on_broken(rollout_id, why)`` is called when a worker could not write a rollout's record; it denies everything from
    then on. Callbacks run in the event loop and must not block. ``own_addresses`` gives the addresses of this host,
    asked anew at each attach; ``uid`` and ``gid`` are what workers of a root agent become; ``prefix`` is put before the
    worker's command line (to start it in another network namespace).

    Use as an async context manager, or call :meth:`start` and :meth:`aclose`.
    """

    def __init__(
        self,
        *,
        resolvers: Sequence[str] = (),
        settings: Settings | None = None,
        equipment: Equipment | None = None,
        workers: int = 2,
        uid: int | None = None,
        gid: int | None = None,
        own_addresses: Callable[[], Iterable[str]] | None = None,
        prefix: Sequence[str] = (),
        on_broken: Callable[[str, str], None] = _ignore,
        on_fault: Callable[[str, str], None] = _ignore,
    ) -> None:
        if workers < 1:
            raise ValueError("an egress pool needs at least one worker")
        self._settings = settings or Settings(resolvers=tuple(resolvers))
        self._equipment = equipment or Equipment()
        self._uid, self._gid = uid, gid
        self._own_addresses = own_addresses or host_addresses
        self._prefix = tuple(prefix)
        self._on_broken, self._on_fault = on_broken, on_fault
        self._slots = [Slot(place=place) for place in range(workers)]
        self._run_ledger = -1 if self._settings.run_limits is None else make_ledger(accounts=1 + live_accounts(workers))
        self._watchman: asyncio.Task[None] | None = None
        self._closing = False
        self._restarts = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    # ---- life

    async def start(self) -> None:
        """Start all workers; raises :class:`EgressFault` if one cannot be started."""
        try:
            # All of them to their end: one left behind would still be starting when the pool is closed.
            opened = await asyncio.gather(*(self._open(slot) for slot in self._slots), return_exceptions=True)
            for failure in opened:
                if failure is not None:
                    raise failure
        except BaseException:
            await self.aclose()
            raise
        self._watchman = asyncio.get_running_loop().create_task(self._watch(), name="egress watchman")

    async def aclose(self) -> None:
        """End all workers and connections, and close what was kept. Chains stay unsealed. Idempotent."""
        self._closing = True
        tasks = [task for task in (self._watchman, *(slot.supervisor for slot in self._slots)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(slot.channel.aclose() for slot in self._slots if slot.channel is not None))
        for slot in self._slots:
            slot.channel = None
            slot.ready.clear()
            while slot.held:
                slot.held.popitem()[1].close()
        if self._run_ledger >= 0:
            os.close(self._run_ledger)
            self._run_ledger = -1

    # ---- rollouts

    async def attach(
        self,
        rollout_id: str,
        *,
        context: Context,
        rules: Rules,
        listener: int | None = None,
        sockets: Mapping[int, Role] | None = None,
        record: int,
        record_path: Path,
    ) -> None:
        """Give a rollout its way out: whoever connects to one of its sockets is this rollout.

        ``sockets`` are descriptors with their roles; ``listener`` is short for one listening stream socket that speaks
        HTTP and SOCKS5. ``record`` is the file at ``record_path`` opened for appending, empty or with the earlier part
        of this chain. All are duplicated, the caller keeps its own. Raises :class:`EgressFault`, and RecordError if the
        file cannot be gone on with.
        """
        if self._closing:
            raise EgressFault("the egress pool is closed")
        if any(rollout_id in slot.held for slot in self._slots):
            raise EgressFault(f"{rollout_id} is attached already")
        own = dict(sockets or {})
        if listener is not None:
            own[listener] = Role.PROXY
        if not own:
            raise EgressFault(f"{rollout_id} has no socket to be reached by")
        held = Held.keep(rollout_id, context, rules, own, record, record_path)
        try:
            await self._place(held)
        except BaseException:
            held.close()
            raise

    async def detach(self, rollout_id: str, *, seal: bool = True) -> Detached:
        """End a rollout's connections and its way out; return the end of its chain, sealed unless told otherwise.

        The seal carries the totals. Raises :class:`EgressFault` for an unknown rollout, and RecordError if the chain
        broke or cannot be sealed; the rollout is gone in either case.
        """
        slot = self._slot_of(rollout_id)
        async with slot.lock:
            held = slot.held.pop(rollout_id, None)
            if held is None:
                raise EgressFault(f"{rollout_id} is not attached")
            try:
                head = await self._let_go(slot, held)
                return Detached(self._seal(held, head) if seal else head, held.usage)
            finally:
                slot.forget(held)

    async def revoke(self, rollout_id: str) -> int:
        """Cut a rollout off within a second: its connections end, later ones are refused. Returns how many ended."""
        slot = self._slot_of(rollout_id)
        slot.held[rollout_id].revoked = True
        return await self._revoke(slot, rollout_id)

    async def revoke_all(self) -> int:
        """Cut every rollout off within a second; return how many connections ended."""
        for slot in self._slots:
            for held in slot.held.values():
                held.revoked = True
        return sum(await asyncio.gather(*(self._revoke(slot, None) for slot in self._slots)))

    def usage(self, rollout_id: str) -> Usage:
        """Return what a rollout used until now."""
        return self._slot_of(rollout_id).held[rollout_id].usage

    async def stats(self) -> PoolStats:
        """Return what the pool is doing and did; a worker that does not answer stands where it stood before."""
        answers = await asyncio.gather(*(self._ask_stats(slot) for slot in self._slots))
        return summed(self._slots, answers, restarts=self._restarts)

    @property
    def pids(self) -> list[int]:
        """The processes of the workers that serve."""
        return [slot.channel.pid for slot in self._slots if slot.channel is not None and slot.channel.pid is not None]

    # ---- inside

    def _slot_of(self, rollout_id: str) -> Slot:
        for slot in self._slots:
            if rollout_id in slot.held:
                return slot
        raise EgressFault(f"{rollout_id} is not attached")

    async def _open(self, slot: Slot) -> None:
        """Put a first worker into a slot, and somebody who watches it."""
        try:
            await self._launch(slot)
        except (ChannelLost, Refused, OSError) as error:
            raise EgressFault(f"the egress worker does not start: {error}") from error
        slot.supervisor = asyncio.get_running_loop().create_task(self._supervise(slot), name="egress supervisor")

    async def _launch(self, slot: Slot) -> None:
        """Start a worker and hand it all rollouts of the slot."""
        channel = Channel(lambda message: self._news(slot, message))
        try:
            ready = await self._configure(channel, slot)
            slot.channel = channel
            slot.landlock, slot.seccomp = _wire.text(ready, "landlock"), _wire.text(ready, "seccomp")
            for held in list(slot.held.values()):
                try:
                    await self._hand_over(channel, held)
                except (Refused, RecordError, LedgerFault) as error:
                    del slot.held[held.rollout_id]
                    slot.forget(held)
                    self._on_fault(held.rollout_id, str(error))
        except BaseException:
            channel.kill()
            await channel.aclose()
            raise
        slot.ready.set()

    async def _configure(self, channel: Channel, slot: Slot) -> Message:
        """Start the process, and give it what all workers are given."""
        with self._equipment.descriptors(run_ledger=self._run_ledger) as given:
            return await channel.start(
                self._prefix,
                list(given.values()),
                settings=msgspec.json.encode(self._settings).decode("utf-8"),
                parts=list(given),
                place=slot.place,
                places=len(self._slots),
                own_addresses=self._own(),
                uid=self._uid,
                gid=self._gid,
            )

    async def _place(self, held: Held) -> None:
        for _ in range(len(self._slots) + 1):
            slot = min(self._slots, key=lambda one: (not one.ready.is_set(), len(one.held)))
            try:
                async with asyncio.timeout(_SETTLE_S):
                    await slot.ready.wait()
            except TimeoutError:
                break
            async with slot.lock:
                if slot.channel is None or slot.channel.ended.is_set():
                    continue
                try:
                    await self._hand_over(slot.channel, held)
                except ChannelLost:
                    continue
                except Refused as error:
                    raise EgressFault(str(error)) from error
                slot.held[held.rollout_id] = held
                return
        raise EgressFault("no egress worker is running", hint="see the agent's log for why they end")

    async def _hand_over(self, channel: Channel, held: Held) -> None:
        head = recover_head(held.path)
        await channel.ask(
            "attach",
            held.descriptors,
            rollout_id=held.rollout_id,
            context=context_json(held.context),
            chain_start=head_json(head) if head.seq else None,
            roles=[role.value for role, _ in held.sockets],
            revoked=held.revoked,
            own_addresses=self._own(),
        )

    async def _let_go(self, slot: Slot, held: Held) -> ChainHead:
        """Return the unsealed end of the chain: from the worker, or from the file if that worker is gone."""
        channel = slot.channel
        if channel is not None and not channel.ended.is_set():
            try:
                answer = await channel.ask("detach", rollout_id=held.rollout_id)
                if answer.get("broken") is not False:
                    raise RecordError(f"the record of {held.rollout_id} broke")
                head = recover_head(held.path)
                if head != head_from(answer_table(answer, "head")):
                    raise RecordError(f"the record of {held.rollout_id} is not what its worker wrote")
                return head
            except (ChannelLost, Refused, WireError):
                channel.kill()
                await channel.ended.wait()  # only a dead worker writes no more
        return recover_head(held.path)

    def _seal(self, held: Held, head: ChainHead) -> ChainHead:
        usage = held.usage
        writer = ChainWriter(held.record, held.context, Producer.EGRESS, start=head if head.seq else None)
        return writer.seal(
            bytes_out=usage.bytes_out,
            bytes_in=usage.bytes_in,
            requests=usage.requests,
            requests_denied=usage.denied,
        )

    async def _revoke(self, slot: Slot, rollout_id: str | None) -> int:
        channel = slot.channel
        if channel is None:
            return 0
        try:
            answer = await channel.ask("revoke", timeout_s=_REVOKE_S, rollout_id=rollout_id)
        except (ChannelLost, Refused):
            channel.kill()  # it does not obey; its end closes every connection, and its heir starts revoked
            return 0
        closed = answer.get("closed")
        return closed if isinstance(closed, int) else 0

    async def _ask_stats(self, slot: Slot) -> Message:
        if slot.channel is None or slot.channel.ended.is_set():
            return {}
        with contextlib.suppress(ChannelLost, Refused):
            return await slot.channel.ask("stats")
        return {}

    async def _supervise(self, slot: Slot) -> None:
        """Replace the worker of a slot whenever it ends, until it ends too often."""
        while slot.channel is not None:
            await slot.channel.ended.wait()
            slot.ready.clear()
            async with slot.lock:
                try:
                    await self._replace(slot)
                except Exception as error:  # noqa: BLE001 - rollouts without a way out must not look as if they had one
                    self._give_up(slot, f"the egress worker cannot be replaced: {error}")

    async def _replace(self, slot: Slot) -> None:
        clock = asyncio.get_running_loop().time
        while not slot.ready.is_set():
            slot.crashes.append(clock())
            while slot.crashes[0] < clock() - CRASH_WINDOW_S:
                slot.crashes.popleft()
            if len(slot.crashes) >= CRASHES:
                self._give_up(slot, f"the egress worker ended {CRASHES} times within {CRASH_WINDOW_S:g} s")
                return
            with contextlib.suppress(ChannelLost, Refused, WireError, OSError):
                slot.succeed()
                await self._launch(slot)
                self._restarts += 1

    def _give_up(self, slot: Slot, why: str) -> None:
        slot.channel = None
        while slot.held:
            rollout_id, held = slot.held.popitem()
            slot.forget(held)
            self._on_fault(rollout_id, why)

    async def _watch(self) -> None:
        """Kill a worker that gives no sign of life: its loop hangs, and so does every revocation."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_WATCH_S)
            for slot in self._slots:
                if slot.channel is not None and clock() - slot.channel.heard_s > _SILENCE_S:
                    slot.channel.kill()

    def _news(self, slot: Slot, message: Message) -> None:
        try:
            if message.get("event") == "broken":
                rollout_id = _wire.text(message, "rollout_id")
                if rollout_id in slot.held:
                    self._on_broken(rollout_id, "its record cannot be written")
                return
            if _wire.text(message, "event") != "alive":
                raise WireError("unknown news")
        except WireError:
            if slot.channel is not None:
                slot.channel.kill()

    def _own(self) -> list[str]:
        return list(self._own_addresses())
