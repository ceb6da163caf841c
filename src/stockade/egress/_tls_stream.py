"""TLS over a stream, with the manners of a stream: who relays bytes need not know which of the two it holds.

OpenSSL works in memory here (``ssl.SSLObject``); the stream below moves the ciphertext. What arrives is decrypted one
read at a time, and only while the owner wants to read: so an event of this stream means plaintext, an end or an error,
never a mere ticket, and what nobody takes stays in the kernel and with the sender.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import ssl
from collections.abc import Callable
from typing import TypeAlias

from stockade.egress._copy import CopyPump
from stockade.egress._loop import GONE, READ, WRITE, Fault, Loop, Timer
from stockade.egress._mint import UpstreamContext
from stockade.egress._stream import HIGH_WATER_BYTES, READ_BYTES, Stream

__all__ = ["CopyPump", "TlsStream"]

Done: TypeAlias = "Callable[[str | None], None]"
AnyStream: TypeAlias = "Stream | TlsStream"

_HANDSHAKE_BYTES = 256 * 1024
"""More than any certificate chain that OpenSSL takes (100 KiB a message)."""
_BARREN_BYTES = 64 * 1024
"""Most bytes without data in a row. One record has 16 KiB; tickets are small; the rest is a flood of key updates."""
_RECORD_BYTES = 16 * 1024
_SOON_S = 1e-6
"""In the loop's next round: a timer of 0 runs in this one, and could keep the others from their turn."""
_OTHER_NAME = frozenset({62, 63, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, _EMAIL_, _IP_ADDRESS_
_TEXT = re.compile(r"(?:\[[^]]*\] )?([\w ,.:/()-]+?)(?: \(_ssl\.c:\d+\))?\Z", re.ASCII)
_NOTHING = ssl.MemoryBIO()


class TlsStream:
    """One TLS side of a connection; attributes and methods are those of :class:`Stream`, in plaintext.

    Made by :meth:`server` or :meth:`client`, which take ``stream`` over: it is this object's until that is closed.
    ``done(None)`` is called once the handshake is complete, ``done(text)`` when it failed, never before the maker has
    returned; how long it may take is the owner's business. Until then the owner hears nothing else and :meth:`want` has
    no effect; afterwards the stream is reading until the owner says otherwise.

    An end without ``close_notify`` is an OSError: whoever sits on the way could cut an answer short (RFC 8446 section
    6.1). ``out`` holds ciphertext.
    """

    __slots__ = (
        "_barren",
        "_context",
        "_done",
        "_ended",
        "_error",
        "_finished",
        "_host",
        "_incoming",
        "_loop",
        "_on_fault",
        "_outgoing",
        "_plain",
        "_timer",
        "_tls",
        "_wire",
        "on_event",
    )

    def __init__(self, stream: AnyStream, context: ssl.SSLContext, done: Done, host: str | None) -> None:
        """Begin as the client of ``host``, or as the server where it is None; see the two makers."""
        self._wire = stream
        self._loop: Loop = stream._loop  # noqa: SLF001 - what lies below is this object's own
        self._on_fault: Fault = _fault_of(stream)
        self.on_event: Callable[[int], None] = stream.on_event
        self._done: Done | None = done
        self._context = context
        self._host = host
        self._plain = b""
        self._ended = False
        self._error = ""
        self._finished = False
        self._barren = 0
        self._timer: Timer | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = context.session(host) if host is not None and isinstance(context, UpstreamContext) else None
        self._tls: ssl.SSLObject | None = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host, session=session
        )
        stream.adopt(self._wire_event, self._on_fault)
        stream.want(read=True)

    @classmethod
    def server(cls, stream: AnyStream, context: ssl.SSLContext, initial: bytes, done: Done) -> TlsStream:
        """Answer a client whose first bytes, ``initial``, were read already."""
        made = cls(stream, context, done, None)
        made._incoming.write(initial)
        made._shake(first=True)
        return made

    @classmethod
    def client(cls, stream: AnyStream, context: ssl.SSLContext, server_hostname: str, done: Done) -> TlsStream:
        """Greet ``server_hostname`` (a name or an IP literal), resuming a session if ``context`` remembers one."""
        made = cls(stream, context, done, server_hostname)
        made._shake(first=True)
        return made

    # ---- what a stream has

    @property
    def fd(self) -> int:
        """The descriptor of the socket at the bottom."""
        return self._wire.fd

    @property
    def out(self) -> bytearray:
        """Ciphertext that the kernel has not taken yet."""
        return self._wire.out

    @property
    def closed(self) -> bool:
        """Whether the socket is closed."""
        return self._wire.closed

    @property
    def reading(self) -> bool:
        """Whether this side waits for bytes."""
        return self._wire.reading

    @property
    def resumed(self) -> bool:
        """Whether the handshake took up an earlier session; False once closed."""
        return self._tls is not None and bool(self._tls.session_reused)

    def want(self, *, read: bool | None = None, write: bool | None = None) -> None:
        """Say what to wait for; None keeps it. What is decrypted already is an event too."""
        if self._done is None:
            self._wire.want(read=read, write=write)
            if read:
                self._again()

    def mute(self) -> None:
        """Ignore even hang-ups until the next :meth:`want`."""
        self._wire.mute()

    def adopt(self, on_event: Callable[[int], None], on_fault: Fault) -> None:
        """Give it to another owner."""
        self.on_event = on_event
        self._on_fault = on_fault
        self._wire.adopt(self._wire_event, on_fault)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt, send what the kernel takes and keep the rest; raises OSError if the peer is gone."""
        tls = self._usable()
        view = memoryview(data)
        while view:
            # A memory BIO never shrinks: piece by piece, it stays as small as one.
            piece, view = view[:READ_BYTES], view[READ_BYTES:]
            while piece:
                piece = piece[tls.write(piece) :]
            self._wire.send(self._outgoing.read())

    def flush(self) -> bool:
        """Send more of what is kept; return whether nothing is left. Raises OSError."""
        done = self._wire.flush()
        if done and self._finished:
            self._wire.finish()
        return done

    def receive(self, size: int = READ_BYTES) -> bytes | None:
        """Return up to ``size`` bytes, ``b""`` at the end, None if there are none yet. Raises OSError."""
        if not self._fill():
            return None
        plain = self._plain
        if plain:
            if len(plain) <= size:
                self._plain = b""
                return plain
            self._plain = plain[size:]
            self._again()
            return plain[:size]
        if self._error:
            raise OSError(errno.EPROTO, self._error)
        return b""

    def peek(self) -> bool | None:
        """Return whether a byte waits (True), the end was reached (False), or neither yet (None). Raises OSError."""
        if not self._fill():
            return None
        if self._error and not self._plain:
            raise OSError(errno.EPROTO, self._error)
        return bool(self._plain)

    def finish(self) -> None:
        """Pass the end of the bytes on: close_notify, then FIN once all is sent."""
        if self._finished or self.closed:
            return
        self._finished = True
        self._say_goodbye()
        if not self._wire.out:
            self._wire.finish()

    def close(self, *, abort: bool = False) -> None:
        """Close, with close_notify unless ``abort`` (RST) or bytes are stuck before it. Idempotent."""
        if self.closed:
            return
        tls, context = self._tls, self._context
        if tls is not None and self._done is None:
            if self._host is not None and isinstance(context, UpstreamContext):
                context.remember(self._host, tls)
            if not abort and not self._finished and not self._wire.out:
                self._say_goodbye()
        self._done = None
        self._release()
        # No ring of references: what TLS holds is large, and is to go now, not with the next collection.
        self.on_event = _ignore
        self._wire.adopt(_ignore, self._on_fault)
        self._wire.close(abort=abort)

    # ---- the handshake

    def _shake(self, *, first: bool = False) -> None:
        """Go on as far as the bytes go."""
        if self._tls is None:
            return
        why: str | None = None
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._pass_on()
            if not self._error and self._barren <= _HANDSHAKE_BYTES:
                return
            why = self._error or "handshake too large"
        except ssl.SSLError as error:
            why = _describe(error)
            self._pass_on()  # the alert that says what was wrong
        if first:
            # A server has failed on the first flight; nobody can have completed one. The owner hears it a little later.
            self._error = why or ""
            self._timer = self._loop.call_later(_SOON_S, lambda: self._settle(why), self._on_fault)
        else:
            self._settle(why)

    def _settle(self, why: str | None) -> None:
        done, self._done = self._done, None
        self._barren = 0
        if why is not None:
            self._error = why
            self._release()
        elif self._incoming.pending:
            self._decrypt()  # a client may speak right behind its last flight
        if done is not None:
            done(why)
        self._pass_on()  # our last flight, unless it went out with what the owner had to say
        self._again()

    def _shake_event(self, events: int) -> None:
        if self._error:
            return  # failed, and about to be told
        try:
            if events & WRITE:
                self._wire.flush()
            piece = self._wire.receive() if events & (READ | GONE) else None
        except OSError as error:
            self._settle(_reason(error))
            return
        if piece is None:
            return
        if not piece:
            self._settle("closed during the handshake")
            return
        self._barren += len(piece)
        self._incoming.write(piece)
        self._shake()

    # ---- the bytes

    def _wire_event(self, events: int) -> None:
        if self._done is not None:
            self._shake_event(events)
            return
        if events & READ and not self._fill():
            events &= ~READ
        if events:
            self.on_event(events)
            self._again()

    def _waiting(self) -> bool:
        """Whether the owner has something to receive: bytes, the end or an error."""
        return bool(self._plain or self._ended or self._error)

    def _fill(self) -> bool:
        """Read and decrypt once if nothing waits; return whether something does then."""
        if self._waiting():
            return True
        if self._done is not None:
            return False
        self._usable()
        try:
            piece = self._wire.receive()
        except OSError as error:
            self._error = _reason(error)
            return True
        if piece is None:
            return False
        if not piece:
            self._error = "ended without close_notify"
            return True
        self._incoming.write(piece)
        self._decrypt()
        self._barren = 0 if self._plain else self._barren + len(piece)
        if self._barren > _BARREN_BYTES:
            self._error = "too many records without data"
        return self._waiting()

    def _decrypt(self) -> None:
        """Take out all that is whole: at most what one read brought, and what was left of the record before."""
        tls = self._usable()
        parts: list[bytes] = []
        try:
            while part := tls.read(_RECORD_BYTES):
                parts.append(part)
                if not self._incoming.pending and not tls.pending():
                    break
            else:
                self._ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # how the end is said where we have ended too
            self._ended = True
        except ssl.SSLError as error:
            self._error = _describe(error)
        self._plain = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._outgoing.pending:
            self._pass_on()
            if len(self._wire.out) > 2 * HIGH_WATER_BYTES:
                self._error = "asks for answers and does not read them"

    def _again(self) -> None:
        """See to an event for what is decrypted already: the socket may stay quiet."""
        if self._timer is None and self._waiting() and self.reading and not self.closed:
            self._timer = self._loop.call_later(_SOON_S, self._deliver, self._on_fault)

    def _deliver(self) -> None:
        self._timer = None
        if self.reading and not self.closed and self._waiting():
            self.on_event(READ)
            self._again()

    def _pass_on(self) -> None:
        if self._outgoing.pending:
            try:
                self._wire.send(self._outgoing.read())
            except OSError as error:
                self._error = self._error or _reason(error)

    def _say_goodbye(self) -> None:
        if self._tls is not None and self._done is None:
            with contextlib.suppress(OSError):  # it also looks for the peer's close_notify, which need not be there
                self._tls.unwrap()
            self._pass_on()

    def _usable(self) -> ssl.SSLObject:
        if self._tls is None or self._done is not None:
            raise OSError(errno.EBADF, self._error or os.strerror(errno.EBADF))
        return self._tls

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tls = None
        self._incoming = self._outgoing = _NOTHING


def _ignore(_events: int) -> None:
    """Stand in for the owner of a closed stream."""


def _fault_of(stream: AnyStream) -> Fault:
    if isinstance(stream, TlsStream):
        return stream._on_fault  # noqa: SLF001 - the same class
    return stream._watch.on_fault  # noqa: SLF001 - see the constructor


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _describe(error: ssl.SSLError) -> str:
    """Return a short text out of OpenSSL's own fixed ones, with nothing of the peer's in it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        # OpenSSL has no text for a wrong name; Python's one repeats the name.
        other = error.verify_code in _OTHER_NAME
        return "certificate: " + ("for another name" if other else error.verify_message.lower())
    found = _TEXT.match(str(error))  # "reason" has no name for the newer alerts
    text = "tls error" if found is None else found[1].lower()
    return text.removeprefix("sslv3 ").removeprefix("tlsv1 ")
