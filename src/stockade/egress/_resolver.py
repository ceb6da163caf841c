"""A stub resolver inside the epoll loop.

The C library's resolver is not used: ``getaddrinfo`` reads a hosts file and a search list, takes ``127.1`` and
full-width digits, and stops at an embedded NUL (egress cases 3, 9, 16, 40). Here a name is absolute, messages are
built and read by :mod:`stockade.egress._message`, and both families are asked, because every address is judged (cases
27, 28).

One UDP socket per question, connected, so the kernel draws a random source port and drops what comes from elsewhere; a
random id and random case; an answer must repeat the question (RFC 5452). Truncated answers are asked again over TCP
(RFC 7766). A CNAME chain is taken from the answer and judged by where it ends (case 29).

An answer may be used again for its TTL, and equal look-ups that run at the same time are one. Case 26 does not mind:
what it forbids is a second resolution between the check and the dial. A cached answer is one resolution too: its
addresses are judged anew at every use, by the rules of that rollout and the host's addresses of that moment, and the
judged addresses are the ones dialled. A name server that changes its mind says so with a TTL of 0, and such an answer is
never kept; while one is kept, the change cannot be seen, so it cannot do harm either.

What is shared is what all rollouts of the worker may ask for. Whether a name was asked for in the last minutes can be
told by the time that an answer takes, as with every shared resolver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from stockade.egress._loop import Loop
from stockade.egress._message import TYPE_A, TYPE_AAAA, wire_name
from stockade.egress._question import Outcome, Question, Server
from stockade.egress.gate import Address

TOTAL_S = 5.0
"""A look-up takes no longer than this, whatever the servers do."""
KEPT_S = 300.0
"""An answer is kept for its TTL, and no longer than this."""
MAX_KEPT = 1024
"""Names with a kept answer; the oldest one makes room."""
_OTHER_FAMILY_S = 2.0
"""How long an answered family waits for the other one: some servers never answer AAAA."""
_TYPES = (TYPE_A, TYPE_AAAA)
_BY_WEIGHT = (Outcome.TIMED_OUT, Outcome.SERVER_FAILED, Outcome.NO_NAME)


@dataclass(frozen=True, slots=True)
class Answer:
    """``addresses`` holds IPv4 first, in the order of the answer; empty unless ``outcome`` is FOUND."""

    outcome: Outcome
    addresses: tuple[Address, ...] = ()


@dataclass(slots=True)
class Resolver:
    """Looks names up at ``servers``. Counts: ``queries`` sent, look-ups ``joined`` to one under way, cache ``hits``."""

    loop: Loop
    servers: Sequence[Server] = ()
    queries: int = 0
    joined: int = 0
    hits: int = 0
    _kept: dict[str, tuple[Answer, float]] = field(default_factory=dict)
    _flights: dict[str, _Flight] = field(default_factory=dict)
    _plain: set[Server] = field(default_factory=set)

    def cached(self, name: str) -> Answer | None:
        """Return the answer that is kept for ``name``, if one is; it is always FOUND, and must be judged again.

        That a name or its addresses do not exist is not kept: the next look-up may be the one after its making.
        """
        kept = self._kept.get(name)
        if kept is None:
            return None
        answer, until_s = kept
        if until_s <= self.loop.now:
            del self._kept[name]
            return None
        self.hits += 1
        return answer

    def resolve(self, name: str, done: Callable[[Answer], None]) -> Lookup:
        """Ask for A and AAAA of ``name`` (canonical, no trailing dot); call ``done`` once, later.

        Asks whatever :meth:`cached` may hold; ``ValueError`` for what is no name.
        """
        flight = self._flights.get(name)
        if flight is not None:
            self.joined += 1
            return Lookup(flight, done)
        flight = _Flight(self.loop, name, self.servers, self._plain, self._landed)
        lookup = Lookup(flight, done)
        self._flights[name] = flight
        flight.start()
        return lookup

    def _landed(self, flight: _Flight, answer: Answer | None) -> None:
        """Forget a look-up that is over, and keep its ``answer`` for as long as it holds."""
        self._flights.pop(flight.name, None)
        self.queries += flight.tries
        if answer is None or not answer.addresses or flight.ttl_s <= 0:
            return
        self._kept.pop(flight.name, None)
        if len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[flight.name] = (answer, self.loop.now + min(flight.ttl_s, KEPT_S))


class Lookup:
    """One caller's part in a running look-up; :meth:`cancel` ends it without a call."""

    __slots__ = ("_done", "_flight")

    def __init__(self, flight: _Flight, done: Callable[[Answer], None]) -> None:
        self._flight = flight
        self._done: Callable[[Answer], None] | None = done
        flight.callers.append(self)

    def cancel(self) -> None:
        """See to it that ``done`` will not be called; when its last caller cancels, the look-up ends. Idempotent."""
        if self._done is not None:
            self._done = None
            self._flight.left(self)

    def deliver(self, answer: Answer) -> None:
        """Call ``done``, unless it was called or cancelled before."""
        done, self._done = self._done, None
        if done is not None:
            done(answer)


class _Flight:
    """Two questions about one name, and everyone who waits for them. ``landed(self, answer)`` is called at the end."""

    __slots__ = ("_landed", "_loop", "_over", "_questions", "_starting", "callers", "name")

    def __init__(
        self,
        loop: Loop,
        name: str,
        servers: Sequence[Server],
        plain: set[Server],
        landed: Callable[[_Flight, Answer | None], None],
    ) -> None:
        wire, deadline_s = wire_name(name), loop.now + TOTAL_S
        self._loop = loop
        self.name = name
        self._landed = landed
        self.callers: list[Lookup] = []
        self._questions = [Question(loop, servers, plain, wire, rrtype, deadline_s, self._settled) for rrtype in _TYPES]
        self._starting = True
        self._over = False

    @property
    def tries(self) -> int:
        """How many queries were sent."""
        return sum(question.tries for question in self._questions)

    @property
    def ttl_s(self) -> int:
        """For how long all addresses hold, in seconds."""
        return min((question.ttl_s for question in self._questions if question.addresses), default=0)

    def start(self) -> None:
        """Send both questions."""
        for question in self._questions:
            question.ask()
        self._starting = False

    def left(self, lookup: Lookup) -> None:
        """Take a caller off the list; nobody asks for nobody."""
        if not self._over:
            self.callers.remove(lookup)
            if not self.callers:
                self._end(None)

    def _settled(self) -> None:
        """One question has its answer."""
        waiting = [question for question in self._questions if question.outcome is None]
        if not waiting:
            if self._starting:  # nothing could be sent; whoever asks is called later, not from within its call
                self._loop.call_later(0, self._finish, self._fault)
            else:
                self._finish()
        elif any(question.addresses for question in self._questions):
            for question in waiting:
                question.hurry(self._loop.now + _OTHER_FAMILY_S)

    def _finish(self) -> None:
        if self._over:
            return
        addresses = tuple(address for question in self._questions for address in question.addresses)
        outcomes = {question.outcome for question in self._questions}
        worst = next((outcome for outcome in _BY_WEIGHT if outcome in outcomes), Outcome.NO_ADDRESS)
        answer = Answer(Outcome.FOUND, addresses) if addresses else Answer(worst)
        self._end(answer)
        first, *others = self.callers
        for lookup in others:  # each on its own: what goes wrong at one is not for the others
            self._loop.call_later(0, partial(lookup.deliver, answer), self._fault)
        first.deliver(answer)

    def _end(self, answer: Answer | None) -> None:
        self._over = True
        for question in self._questions:
            question.close()
        self._landed(self, answer)

    def _fault(self, _fault: Exception) -> None:
        """The loop has counted it; there is nobody else to tell."""
