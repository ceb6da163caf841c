"""The client side of bench.proxy; runs as a file of its own, in a sandbox or outside, on any Python 3 without packages.

Usage: ``python3 _load.py MODE HOST PORT CA AMOUNT [PROXY]`` with MODE ``requests`` (AMOUNT requests on one connection, over
HTTP), ``connects`` (AMOUNT tunnels, one TLS handshake and one request each) or ``bulk`` (AMOUNT bytes through one tunnel).
PROXY is ``host:port`` or absent for a direct connection. Prints the seconds it took.
"""

from __future__ import annotations

import http.client
import ssl
import sys
import time


def open_tls(host: str, port: int, proxy: str | None, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    """Return a connection to ``host``, through a tunnel if there is a proxy."""
    if proxy is None:
        return http.client.HTTPSConnection(host, port, context=context, timeout=60)
    proxy_host, _, proxy_port = proxy.partition(":")
    connection = http.client.HTTPSConnection(proxy_host, int(proxy_port), context=context, timeout=60)
    connection.set_tunnel(host, port)
    return connection


def fetch(connection: http.client.HTTPConnection, target: str, host: str) -> int:
    """GET ``target`` and return the number of bytes of its body."""
    connection.request("GET", target, headers={"Host": host})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{target}: {response.status} {response.read()!r}")
    total = 0
    while piece := response.read(1 << 18):
        total += len(piece)
    return total


def main() -> None:
    """Measure once."""
    mode, host, port_text, authority, amount_text = sys.argv[1:6]
    proxy = sys.argv[6] if len(sys.argv) > 6 else None
    port, amount = int(port_text), int(amount_text)
    context = ssl.create_default_context(cafile=authority)
    start = time.perf_counter()
    if mode == "requests":
        address = proxy or f"{host}:{port}"
        plain = http.client.HTTPConnection(address.partition(":")[0], int(address.partition(":")[2]), timeout=60)
        target = "/small" if proxy is None else f"http://{host}:{port}/small"
        for _ in range(amount):
            fetch(plain, target, f"{host}:{port}")
    elif mode == "connects":
        for _ in range(amount):
            connection = open_tls(host, port, proxy, context)
            fetch(connection, "/small", host)
            connection.close()
    else:
        got = fetch(open_tls(host, port, proxy, context), f"/bytes/{amount}", host)
        assert got == amount, got
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
