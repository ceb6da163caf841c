"""A stub resolver inside the epoll loop.

The C library's resolver is not used: ``getaddrinfo`` reads a hosts file and a search list, takes ``127.1`` and
full-width digits, and stops at an embedded NUL (egress cases 3, 9, 16, 40). Here a name is absolute, messages are
built and parsed by dnspython, and both families are asked, because every address is judged (cases 27, 28).

One UDP socket per question, connected, so the kernel draws a random source port and drops what comes from
elsewhere; a random id; an answer must repeat the question (RFC 5452). Truncated answers are asked again over TCP
(RFC 7766). A CNAME chain is taken from the answer and judged by where it ends (case 29). Nothing is cached: the
addresses of one answer are judged and dialled, once (case 26).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import dns.name
import dns.rdata
import dns.rdatatype

from stockade.egress._loop import Loop, Timer
from stockade.egress._question import Outcome, Question, Server
from stockade.egress.gate import Address

TOTAL_S = 5.0
"""A look-up takes no longer than this, whatever the servers do."""
_OTHER_FAMILY_S = 2.0
"""How long an answered family waits for the other one: some servers never answer AAAA."""
_TYPES = (dns.rdatatype.A, dns.rdatatype.AAAA)


@dataclass(frozen=True, slots=True)
class Answer:
    """``addresses`` holds IPv4 first, in the order of the answer; empty unless ``outcome`` is FOUND."""

    outcome: Outcome
    addresses: tuple[Address, ...] = ()


def preload() -> None:
    """Import every record type now: under Landlock a later import would fail with EACCES."""
    dns.rdata.load_all_types(disable_dynamic_load=True)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Resolver:
    """Looks names up at ``servers``, each question at most once at a time per server."""

    loop: Loop
    servers: Sequence[Server] = ()
    queries: int = 0

    def resolve(self, name: str, done: Callable[[Answer], None]) -> Lookup:
        """Ask for A and AAAA of ``name`` (canonical, no trailing dot); call ``done`` once, later."""
        lookup = Lookup(self, name, done)
        lookup.start()
        return lookup


@dataclass(slots=True)
class Lookup:
    """One running look-up; :meth:`cancel` ends it without a call."""

    resolver: Resolver
    name: str
    done: Callable[[Answer], None] | None
    _questions: list[Question] = field(default_factory=list)
    _timer: Timer | None = None

    def start(self) -> None:
        """Arm the total time, and send both questions once the caller has returned to the loop."""
        loop = self.resolver.loop
        self._timer = loop.call_later(TOTAL_S, self._give_up, self._fault)
        loop.call_later(0, self._begin, self._fault)

    def _begin(self) -> None:
        if self.done is None:
            return
        labels = [label.encode("ascii") for label in self.name.split(".")]
        qname = dns.name.Name([*labels, b""])
        self._questions = [
            Question(self.resolver.loop, self.resolver.servers, qname, rdtype, self._settled) for rdtype in _TYPES
        ]
        for question in self._questions:
            question.ask()

    def cancel(self) -> None:
        """Close the sockets; ``done`` will not be called."""
        self.done = None
        if self._timer is not None:
            self._timer.cancel()
        for question in self._questions:
            question.close()

    def _settled(self) -> None:
        """One question has its answer."""
        if all(question.outcome is not None for question in self._questions):
            self._finish()
        elif any(question.addresses for question in self._questions) and self._timer is not None:
            loop = self.resolver.loop
            patience = min(self._timer.when_s - loop.now, _OTHER_FAMILY_S)
            self._timer.cancel()
            self._timer = loop.call_later(patience, self._give_up, self._fault)

    def _give_up(self) -> None:
        for question in self._questions:
            if question.outcome is None:
                question.outcome = Outcome.TIMED_OUT
        self._finish()

    def _fault(self, _fault: Exception) -> None:
        for question in self._questions:
            question.outcome, question.addresses = Outcome.SERVER_FAILED, ()
        self._finish()

    def _finish(self) -> None:
        done, questions = self.done, self._questions
        self.resolver.queries += sum(question.tries for question in questions)
        self.cancel()
        if done is None:
            return
        addresses = tuple(address for question in questions for address in question.addresses)
        if addresses:
            done(Answer(Outcome.FOUND, addresses))
            return
        outcomes = {question.outcome for question in questions}
        worst = (Outcome.TIMED_OUT, Outcome.SERVER_FAILED, Outcome.NO_NAME)
        done(Answer(next((outcome for outcome in worst if outcome in outcomes), Outcome.NO_ADDRESS)))
