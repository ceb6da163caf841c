"""One connection of a client: from its first byte to its last, one request after the other.

This module reads heads, answers refusals, writes to the record and keeps the time; what happens between a parsed head
and the last byte of its response is in :mod:`stockade.egress._passage`, and how a client says what it wants is in
:mod:`stockade.egress._opening`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from stockade.egress._decision import Decision
from stockade.egress._loop import GONE, READ, WRITE
from stockade.egress._opening import Entry, Opening
from stockade.egress._passage import Passage
from stockade.egress._states import PHASES, State
from stockade.egress._stream import Stream
from stockade.egress.gate import Origin, Reason, error_response, safe_text, status_of
from stockade.errors import RecordError

if TYPE_CHECKING:
    from stockade.egress._rollout import Rollout
    from stockade.egress._tls_stream import TlsStream

_DRAIN_BYTES = 1 << 20

# Members by name of their own: on an enum's class they are looked up in Python, and these are asked for all the time.
_IDLE, _HEAD, _EXCHANGE, _TUNNEL, _DRAIN, _CLOSED = (
    State.IDLE,
    State.HEAD,
    State.EXCHANGE,
    State.TUNNEL,
    State.DRAIN,
    State.CLOSED,
)

_ORDINARY_ENDS = frozenset(
    {
        Reason.COMPLETED,
        Reason.INSPECTED,
        Reason.CLIENT_CLOSED,
        Reason.CLIENT_TLS,
        Reason.UPSTREAM_CLOSED,
        Reason.UPSTREAM_FAILED,
        Reason.UPSTREAM_TLS,
        Reason.UPSTREAM_MALFORMED,
        Reason.IDLE_TIMEOUT,
        Reason.TOTAL_TIMEOUT,
    }
)
"""Ends that are nobody's breach. Any other reason, also a new one, is written as a denial."""


class Connection:
    """One accepted socket of one rollout; ``counted`` says that it holds a place in the budget.

    ``secured``: it has to show a certificate before it says anything (see :mod:`stockade.egress._reception`).
    """

    __slots__ = (
        "_active_s",
        "_counted",
        "_drained",
        "_entered_s",
        "_finished",
        "_loop",
        "buffer",
        "certified",
        "client",
        "closed",
        "decision",
        "number",
        "opening",
        "origin",
        "passage",
        "rollout",
        "state",
    )

    def __init__(
        self,
        rollout: Rollout,
        sock: socket.socket,
        number: int,
        *,
        entry: Entry | None = None,
        counted: bool,
        secured: bool = False,
    ) -> None:
        self.rollout = rollout
        self._loop = rollout.shell.loop
        self.number = number
        self._counted = counted
        self.client: Stream | TlsStream = Stream(self._loop, sock, self._client_event, self.fault)
        self.buffer = bytearray()
        self.state = _HEAD
        self.closed = False
        self.decision: Decision | None = None
        self.origin: Origin | None = None
        """What later requests of this connection are bound to: set once it was looked into."""
        self.certified = ""
        """What the client's certificate calls it, where it had to show one."""
        self._drained = 0
        self._finished = False
        self._entered_s = self._active_s = self._loop.now
        self.opening = Opening(self, entry, secured=secured)
        self.passage = Passage(self)

    # ---- life

    def begin(self) -> None:
        """Wait for the first head."""
        self.client.want(read=True)
        self.guard(self.opening.begin)

    def refuse(self, reason: Reason) -> None:
        """Turn the whole connection away before reading from it."""
        self.opening.record_blank(reason)
        self.answer(reason, refusal=self.opening.blank_refusal(reason))

    def enter(self, state: State) -> None:
        """Go to ``state``; a step that the table does not have raises."""
        if state not in PHASES[self.state].next:
            raise RuntimeError(f"no step from {self.state} to {state}")
        self.state = state
        self._entered_s = self._active_s = self._loop.now
        if state is not _EXCHANGE and state is not _CLOSED:  # an exchange says itself when it wants more
            self.client.want(read=PHASES[state].reads)

    def touch(self) -> None:
        """Take note that bytes moved."""
        self._active_s = self._loop.now

    def end(self, reason: Reason) -> None:
        """End at once, without an answer: put the reason on record and reset both sides."""
        if self.closed:
            return
        if self.decision is not None and self.decision.request_id is None:
            self._record_denial(reason)
        self.conclude(reason)
        self.close(abort=True)

    def conclude(self, reason: Reason) -> None:
        """Write ``net.end`` for what was allowed; then there is no current decision."""
        decision, self.decision = self.decision, None
        if decision is None or decision.request_id is None:
            return
        if decision.limited >= 0:
            self.rollout.budget.rules[decision.limited].close_connection()
        if self.rollout.broken:
            return
        try:
            self.rollout.journal.end(
                reason,
                decision.end_fields(time.monotonic_ns()),
                denied=reason not in _ORDINARY_ENDS,
            )
            self.rollout.held()
        except RecordError:
            self.rollout.break_record()

    def close(self, *, abort: bool = False) -> None:
        """Close everything. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.state = _CLOSED
        self.passage.drop(abort=abort)
        self.client.close(abort=abort)
        self.rollout.closed(self, counted=self._counted)

    # ---- events of the client's socket

    def _client_event(self, events: int) -> None:
        try:
            if events & WRITE and self.state is not _TUNNEL:
                self.client.flush()
            self._HANDLERS[self.state](self, events)
        except OSError:  # only this socket's own calls raise here; the other sides catch theirs
            self.end(Reason.CLIENT_CLOSED)

    def _on_head(self, events: int) -> None:
        if not events & (READ | GONE):
            return
        piece = self.client.receive()
        if piece is None:
            return
        if not piece:
            self.opening.ended()
            self.close()
            return
        if self.state is _IDLE:
            self.enter(_HEAD)
        if self.buffer:
            self.buffer += piece
        else:
            self.buffer[:] = piece
        self.opening.read()

    def _on_wait(self, events: int) -> None:
        if events & GONE:
            self.end(Reason.CLIENT_CLOSED)

    def _on_relay(self, events: int) -> None:
        self.passage.client_event(events)

    def _on_drain(self, events: int) -> None:
        """Read what the client still sends: closing with unread bytes would reset the answer away."""
        if not self.client.out and not self._finished:
            self._finished = True
            self.client.finish()
        if not events & (READ | GONE):
            return
        piece = self.client.receive()
        if piece is None:
            return
        self._drained += len(piece)
        if not piece or self._drained > _DRAIN_BYTES:
            self.close()

    _HANDLERS: ClassVar[dict[State, Callable[[Connection, int], None]]] = {
        State.IDLE: _on_head,
        State.HEAD: _on_head,
        State.GATHER: _on_relay,
        State.RESOLVE: _on_wait,
        State.DIAL: _on_wait,
        State.FLIGHT: _on_relay,
        State.HANDSHAKE: _on_wait,
        State.TUNNEL: _on_relay,
        State.EXCHANGE: _on_relay,
        State.DRAIN: _on_drain,
    }

    def inside(self, origin: Origin, client: TlsStream | None) -> None:
        """The tunnel ends here: from now on each request in it is decided on its own."""
        self.conclude(Reason.INSPECTED)
        if self.closed:
            return
        if client is not None:
            self.client = client
            client.adopt(self._client_event, self.fault)
        self.origin = origin
        self.enter(_HEAD)
        self.opening.bound()
        if self.buffer:
            self.opening.read()

    def completed(self, *, keep: bool) -> None:
        """One exchange is complete; go on with the next request, or let the client read and go."""
        self.conclude(Reason.COMPLETED)
        if self.closed:
            return
        if not keep:
            self._drain()
        elif self.buffer:
            self.enter(_HEAD)
            self.opening.read()
        else:
            self.enter(_IDLE)

    # ---- saying no

    def deny(self, reason: Reason, detail: str = "", *, status: int | None = None) -> None:
        """Record the refusal of the current request and answer it."""
        self._record_denial(reason, detail)
        self.answer(reason, detail, status=status)

    def fail(self, reason: Reason, detail: str = "") -> None:
        """End what was allowed with an error answer; only before any byte of a response went out."""
        decision = self.decision
        if decision is not None and decision.request_id is None:
            self.deny(reason, detail)  # it was not allowed yet: its body was awaited
            return
        refusal = None if decision is None else self.opening.refusal(decision.head, reason)
        if decision is not None:
            decision.status = status_of(reason)
        body = decision is None or decision.head.request.method != "HEAD"
        self.conclude(reason)
        self.answer(reason, detail, body=body, refusal=refusal)

    def answer(
        self,
        reason: Reason,
        detail: str = "",
        *,
        status: int | None = None,
        body: bool | None = None,
        refusal: bytes | None = None,
    ) -> None:
        """Tell the client why not, in the language that it spoke, and let it read and go."""
        if self.closed:
            return
        decision, self.decision = self.decision, None
        if body is None:
            body = decision is None or decision.head.request.method != "HEAD"
        if refusal is None and decision is not None:
            refusal = self.opening.refusal(decision.head, reason)
        if refusal is None:
            retry_after_s = None
            if reason is Reason.RATE_LIMITED:
                limited = -1 if decision is None else decision.limited
                retry_after_s = self.rollout.budget.retry_after_s(self._loop.now, limited)
            number = status if status is not None else status_of(reason)
            refusal = error_response(number, reason, detail, retry_after_s=retry_after_s, body=body)
        try:
            self.client.send(refusal)
        except OSError:
            self.close()
            return
        self._drain()

    def _drain(self) -> None:
        self.passage.drop()
        self.enter(_DRAIN)
        self._on_drain(0)

    def record_permission(self, decision: Decision) -> bool:
        """Write the permission; return whether it may be acted on (egress case 102)."""
        try:
            decision.request_id = self.rollout.journal.allow(decision.kind, decision.fields())
        except RecordError:
            self.rollout.break_record()  # ends this connection too
            return False
        if decision.limited >= 0:
            self.rollout.budget.rules[decision.limited].open_connection()
        return not self.closed

    def _record_denial(self, reason: Reason, detail: str = "") -> None:
        decision, rollout = self.decision, self.rollout
        if decision is None or rollout.broken:
            return
        fields = decision.fields()
        if detail:
            fields["detail"] = safe_text("; ".join(filter(None, (str(fields.get("detail", "")), detail))))
        try:
            rollout.journal.deny(decision.kind, reason, fields, self._loop.now)
        except RecordError:
            rollout.break_record()
        rollout.folded()

    # ---- time and faults

    def _due(self) -> tuple[float, Reason]:
        """Return when the next limit is reached, and which one."""
        phase, limits = PHASES[self.state], self.rollout.rules.limits
        dues = []
        if phase.limit_s is not None:
            dues.append((self._entered_s + phase.limit_s, phase.limit_reason))
        if phase.idle:
            dues.append((self._active_s + limits.idle_s, Reason.IDLE_TIMEOUT))
        if self.decision is not None:
            dues.append((self.decision.started_s + limits.total_s, Reason.TOTAL_TIMEOUT))
        return min(dues, default=(self._loop.now + limits.total_s, Reason.TOTAL_TIMEOUT))

    def sweep(self) -> None:
        """Look whether a limit was reached; called a few times a second."""
        due_s, reason = self._due()
        if due_s > self._loop.now:
            return
        if self.state is _HEAD:
            self.opening.record_blank(reason)
            self.answer(reason, refusal=self.opening.blank_refusal(reason))
        elif self.state in (_IDLE, _DRAIN):
            self.close()
        elif self.decision is None:
            self.opening.record_blank(reason)
            self.end(reason)
        elif self.passage.can_answer:
            self.fail(reason)
        else:
            self.end(reason)

    def guard(self, step: Callable[[], None]) -> None:
        """Run a step that another part of the loop calls: its faults are this connection's, not that part's."""
        try:
            step()
        except OSError:  # the client's socket; upstream and record catch their own
            self.end(Reason.CLIENT_CLOSED)
        except Exception as fault:  # noqa: BLE001 - one bad connection must never end the loop
            self.fault(fault)

    def fault(self, fault: Exception) -> None:
        """Whatever went wrong in this connection ends this connection, and says so."""
        trace = fault.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else f" at {trace.tb_frame.f_code.co_name}:{trace.tb_lineno}"
        what = safe_text(f"{type(fault).__name__}{where}: {fault}")
        if self.decision is None:
            self.opening.record_blank(Reason.INTERNAL_ERROR, what)
        else:
            self.decision.ended["detail"] = what
        self.end(Reason.INTERNAL_ERROR)
        self.close(abort=True)
