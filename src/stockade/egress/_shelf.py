"""Between a request and the store: look before anybody is asked, keep what is answered, serve what is kept.

``record``: what is kept is served, everything else is asked for and kept, or refused if it cannot be. ``replay``: what is
kept is served, and everything else is refused by name; nothing is resolved or dialled. ``live``: only rules that say
``store: true`` share answers, and a store that fails costs nothing but time. Services of the run itself (its model) are
never kept: they are no part of the internet.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from stockade.egress._body import Body
from stockade.egress._counts import STORE_HIT, STORE_MISS
from stockade.egress._keys import key, missing, shareable, storable
from stockade.egress._loop import GONE, READ, WRITE
from stockade.egress._store import PIECE_BYTES, Recording, Serving, Store, StoreFault
from stockade.egress._stream import HIGH_WATER_BYTES, READ_BYTES, Stream
from stockade.egress.gate import (
    CONTINUE,
    Framing,
    Grant,
    Headers,
    Malformed,
    Mode,
    Reason,
    ResponseHead,
    Rules,
    render_response_head,
)

if TYPE_CHECKING:
    from stockade.egress._connection import Connection
    from stockade.egress._decision import Decision

_SOON_S = 1e-6


class Shelf:
    """The store as one rollout may use it."""

    __slots__ = ("_mode", "_store")

    def __init__(self, store: Store | None, mode: Mode) -> None:
        self._store = store
        self._mode = mode

    @classmethod
    def of(cls, store: Store | None, rules: Rules) -> Shelf | None:
        """Return the shelf of a rollout, None where its rules have no use for one."""
        kept = store is not None and any(rule.store for rule in rules.allow)
        return cls(store, rules.mode) if rules.mode in (Mode.RECORD, Mode.REPLAY) or kept else None

    @property
    def strict(self) -> bool:
        """Whether what cannot be kept must not be used either."""
        return self._mode is not Mode.LIVE

    def concerns(self, grant: Grant) -> bool:
        """Whether answers under these terms are kept."""
        return grant.pinned is None and (self.strict or grant.store)

    def look(self, connection: Connection, decision: Decision, body: bytes) -> None:
        """Serve what is kept; else go on, or refuse by name."""
        passage, request = connection.passage, decision.head.request
        headers, credential = _sent(decision)
        store = self._store
        if not self.strict and not shareable(request, headers, credential):
            passage.seek()
            return
        digest = hashlib.sha256(body).digest() if body else None
        try:
            name = key(request, headers, digest, mode=self._key_mode, credential=credential)
            found = None if store is None else store.lookup(name)
            serving = None if found is None else found.open()
        except StoreFault as fault:
            if self.strict:
                connection.deny(Reason.STORE_FAILED, str(fault))
            else:
                passage.seek()
            return
        connection.rollout.shell.count(STORE_MISS if serving is None else STORE_HIT)
        if serving is not None:
            decision.source = "store"
            passage.serve(Serve(connection, decision, serving))
        elif store is None:
            connection.deny(Reason.STORE_FAILED, "there is no store")
        elif self._mode is Mode.REPLAY:
            connection.deny(Reason.NOT_RECORDED, missing(name))
        else:
            decision.key = name
            decision.tape = partial(Tape, self, store)
            passage.seek()

    @property
    def _key_mode(self) -> Mode:
        return Mode.RECORD if self.strict else Mode.LIVE

    def keeps(self, decision: Decision, response: ResponseHead) -> bool:
        """Whether this answer is to be kept."""
        headers, credential = _sent(decision)
        return storable(decision.head.request, headers, response, self._key_mode, credential)


def _sent(decision: Decision) -> tuple[Headers, str | None]:
    """Return the client's fields that go out, and the name of what a rule adds."""
    grant, head = decision.grant, decision.head
    if grant is None or not (grant.strip_credentials or grant.credential):
        return head.headers, None
    kept = tuple(field for field in head.headers if field[0].lower().decode("ascii") not in head.credentials)
    return kept, grant.credential


class Tape:
    """Keeps one answer while it passes. In live mode a fault of the store only ends the keeping."""

    __slots__ = ("_decision", "_failed", "_recording", "_shelf", "_store", "reason")

    def __init__(self, shelf: Shelf, store: Store, _connection: Connection, decision: Decision) -> None:
        self._shelf = shelf
        self._store = store
        self._decision = decision
        self._recording: Recording | None = None
        self._failed = False
        self.reason = Reason.STORE_FAILED
        """Why it could not be kept."""

    def begin(self, response: ResponseHead) -> None:
        """The head has come. Raises Malformed if it cannot be kept and must be."""
        name = self._decision.key
        if name is None or not self._shelf.keeps(self._decision, response):
            return
        try:
            self._recording = self._store.begin(name, response)
        except StoreFault as fault:
            if self._shelf.strict:
                raise Malformed(fault.reason, str(fault), status=503) from fault

    def keep(self, data: bytes, *, last: bool) -> bool:
        """Keep a piece before it is passed on, and all of it with the last; return False if it must be and cannot."""
        recording = self._recording
        if recording is None:
            return not self._failed
        try:
            recording.write(data)
            if last:
                self._recording = None
                recording.commit()
        except StoreFault as fault:
            self._recording = None
            if self._shelf.strict:
                self._failed = True
                self.reason = fault.reason
                self._decision.ended["detail"] = str(fault)
        return not self._failed

    def abort(self) -> None:
        """It did not come whole."""
        if self._recording is not None:
            self._recording.abort()
            self._recording = None


class Gather:
    """Reads the whole body of a request before the store is asked: it is a part of what is asked."""

    __slots__ = ("_body", "_connection", "_decision", "_parts", "_shelf", "_size", "answered")

    def __init__(self, connection: Connection, decision: Decision, shelf: Shelf) -> None:
        self._connection = connection
        self._decision = decision
        self._shelf = shelf
        self._body = Body(decision.head.framing, decision.head.length)
        self._parts: list[bytes] = []
        self._size = 0
        self.answered = False

    def start(self) -> None:
        """Take what is there already."""
        self._connection.touch()
        if self._decision.head.expect_continue and not self._connection.buffer:
            self._connection.client.send(CONTINUE)
        piece = bytes(self._connection.buffer)
        self._connection.buffer.clear()
        self._take(piece)

    def close(self) -> None:
        """Forget it."""
        self._parts.clear()

    def client_event(self, events: int) -> None:
        """More of the body has come."""
        if not events & (READ | GONE):
            return
        piece = self._connection.client.receive(READ_BYTES)
        if piece is None:
            return
        if not piece:
            self._connection.end(Reason.CLIENT_CLOSED)
            return
        self._connection.touch()
        self._take(piece)

    def _take(self, piece: bytes) -> None:
        connection, meter = self._connection, self._decision.meter
        try:
            data, rest = self._body.feed(piece)
        except Malformed as fault:
            connection.deny(fault.reason, fault.detail)
            return
        connection.buffer += rest
        self._parts.append(data)
        self._size += len(data)
        if meter is None or max(self._size, self._decision.head.length) > meter.left_out:
            connection.deny(Reason.REQUEST_TOO_LARGE if meter is None else meter.exceeded)
        elif self._body.done:
            whole = b"".join(self._parts)
            self._decision.body = whole
            connection.passage.inspected()
            self._shelf.look(connection, self._decision, whole)


class Serve:
    """One answer out of the store, on its way to the client; counted like one from outside."""

    __slots__ = ("_closed", "_connection", "_decision", "_keep", "_serving", "answered")

    def __init__(self, connection: Connection, decision: Decision, serving: Serving) -> None:
        self._connection = connection
        self._decision = decision
        self._serving = serving
        self._keep = False
        self._closed = False
        self.answered = False

    def start(self) -> None:
        """Verify what is kept, a slice in each round of the loop; then send it."""
        self._connection.client.want(read=False)
        # Not from within the end of the answer before: a row of small kept ones would pile up on the stack.
        self._soon()

    def close(self) -> None:
        """Let it go."""
        self._closed = True
        self._serving.close()

    def client_event(self, events: int) -> None:
        """The client's side is ready."""
        if events & GONE:
            self._connection.end(Reason.CLIENT_CLOSED)
        elif events & WRITE and self.answered and not self._connection.client.out:
            self._connection.touch()
            self._send()

    def _step(self) -> None:
        if self._closed:
            return
        try:
            verified = self._serving.verify()
        except StoreFault as fault:
            self._decision.ended["detail"] = str(fault)
            self._connection.fail(Reason.STORE_FAILED, str(fault))
            return
        if verified:
            self._answer()
            return
        self._soon()

    def _soon(self) -> None:
        loop, guard = self._connection.rollout.shell.loop, self._connection.guard
        loop.call_later(_SOON_S, lambda: guard(self._step), self._connection.fault)

    def _answer(self) -> None:
        decision, request = self._decision, self._decision.head
        head = self._serving.head
        bodiless = request.request.method == "HEAD" or head.framing is Framing.NONE
        if not bodiless:
            head = msgspec.structs.replace(head, framing=Framing.LENGTH, length=self._serving.left)
        self._keep = request.keep_alive
        decision.status = head.status
        decision.ended["response_headers_bytes"] = head.size_bytes
        self.answered = True
        self._connection.client.send(render_response_head(head, version=request.version, keep_alive=self._keep))
        if bodiless:
            self._finish()
        else:
            self._send()

    def _send(self) -> None:
        """Send a piece; the next one when the client has room again, after the others had their turn."""
        meter, client, serving = self._decision.meter, self._connection.client, self._serving
        if not serving.left:
            self._finish()
            return
        left = 0 if meter is None else meter.left_in
        if meter is None or not left:
            self._connection.end(Reason.BYTES_IN_EXCEEDED)
            return
        try:
            if isinstance(client, Stream) and not client.out:
                sent = self._send_file(client, min(left, PIECE_BYTES))
            else:
                piece = serving.read(min(left, PIECE_BYTES, HIGH_WATER_BYTES))
                client.send(piece)
                sent = len(piece)
        except StoreFault as fault:
            self._decision.ended["detail"] = str(fault)
            self._connection.end(Reason.STORE_FAILED)
            return
        meter.into(sent)
        if not serving.left and not client.out:
            self._finish()
        else:
            client.want(write=True)

    def _send_file(self, client: Stream, size: int) -> int:
        try:
            return self._serving.send(client.fd, size)
        except BlockingIOError:
            return 0

    def _finish(self) -> None:
        self._connection.client.want(write=False)
        self._serving.close()
        self._connection.passage.exchanged(keep=self._keep, reusable=True)
