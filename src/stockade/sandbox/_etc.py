"""The files of ``/etc`` inside a sandbox: the few that programs fail without, with nothing of this host in them.

The host's own would tell who works here and which servers there are; an empty ``/etc`` breaks ``getpwuid``,
``localhost`` and every TLS client.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

FILES = {
    "passwd": (
        "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n"
        "sandbox:x:1000:1000:sandbox:/sandbox/home:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n",
    # Nobody answers here: names are resolved outside, by the proxy, after the policy allowed them.
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
    "shells": "/bin/sh\n/bin/bash\n",
    "machine-id": "00000000000000000000000000000000\n",
}

WITH_DNS = {
    "nsswitch.conf": FILES["nsswitch.conf"].replace("hosts: files\n", "hosts: files dns\n").encode(),
    # The resolver's own defaults: a worker that starts again must not look like a name that does not exist.
    "resolv.conf": b"nameserver 127.0.0.1\n",
}
"""What differs in a sandbox in which port 53 answers, under 127.0.0.1 as under every other address."""

TRUST_FOLDER = "stockade-trust"

# Public data that a package manager wrote. Small files are copied (a mount costs ten times as much), directories
# are mounted read-only, and both only where the host has them.
_COPIED = ("ld.so.cache", "localtime", "mime.types", "protocols", "services", "ssl/openssl.cnf")
_COPY_BYTES = 1 << 20
SHARED = (
    *("/etc/alternatives", "/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted"),
    # The security files of a Java under /usr are links to these, and without them no program of it can start.
    *sorted(str(path) for path in Path("/etc").glob("java*") if path.is_dir()),
)


def content() -> dict[str, bytes]:
    """Return the files of ``/etc`` by path relative to it, read once for all sandboxes."""
    table = {name: text.encode() for name, text in FILES.items()}
    for name in _COPIED:
        with contextlib.suppress(OSError), open(f"/etc/{name}", "rb") as file:
            data = file.read(_COPY_BYTES + 1)
            if len(data) <= _COPY_BYTES:
                table[name] = data
    return table
