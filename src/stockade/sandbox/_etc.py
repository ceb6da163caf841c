"""The files of ``/etc`` inside a sandbox: the few that programs fail without, with nothing of this host in them.

The host's own would tell who works here and which servers there are; an empty ``/etc`` breaks ``getpwuid``,
``localhost`` and every TLS client.
"""

from __future__ import annotations

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

# Public data that a package manager wrote; read-only, and only where the host has it.
SHARED = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/ca-certificates.conf",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
)
