"""What fuzzing begins with: for each target the ordinary inputs, and those that have fooled somebody."""

from __future__ import annotations

import hashlib
import ssl
import struct

_HELLO_HOST = "tunnel.test"


def seeds(name: str) -> list[bytes]:
    """Return the seeds of a target."""
    return _SEEDS[name]()


def _requests() -> list[bytes]:
    targets = (
        b"http://plain.test/a/b?c=d",
        b"http://open.test:8443/",
        b"http://read.test",
        b"http://a.wild.test/?service=git-upload-pack",
    )
    found = [b"\0GET %b HTTP/1.1\r\nHost: %b\r\nAccept: */*\r\n\r\n" % (t, t.split(b"/")[2]) for t in targets]
    hosts = {
        1: b"open.test",
        2: b"plain.test",
        3: b"open.test:8443",
        4: b"[2600:5::5]",
        5: b"key.test",
        6: b"a.wild.test",
        7: b"socket.test",
    }
    for number, host in hosts.items():
        found.append(
            bytes((number,)) + b"GET /a/b?c=d HTTP/1.1\r\nHost: %b\r\nUser-Agent: x\r\nCookie: a=b\r\n\r\n" % host
        )
    found += [
        b"\0CONNECT %b HTTP/1.1\r\nHost: %b\r\nProxy-Connection: keep-alive\r\n\r\n" % (where, where)
        for where in (
            b"open.test:443",
            b"[2600:5::5]:443",
            b"11.0.0.5:80",
            b"raw.test:22",
            b"model.stockade.internal:9000",
            b"node.test:443",
        )
    ]
    post = b"POST http://open.test/x HTTP/1.1\r\nHost: open.test\r\n"
    found += [
        b"\0" + post + lines + b"\r\n"
        for lines in (
            b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            b"Connection: close, X-A\r\nX-A: b\r\nTE: trailers\r\n", b"Proxy-Authorization: Basic eDp5\r\nX-Rollout-Id: other\r\nX_Forwarded_For: 1\r\n",
            b"X-HTTP-Method-Override: DELETE\r\nForwarded: for=1\r\n", b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\n",
            b"Authorization: Bearer canary-5ecret-value\r\n", b"X: a\r\n folded\r\n", b"X : a\r\n", b"X: \0\r\n", b"Content-Length: 5, 5\r\n", b"Host: evil.test\r\n",
        )
    ]  # fmt: skip
    socket = b"\x07GET /ws HTTP/1.1\r\nHost: socket.test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    paths = (
        b"/a/../b",
        b"/a/%2e%2e/b",
        b"//a",
        b"/a%2Fb",
        b"/a%5cb",
        b"/a;x",
        b"/%252e",
        b"/?_method=DELETE",
        b"/closed/x",
        b"https://open.test/y",
        b"*",
    )
    found += [b"\x01GET %b HTTP/1.1\r\nHost: open.test\r\n\r\n" % path for path in paths]
    hosts_odd = (
        b"127.1",
        b"0x7f.1",
        b"a@b.test",
        b"open.test.",
        b"OPEN.TEST",
        b"a..test",
        b"[::1]",
        b"[::ffff:10.0.0.1]",
        b"a\\b",
        b"a%00.open.test",
        b"open.test:083",
    )
    found += [b"\0GET http://%b/ HTTP/1.1\r\nHost: %b\r\n\r\n" % (host, host) for host in hosts_odd]
    small = (
        b"\x81GET / HTTP/1.1\r\nHost: open.test\r\n" + b"".join(b"A%d: b\r\n" % number for number in range(5)) + b"\r\n"
    )
    late = b"\x01GET //a HT\0\0TP/1..1\r\nHost:'open\r\n"  # a first line in two pieces was not refused before its end
    return [*found, socket, small, late]


def _responses() -> list[bytes]:
    heads = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: x\r\nServer: y\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: X\r\nX: 1\r\n",
        b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 204\r\n", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n", b"HTTP/1.1 100 Continue\r\n", b"HTTP/1.1 407 No\r\n",
        b"HTTP/1.1 101 Go\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: x\r\n", b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n",
        b"HTTP/1.1 200 OK\r\nAlt-Svc: h3\r\nProxy-Authenticate: x\r\nX-Stockade-Reason: y\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 0\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"HTTP/1.1 200 caf\xc3\xa9\r\nContent-Length: 1\r\n",
    )  # fmt: skip
    return [bytes((number % 4 + (4 if b" 101 " in head else 0),)) + head + b"\r\n" for number, head in enumerate(heads)]


def _chunked() -> list[bytes]:
    bodies = (
        b"5\r\nhello\r\n0\r\n\r\n", b"0\r\n\r\n", b'5;a=b\r\nhello\r\n0;c="d\\""\r\n\r\nrest', b"A\r\n0123456789\r\n1\r\nx\r\n0\r\nX: 1\r\nY: 2\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n", b"2\r\nabXX0\r\n\r\n", b"3 \r\nabc\r\n0\r\n\r\n", b"fffffffffffffff\r\n", b"5\nhello\n0\n\n",
    )  # fmt: skip
    return [bytes((step,)) + body for body in bodies for step in (0, 30)]


def _hello() -> list[bytes]:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=_HELLO_HOST)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        real = outgoing.read()
    body = real[9:]
    cut = body.index(_HELLO_HOST.encode()) - 11  # the two bytes that say how long the extensions are
    extensions = body[cut + 2 :]
    ech = b"\xfe\x0d\x00\x05\x00aaaa"
    inner = (body, body[:cut], extensions, extensions + ech, ech + extensions, b"")
    found = [
        b"\0" + real,
        b"\0" + real[:100],
        b"\0SSH-2.0-x\r\n",
        b"\0GET / HTTP/1.1\r\n\r\n",
        b"\0\x15\x03\x01\x00\x02\x02\x28",
    ]
    found += [
        bytes((form | size << 2,)) + part
        for part, forms in zip(inner, (1, 1, 2, 2, 2, 2), strict=True)
        for form, size in ((forms, 0), (forms, 2))
    ]
    names = (
        b"tunnel.test",
        b"TUNNEL.test.",
        b"evil.test",
        b"tunnel.test\nevil.test",
        b"11.0.0.5",
        b"tunnel.test\0.evil.test",
        b"xn--bcher-kva.test",
        b"",
    )
    return found + [b"\3" + name for name in names]


def _queries() -> list[bytes]:
    name = b"\x05files\x07example\x04test\x00"
    opt = b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x08\x00\x0a\x00\x04abcd"
    head = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00"
    plain = [
        head + b"\x00" + name + kind + b"\x00\x01" for kind in (b"\x00\x01", b"\x00\x1c", b"\x00\x41", b"\x00\xff")
    ]
    odd = [
        head + b"\x01" + name + b"\x00\x01\x00\x01" + opt,
        head[:2] + b"\x81\x80" + head[4:] + b"\x00" + name + b"\x00\x01\x00\x01",
        b"\0" * 11,
    ]
    tails = [
        b"\x80" + name + b"\x00\x01\x00\x01",
        b"\x81" + name + b"\x00\x1c\x00\x01" + opt,
        b"\x80\xc0\x0c\x00\x01\x00\x01",
        b"\x80\x03a.b\x00\x00\x01\x00\x01",
    ]
    return [
        *(b"\0" + packet for packet in plain + odd),
        *tails,
        b"\x80\x3f" + b"a" * 63 + b"\x00\x00\x01\x00\x01",
        b"\x80\x00\x00\x01\x00\x01",
    ]


def _answers() -> list[bytes]:
    first, target = b"\xc0\x0c", b"\x04link\x07example\x04test\x00"

    def record(owner: bytes, kind: int, data: bytes, ttl: int = 60) -> bytes:
        return owner + struct.pack(">HHIH", kind, 1, ttl, len(data)) + data

    a, aaaa = record(first, 1, b"\x0b\0\0\5"), record(first, 28, bytes.fromhex("26000005") + b"\0" * 12)
    opt = b"\0" + struct.pack(">HHIH", 41, 1232, 0, 0)
    chain = record(first, 5, target, 30) + record(b"\xc0\x30", 1, b"\x0b\0\0\6")
    sets = (
        (1, a),
        (2, a + record(first, 1, b"\x0a\0\0\1")),
        (2, chain),
        (2, chain[::-1]),
        (0x21, a + opt),
        (1, record(first, 5, first)),
        (0x20, opt),
        (9, a + record(first, 16, b"\3abc")),
    )
    found = [bytes((0x80, count, flags)) + records for count, records in sets for flags in (0, 3)]
    found += [b"\x81\x01\x00" + aaaa, b"\x82\x01\x00" + a, b"\x80\x01\x05" + a]
    question = b"\x05files\x07example\x04test\x00\x00\x01\x00\x01"
    return [*found, b"\0" + struct.pack(">6H", 0x4D2E, 0x8180, 1, 1, 0, 0) + question + a]


def _socks() -> list[bytes]:
    greetings = (
        b"\x05\x01\x00",
        b"\x05\x02\x00\x02",
        b"\x05\x01\x02",
        b"\x04\x01\x01\xbb\x0b\0\0\5x\0",
        b"\x05\x00",
        b"\x05\x21" + b"\0" * 33,
    )
    names = (b"open.test", b"127.0.0.1", b"::1", b"[::1]", b"a\0.open.test", b"OPEN.TEST.", b"", b"a" * 255)
    requests = [b"\x05\x01\x00\x03" + bytes((len(name),)) + name + b"\x01\xbb" for name in names]
    requests += [
        b"\x05\x01\x00\x01\x0b\0\0\5\0\x50",
        b"\x05\x01\x00\x04" + bytes.fromhex("26000005") + b"\0" * 11 + b"\5\x01\xbb",
        b"\x05\x02\x00\x01" + b"\0" * 6,
        b"\x05\x03\x00\x03\x01a\0\0",
    ]
    return [b"\0" + greeting for greeting in greetings] + [b"\1" + request for request in requests]


def _secrets() -> list[bytes]:
    texts = (
        b"",
        b"abcdefgh" * 8,
        b"s3cr3t!",
        b"%73%33cr3t",
        b"a%",
        b"\\n\n  \t",
        b"x" * 100 + b"czNj",
        b"first\r\nsecond",
    )
    return [bytes((how << 2 | which, 5)) + text for how, text in enumerate(texts) for which in range(4)]


def _policies() -> list[bytes]:
    head = "version: 1\negress:\n"
    rules = (
        "{host: a.test, ports: [443]}", '{host: "*.a.test", methods: [GET], paths: ["/p/**"], ports: [80, 443]}', "{host: a.test, read_only: true}",
        "{host: a.test, tcp: true, ports: [22]}", "{host: a.test, tls: opaque}", "{host: a.test, ech: deny, websocket: true, methods: [GET]}",
        "{host: a.test, methods: [GET], query: {service: git-upload-pack}, limits: {requests_per_minute: 5}}", "{host: 11.0.0.5, ports: [443], store: true, methods: [GET]}",
    )  # fmt: skip
    found = [f"{head}  allow:\n    - {rule}\n" for rule in rules]
    found += [
        f"{head}  mode: replay\n  recording: first\n  presets: [pypi-read]\n",
        f"{head}  limits: {{requests_per_minute: 10, bytes_out: 1 MiB, idle: 10 s}}\n  deny_cidrs: [10.0.0.0/8]\n",
        f"{head}  allow:\n    - host: a.test\n      paths:\n        - /a/*\n      methods: [GET]\n  deny:\n    - {{host: b.a.test}}\n",
        "version: 1\nservices:\n  - {name: model, address: 10.0.0.7, port: 9000, methods: [POST], paths: [/v1/**]}\n",
        "version: 1\nsandbox: {memory: 1 GiB}\ndata: {private: false}\n", "version: 1\n", "[]\n", "a: &x 1\nb: *x\n", "a: !!int 1\n", "? a\n: b\n", "a: |\n  text\n", '"\\u0041": "\\x41"\n',
    ]  # fmt: skip
    return [text.encode() for text in found]


def _entries() -> list[bytes]:
    empty = hashlib.sha256(b"").hexdigest()
    keys = [
        f"stockade-key 1 {mode}\nGET https 443 files.test\n/a/b\n{query}\n{empty}\n-\naccept:=*/*\nx-a:#{empty}\n".encode()
        for mode in ("live", "record") for query in ("-", "?q=1")
    ]  # fmt: skip
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\n"
    entries = [b"%d %d 5 %b\n%b%b" % (len(key), len(head), empty.encode(), key, head) for key in keys]
    whole = [b"stockade-store 1 " + hashlib.sha256(entry).hexdigest().encode() + b" " + entry for entry in entries]
    one = b"GET /a?b HTTP/1.1\r\nHost: files.test\r\nAccept: x\r\n%b\r\n"
    pairs = [
        one % b"" + b"\n\n\n" + one % more
        for more in (b"", b"X-A: 1\r\n", b"Range: bytes=0-1\r\n", b"accept: y\r\n", b"Date: x\r\nTraceparent: y\r\n")
    ]
    return (
        [b"\0" + key for key in keys]
        + [b"\2" + entry for entry in entries]
        + [b"\1" + raw for raw in whole]
        + [mode + pair for pair in pairs for mode in (b"\3", b"\7")]
    )


_SEEDS = {
    "requests": _requests,
    "responses": _responses,
    "chunked": _chunked,
    "hello": _hello,
    "queries": _queries,
    "answers": _answers,
    "socks": _socks,
    "secrets": _secrets,
    "policies": _policies,
    "entries": _entries,
}
