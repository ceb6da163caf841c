"""A TlsStream has the manners of a Stream, and bounds for a hostile peer. The other ends are blocking sockets."""

from __future__ import annotations

import contextlib
import gc
import os
import pty
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from stockade.egress import _tls_stream
from stockade.egress._loop import READ
from stockade.egress._mint import UpstreamContext, upstream_context
from stockade.egress._stream import HIGH_WATER_BYTES, READ_BYTES
from stockade.egress._tls_stream import TlsStream
from tests.egress.tls.harness import HOST, LoopThread, Owner, Run, wait
from tests.support import requires

Make = Callable[..., Owner]


@pytest.fixture
def make(looping: LoopThread) -> Iterator[Make]:
    """Make owners that are closed in the end."""
    made: list[Owner] = []

    def one(**named: object) -> Owner:
        made.append(Owner(looping, **named))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for owner in made:
        owner.close()


@pytest.fixture
def served(make: Make, run: Run) -> Callable[..., tuple[Owner, ssl.SSLSocket]]:
    """Make an owner that serves, and the client that has shaken hands with it."""

    def one(version: ssl.TLSVersion | None = None, **named: object) -> tuple[Owner, ssl.SSLSocket]:
        owner = make(**named)
        owner.serve(run.mint.context(HOST))
        context = run.client()
        if version is not None:
            context.maximum_version = version
        owner.peer = strict(context).wrap_socket(owner.peer, server_hostname=HOST, suppress_ragged_eofs=False)
        assert owner.greeted() is None
        return owner, owner.peer

    return one


def strict(context: ssl.SSLContext) -> ssl.SSLContext:
    """Python takes an end without close_notify for an end, unless it is told otherwise in two places."""
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    return context


def upstream(run: Run, host: str = HOST) -> ssl.SSLContext:
    """What an upstream would present, with tickets as servers make them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    run.mint.context(host)
    run.mint._context(run.mint._cache[host].pem)  # so that the memfd has this host's
    certificate, key = run.mint._fds
    context.load_cert_chain(f"/proc/self/fd/{certificate}", f"/proc/self/fd/{key}")
    return context


def answered(owner: Owner, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Shake hands as the upstream of ``owner``, which must have greeted."""
    owner.peer = strict(context).wrap_socket(owner.peer, server_side=True, suppress_ragged_eofs=False)
    return owner.peer


# ------------------------------------------------------------------------------------- handshakes


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_bytes_go_both_ways_as_a_server(version, served) -> None:
    owner, peer = served(version)
    peer.sendall(b"ping")
    wait(lambda: owner.got == b"ping")
    owner.call("send", b"pong")
    assert peer.recv(10) == b"pong"
    assert peer.version() == version.name.replace("_", ".")
    assert peer.compression() is None


def test_bytes_go_both_ways_as_a_client(make, run) -> None:
    owner = make()
    owner.greet(upstream_context(run.authority.cert_pem))
    peer = answered(owner, upstream(run))
    assert owner.greeted() is None
    owner.call("send", bytearray(b"ping"))
    assert peer.recv(10) == b"ping"
    peer.sendall(b"pong")
    wait(lambda: owner.got == b"pong")


def test_first_bytes_that_were_read_before_count(make, run) -> None:
    owner = make()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = run.client().wrap_bio(incoming, outgoing, server_hostname=HOST)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    owner.serve(run.mint.context(HOST), outgoing.read())
    while True:
        incoming.write(owner.peer.recv(READ_BYTES))
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
            break
    client.write(b"in the same packet as my last flight")
    owner.peer.sendall(outgoing.read())
    wait(lambda: owner.got == b"in the same packet as my last flight")
    assert owner.told == [None]


def test_failure_on_the_first_bytes_is_told_after_the_maker_returned(make, run) -> None:
    owner = make()

    def serve() -> TlsStream:
        stream = TlsStream.server(owner.plain, run.mint.context(HOST), b"GET / HTTP/1.1\r\n\r\n", owner.told.append)
        assert owner.told == []
        return stream

    owner.stream = owner.looping.call(serve)
    assert owner.greeted() == "http request"
    with pytest.raises(OSError, match="http request"):
        owner.call("send", b"x")
    with pytest.raises(OSError, match="http request"):
        owner.call("receive")


@pytest.mark.parametrize(("reset", "why"), [(False, "closed during the handshake"), (True, "connection reset by peer")])
def test_a_client_that_leaves_during_the_handshake(reset, why, make, run) -> None:
    owner = make()
    owner.serve(run.mint.context(HOST))
    if reset:
        owner.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    owner.peer.close()
    assert owner.greeted() == why


def test_nothing_but_a_handshake_is_possible_before_its_end(make, run) -> None:
    owner = make()
    owner.serve(run.mint.context(HOST))
    owner.call("want", read=False)  # has no effect
    assert owner.call("receive") is None
    assert owner.call("peek") is None
    with pytest.raises(OSError):
        owner.call("send", b"too early")
    with run.client().wrap_socket(owner.peer, server_hostname=HOST) as peer:
        assert owner.greeted() is None
        peer.sendall(b"x")
        wait(lambda: owner.got == b"x")


def test_a_handshake_without_end_is_cut_off(make, run, monkeypatch) -> None:
    monkeypatch.setattr(_tls_stream, "_HANDSHAKE_BYTES", 1000)
    owner = make()
    owner.serve(run.mint.context(HOST))
    # A ClientHello of 16 MiB less one, in records of one byte.
    owner.peer.sendall(b"\x16\x03\x01\x00\x04\x01\x00\x3f\xff")
    for _ in range(200):
        with contextlib.suppress(OSError):
            owner.peer.sendall(b"\x16\x03\x01\x00\x01\x00")
    assert owner.greeted() == "handshake too large"


def test_an_old_version_is_refused(make, run) -> None:
    requires(shutil.which("openssl"), "no openssl", must_run_in_ci=False)
    owner = make()
    owner.serve(run.mint.context(HOST))
    # A ClientHello of TLS 1.1, as RFC 4346 has it: one cipher, no extensions.
    body = b"\x03\x02" + bytes(32) + b"\x00" + b"\x00\x02\xc0\x13" + b"\x01\x00"
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    owner.peer.sendall(b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message)
    assert owner.greeted() == "unsupported protocol"
    assert owner.peer.recv(7) == b"\x15\x03\x02\x00\x02\x02\x46"  # fatal: protocol version


# ------------------------------------------------------------------------------------- the manners of a stream


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_what_is_decrypted_already_comes_though_the_socket_is_quiet(version, served) -> None:
    owner, peer = served(version, size=1000)
    data = os.urandom(200_000)
    peer.sendall(data)
    wait(lambda: len(owner.got) == len(data))
    assert owner.got == data


def test_receive_is_exact_and_peek_takes_nothing(served) -> None:
    owner, peer = served(greedy=False)
    assert owner.call("peek") is None
    assert owner.call("receive") is None
    peer.sendall(b"0123456789")
    wait(lambda: owner.call("peek"))
    assert [owner.call("receive", 3), owner.call("peek"), owner.call("receive", 100)] == [b"012", True, b"3456789"]
    assert owner.call("peek") is None
    threading.Thread(target=peer.unwrap, daemon=True).start()
    wait(lambda: owner.call("peek") is False)
    assert owner.call("receive") == b""
    owner.call("finish")


def test_who_does_not_want_to_read_holds_the_sender_up(served) -> None:
    owner, peer = served(greedy=False)
    owner.call("want", read=False)
    peer.setblocking(False)
    sent = 0
    with contextlib.suppress(ssl.SSLWantWriteError):
        while True:
            sent += peer.send(bytes(16384))
    assert not owner.events
    owner.call("want", read=True)
    wait(lambda: owner.events)
    assert owner.events[0] & READ
    assert len(owner.stream._plain) <= READ_BYTES + 16384  # one read, and what was left of a record before it
    owner.greedy = True
    wait(lambda: len(owner.got) >= sent)


def test_what_the_kernel_does_not_take_waits_in_out(served) -> None:
    owner, peer = served()
    data = os.urandom(16 << 20)
    owner.call("send", data)
    wait(lambda: len(owner.stream.out) > HIGH_WATER_BYTES)
    assert len(owner.stream.out) < len(data) * 1.01
    got = bytearray()
    while len(got) < len(data):
        got += peer.recv(READ_BYTES)
    assert got == data
    wait(lambda: not owner.stream.out)


def test_adopting_changes_who_hears(served) -> None:
    owner, peer = served()
    heard: list[int] = []
    owner.call("adopt", heard.append, owner.looping.faults.append)
    peer.sendall(b"x")
    wait(lambda: heard)
    owner.call("want", read=False)
    assert owner.call("receive") == b"x"
    assert not owner.events


def test_close_notify_is_the_end_and_the_other_direction_goes_on(served) -> None:
    owner, peer = served()
    owner.call("send", b"last")
    owner.call("finish")
    assert [peer.recv(10), peer.recv(10)] == [b"last", b""]
    peer.sendall(b"but I have more")
    wait(lambda: owner.got == b"but I have more")
    peer.unwrap()
    wait(lambda: owner.ended)
    assert not owner.problem
    with pytest.raises(OSError):
        owner.call("send", b"x")


def test_finish_with_bytes_unsent_ends_after_them(served) -> None:
    owner, peer = served()
    data = os.urandom(16 << 20)
    owner.call("send", data)
    owner.call("finish")
    assert owner.stream.out
    got = bytearray()
    while piece := peer.recv(READ_BYTES):
        got += piece
    assert got == data
    raw = socket.socket(fileno=peer.detach())
    with raw:
        raw.settimeout(10)
        assert raw.recv(1) == b""  # FIN came too


def test_an_end_without_close_notify_is_an_error(served) -> None:
    owner, peer = served()
    peer.sendall(b"half of an ans")
    socket.socket(fileno=peer.detach()).close()
    wait(lambda: owner.problem)
    assert owner.got == b"half of an ans"
    assert owner.problem == "ended without close_notify"
    with pytest.raises(OSError, match="close_notify"):
        owner.call("peek")


@pytest.mark.parametrize("junk", [b"\x17\x03\x03\x00\x20" + bytes(32), b"HTTP/1.1 200 OK\r\n\r\n", bytes(100)])
def test_a_record_that_is_not_the_peers_is_an_error(junk, served) -> None:
    owner, peer = served()
    peer.sendall(b"good")
    with socket.socket(fileno=peer.detach()) as raw:
        raw.sendall(junk)
        wait(lambda: owner.problem)
    assert owner.got == b"good"
    assert owner.problem in ("decryption failed or bad record mac", "wrong version number", "http request")


def test_close_says_goodbye_and_abort_does_not(served) -> None:
    owner, peer = served()
    owner.call("close")
    owner.call("close")
    assert peer.recv(10) == b""
    assert owner.stream.closed
    with pytest.raises(OSError):
        owner.call("receive")
    owner, peer = served()
    owner.call("close", abort=True)
    with pytest.raises(OSError):
        peer.recv(10)


def test_what_openssl_holds_goes_with_the_connection(served) -> None:
    owner, _peer = served()
    held = weakref.ref(owner.stream._tls)
    gc.disable()
    try:
        owner.call("close")
        assert held() is None
    finally:
        gc.enable()


def test_tls_inside_tls(make, run) -> None:
    """An operator's proxy is greeted by TLS, and so is the server that it leads to."""
    owner = make()
    context = upstream_context(run.authority.cert_pem)
    owner.greet(context)
    outer = answered(owner, upstream(run))
    assert owner.greeted() is None
    owner.told.clear()
    owner.stream = owner.looping.call(lambda: TlsStream.client(owner.stream, context, "a.wild.test", owner.told.append))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    inner = upstream(run, "a.wild.test").wrap_bio(incoming, outgoing, server_side=True)
    done = False
    while not done:
        incoming.write(outer.recv(READ_BYTES))
        with contextlib.suppress(ssl.SSLWantReadError):
            inner.do_handshake()
            done = True
        outer.sendall(outgoing.read())
    assert owner.greeted() is None
    data = os.urandom(100_000)
    for start in range(0, len(data), 10_000):
        inner.write(data[start : start + 10_000])
    outer.sendall(outgoing.read())
    wait(lambda: owner.got == data)
    owner.call("finish")
    while piece := outer.recv(READ_BYTES):  # the outer end comes behind the inner one
        incoming.write(piece)
    assert inner.read() == b""


# ------------------------------------------------------------------------------------- tickets and sessions


def test_tickets_are_no_event(make, run) -> None:
    owner = make()
    owner.greet(upstream_context(run.authority.cert_pem))
    context = upstream(run)
    context.num_tickets = 10
    peer = answered(owner, context)
    assert owner.greeted() is None
    wait(lambda: owner.stream._barren > 500)
    assert owner.events == []
    peer.sendall(b"x")
    wait(lambda: owner.got == b"x")


def connect(make: Make, context: UpstreamContext, server: ssl.SSLContext, host: str = HOST) -> bool:
    """Connect, read a byte, close; return whether the session was resumed."""
    owner = make()
    owner.greet(context, host)
    peer = answered(owner, server)
    assert owner.greeted() is None
    resumed: bool = owner.stream.resumed
    peer.sendall(b"x")
    wait(lambda: owner.got == b"x")
    owner.call("close")
    assert not owner.stream.resumed
    return resumed


def test_a_session_is_resumed_with_its_host_alone_and_for_a_while(make, run, monkeypatch) -> None:
    context = upstream_context(run.authority.cert_pem)
    server = upstream(run)
    assert [connect(make, context, server) for _ in range(3)] == [False, True, True]
    assert context.session("other.test") is None
    # The same server under another name: verified anew.
    assert connect(make, context, upstream(run, "a.wild.test"), "a.wild.test") is False
    # The server has forgotten its keys: the handshake is a full one, and works.
    assert connect(make, context, upstream(run)) is False
    monkeypatch.setattr("stockade.egress._mint.SESSION_S", 0.0)
    assert connect(make, context, server) is False


# ------------------------------------------------------------------------------------- a hostile peer


@contextlib.contextmanager
def s_client(owner: Owner, run: Run, *options: str) -> Iterator[int]:
    """An ``openssl s_client`` whose terminal is the descriptor: each line that begins with a capital is a command."""
    requires(shutil.which("openssl"), "no openssl", must_run_in_ci=False)
    owner.serve(run.mint.context(HOST))
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def relay(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(READ_BYTES):
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    terminal, theirs = pty.openpty()
    argv = ["openssl", "s_client", "-connect", f"127.0.0.1:{listener.getsockname()[1]}", "-servername", HOST, *options]
    with subprocess.Popen(argv, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        sock, _ = listener.accept()
        listener.close()
        threads = [threading.Thread(target=relay, args=pair) for pair in ((sock, owner.peer), (owner.peer, sock))]
        for thread in threads:
            thread.start()
        try:
            assert owner.greeted() is None
            yield terminal
        finally:
            os.close(terminal)
            process.terminate()
            process.wait(10)
            owner.call("close")
            for thread in threads:
                thread.join(10)
            sock.close()


def test_a_flood_of_key_updates_is_cut_off(make, run) -> None:
    owner = make()
    with s_client(owner, run, "-tls1_3") as terminal:
        os.write(terminal, b"hello\n")
        wait(lambda: owner.got)
        for _ in range(10_000):
            with contextlib.suppress(OSError):
                os.write(terminal, b"K\n")
            if owner.problem:
                break
        wait(lambda: owner.problem)
    assert owner.problem == "too many records without data"
    assert owner.got == b"hello\n"


def test_a_second_handshake_is_refused(make, run) -> None:
    owner = make()
    with s_client(owner, run, "-tls1_2") as terminal:
        os.write(terminal, b"hello\n")
        wait(lambda: owner.got)
        os.write(terminal, b"R\n")
        wait(lambda: owner.problem or owner.ended)
    assert owner.got == b"hello\n"


def test_answers_that_nobody_reads_are_bounded(served, monkeypatch) -> None:
    """OpenSSL answers some records by itself; an owner that has stopped sending cannot hold that back."""
    owner, peer = served()
    wire = owner.plain
    owner.looping.call(lambda: wire.out.extend(bytes(2 * HIGH_WATER_BYTES + 1)))
    stream = owner.stream
    owner.looping.call(lambda: stream._outgoing.write(b"x"))
    peer.sendall(b"y")
    wait(lambda: owner.problem)
    assert owner.problem == "asks for answers and does not read them"
