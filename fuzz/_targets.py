"""The targets by name: which module holds the check, which packages its coverage is followed in, and its words.

Nothing of the package is imported here: in a fuzzing process that must happen under the instrumentation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

_HTTP = (
    b"\r\n", b"\r\n\r\n", b"HTTP/1.1", b"HTTP/1.0", b"http://", b"https://", b": ", b"Host", b"Connection", b"close",
    b"keep-alive", b"Upgrade", b"websocket", b"h2c", b"Content-Length", b"Transfer-Encoding", b"chunked", b"identity",
    b"\t", b"\x00", b"\x7f", b"\x80", b"\n", b"\r",
)  # fmt: skip
_REQUEST = (
    b"GET ", b"POST ", b"HEAD ", b"PUT ", b"CONNECT ", b"OPTIONS ", b"DELETE ", b"TRACE ", b"Expect", b"100-continue",
    b"Proxy-Authorization", b"X-HTTP-Method-Override", b"X_Forwarded_For", b"Authorization", b"Cookie", b"X-Api-Key",
    b"Sec-WebSocket-Key", b"X-Rollout-Id", b"open.test", b"plain.test", b"read.test", b"a.wild.test", b"key.test",
    b"socket.test", b"raw.test", b"[2600:5::5]", b"11.0.0.5", b"model.stockade.internal", b"node.test", b":443", b":80",
    b":8443", b":9000", b"%2e", b"%2F", b"%25", b"%5c", b"/../", b"//", b";", b"?service=git-upload-pack", b"_method=",
    b"@", b"#", b"\\", b"canary-5ecret-value", b"/a/b", b"/own/x", b"/closed/", b"/ws", b"/v1/x",
)  # fmt: skip
_DNS = (
    b"\x05files\x07example\x04test\x00", b"\x00\x01\x00\x01", b"\x00\x1c\x00\x01", b"\xc0\x0c", b"\xc0\x24", b"\xc0\x12",
    b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00", b"\x00\x05\x00\x01", b"\x00\x04\x0b\x00\x00\x05", b"\x3f",
)  # fmt: skip


class Target(NamedTuple):
    """``module`` has the ``check``; ``follow`` are the packages whose coverage guides; ``max_len`` in bytes."""

    module: str
    follow: tuple[str, ...]
    max_len: int
    words: tuple[bytes, ...]

    def check(self) -> Callable[[bytes], None]:
        """Import the target and return its function."""
        check: Callable[[bytes], None] = importlib.import_module(self.module).check
        return check


_GATE = ("stockade.egress.gate",)

TARGETS = {
    "requests": Target("fuzz._requests", _GATE, 2048, _HTTP + _REQUEST),
    "responses": Target(
        "fuzz._responses", _GATE, 2048, (*_HTTP, b"200 OK", b"204", b"304", b"100", b"101", b"407", b"ETag", b"Set-Cookie", b"Alt-Svc")
    ),
    "chunked": Target(
        "fuzz._chunked", _GATE, 1024, (b"\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b";a=b", b';a="b"', b"X: 1\r\n", b"\\", b"ffffffff")
    ),
    "hello": Target(
        "fuzz._hello", _GATE, 4096,
        (b"\x16\x03\x01", b"\x16\x03\x03", b"\x01\x00", b"\x03\x03", b"\x00\x00", b"\xfe\x0d", b"\xff\xce", b"tunnel.test",
         b"a.b.test", b"TUNNEL.TEST.", b"xn--bcher-kva.test", b"11.0.0.5", b"\x00\x2b\x00\x03\x02\x03\x04", b"\x13\x01"),
    ),
    "queries": Target("fuzz._queries", _GATE, 1100, (*_DNS, b"\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00")),
    "answers": Target("fuzz._answers", ("stockade.egress._message", "stockade.egress.gate._address"), 1024, _DNS),
    "socks": Target(
        "fuzz._socks", _GATE, 300, (b"\x05\x01\x00\x03", b"\x05\x01\x00\x01", b"\x05\x01\x00\x04", b"\x05\x02\x00\x01", b"open.test", b"\x01\xbb", b"\x00\x50", b"[::1]", b"::1", b"127.1")
    ),
    "secrets": Target("fuzz._secrets", _GATE, 512, (b"s3cr3t!x", b"%25", b"%73", b"canary", b"first", b"second", b"czNjcjN0IXg", b"7333637233742178")),
    "policies": Target(
        "fuzz._policies", ("stockade.policy",), 4096,
        (b"version: 1\n", b"egress:\n", b"  allow:\n", b"    - {host: ", b"a.test", b"*.a.test", b", ports: [443]", b", methods: [GET]",
         b', paths: ["/**"]', b"read_only: true", b"tcp: true", b"tls: ", b"opaque", b"inspect", b"ech: ", b"limits: {", b"requests_per_minute: 5",
         b"bytes_out: 1 MiB", b"deny:\n", b"presets: [pypi-read]", b"mode: ", b"record", b"deny_cidrs: [", b"10.0.0.0/8", b"services:\n", b"store: true",
         b"query: {", b"websocket: true", b"sandbox:\n", b"&a ", b"*a", b"!!str ", b"<<: ", b"---\n", b"|\n", b"'", b'"', b"#", b"~"),
    ),
    "entries": Target(
        "fuzz._entries", ("stockade.egress._keys", "stockade.egress._store_entry", "stockade.egress.gate"), 2048,
        (b"stockade-store 1 ", b"stockade-key 1 live\n", b"stockade-key 1 record\n", b"GET https 443 files.test\n", b"/\n", b"-\n", b"HTTP/1.1 200 OK\r\n",
         b"Content-Length: 5\r\n", b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: files.test\r\n", b"\n\n\n", b"accept:=*/*\n", b"range:", b"cookie:#"),
    ),
}  # fmt: skip
