"""One epoll loop: descriptors, timers, and the promise that no handler can end it.

The loop knows nothing of proxies. A handler is called with the ready events of its descriptor; a timer is
called once. An exception that leaves either goes to the ``on_fault`` given with it, never further: one bad
connection must not stop the others (an OverflowError out of connect() must not end them all: egress case 23).
"""

from __future__ import annotations

import heapq
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
GONE = select.EPOLLHUP | select.EPOLLERR

Handler = Callable[[int], None]
Fault = Callable[[Exception], None]

_MAX_EVENTS = 256


@dataclass(slots=True)
class Timer:
    """One armed call; :meth:`cancel` is cheap, the heap drops it when its time comes."""

    when_s: float
    callback: Callable[[], None] | None
    on_fault: Fault

    def cancel(self) -> None:
        """Never call back; harmless when it already did.

        The heap keeps this object until its time, so it must not keep a closed connection alive with it.
        """
        self.callback = None
        self.on_fault = _ignore


def _ignore(_fault: Exception) -> None:
    """Stand in for the handler of a cancelled timer."""


@dataclass(slots=True)
class Watch:
    """A registered descriptor; ``mask`` is what epoll was last told."""

    fd: int
    handler: Handler
    on_fault: Fault
    mask: int = 0
    live: bool = True
    muted: bool = False


@dataclass(slots=True)
class Loop:
    """A single-threaded event loop over ``select.epoll`` (level-triggered).

    ``now`` is the monotonic time in seconds at the start of the current round; it is what the gate's budgets
    are given, so one round sees one time.
    """

    now: float = field(default_factory=time.monotonic)
    faults: int = 0
    _epoll: select.epoll = field(default_factory=select.epoll)
    _watches: dict[int, Watch] = field(default_factory=dict)
    _timers: list[tuple[float, int, Timer]] = field(default_factory=list)
    _deferred: list[tuple[Callable[[], None], Fault]] = field(default_factory=list)
    _order: int = 0
    _running: bool = False

    def watch(self, fd: int, handler: Handler, on_fault: Fault, mask: int = 0) -> Watch:
        """Register ``fd``; with ``mask`` 0 it is known but reports only hang-up and error."""
        watch = Watch(fd, handler, on_fault, mask)
        self._epoll.register(fd, mask)
        self._watches[fd] = watch
        return watch

    def interest(self, watch: Watch, mask: int) -> None:
        """Set the events that ``watch`` waits for; hang-up and error are always reported (epoll_ctl(2))."""
        if not watch.live or (mask == watch.mask and not watch.muted):
            return
        if watch.muted:
            self._epoll.register(watch.fd, mask)
            watch.muted = False
        else:
            self._epoll.modify(watch.fd, mask)
        watch.mask = mask

    def mute(self, watch: Watch) -> None:
        """Report nothing at all until the next :meth:`interest`.

        A socket closed in both directions reports EPOLLHUP for ever, even while the bytes it still holds
        wait for a slow reader on the other side.
        """
        if watch.live and not watch.muted:
            self._epoll.unregister(watch.fd)
            watch.muted = True
            watch.mask = 0

    def unwatch(self, watch: Watch) -> None:
        """Forget a descriptor; call before closing it. Idempotent."""
        if not watch.live:
            return
        watch.live = False
        del self._watches[watch.fd]
        if not watch.muted:
            self._epoll.unregister(watch.fd)

    def forget(self, watch: Watch) -> None:
        """Forget a descriptor that is closed right after, and shared with nobody: epoll drops it then (epoll(7))."""
        if watch.live:
            watch.live = False
            del self._watches[watch.fd]

    def call_later(self, delay_s: float, callback: Callable[[], None], on_fault: Fault) -> Timer:
        """Call ``callback`` once, ``delay_s`` seconds from now."""
        timer = Timer(self.now + delay_s, callback, on_fault)
        self._order += 1
        heapq.heappush(self._timers, (timer.when_s, self._order, timer))
        return timer

    def defer(self, callback: Callable[[], None], on_fault: Fault) -> None:
        """Call ``callback`` once, when everything of this round is done and before the loop waits again."""
        self._deferred.append((callback, on_fault))

    def stop(self) -> None:
        """Leave :meth:`run` after the current round."""
        self._running = False

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        self._running = True
        poll, watches, now = self._epoll.poll, self._watches, time.monotonic
        while self._running:
            ready = poll(self._wait_s(), _MAX_EVENTS)
            self.now = now()
            # A handler of this round may close a descriptor, and a new one may get its number: so the watches
            # are looked up before the first handler runs, and each is asked whether it still lives.
            for watch, events in [(watches.get(fd), events) for fd, events in ready]:
                if watch is not None and watch.live:
                    try:
                        watch.handler(events)
                    except Exception as fault:  # noqa: BLE001 - the loop outlives every handler
                        self._failed(watch.on_fault, fault)
            self._fire()
            if self._deferred:
                self._settle()
        self._settle()

    def close(self) -> None:
        """Close the epoll descriptor; the watched ones belong to their owners."""
        self._epoll.close()

    def _wait_s(self) -> float:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1
        return max(0.0, self._timers[0][0] - time.monotonic())

    def _fire(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                try:
                    callback()
                except Exception as fault:  # noqa: BLE001 - as above
                    self._failed(timer.on_fault, fault)

    def _settle(self) -> None:
        deferred, self._deferred = self._deferred, []
        for callback, on_fault in deferred:
            try:
                callback()
            except Exception as fault:  # noqa: BLE001 - as above
                self._failed(on_fault, fault)

    def _failed(self, on_fault: Fault, fault: Exception) -> None:
        self.faults += 1
        try:
            on_fault(fault)
        except Exception:  # noqa: BLE001 - a failing clean-up must not end the loop either
            self.faults += 1
