"""A real SSH server as an origin: Dropbear, under nobody's account, with a home that ends with the test.

It logs in one user by one key. It runs in a user namespace with a password file of its own, so it needs no account of
this machine, and touches none.
"""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from stockade.sandbox._tools import find_bubblewrap
from tests.egress.netlab import Origin

USER = "tester"
_HOME = f"/home/{USER}"


class Shell:
    """The server's files. ``key`` is the user's private key, ``known`` what a client must know of the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sessions = 0
        keys = folder / "home" / ".ssh"
        keys.mkdir(parents=True, mode=0o700)
        subprocess.run(["dropbearkey", "-t", "ed25519", "-f", folder / "host_key"], check=True, capture_output=True)
        shown = subprocess.run(["dropbearkey", "-y", "-f", folder / "host_key"], check=True, capture_output=True)
        self.known = next(line for line in shown.stdout.decode().splitlines() if line.startswith("ssh-ed25519 "))
        # Not by ssh-keygen: it wants to know who runs it, and a test may run under a uid that nobody has.
        private = ed25519.Ed25519PrivateKey.generate()
        encoding = serialization.Encoding
        self.key = private.private_bytes(
            encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        public = private.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (keys / "authorized_keys").write_bytes(public + b"\n")
        (folder / "passwd").write_text(f"{USER}:x:1000:1000::{_HOME}:/bin/sh\n")

    def serve(self, _origin: Origin, sock: socket.socket) -> None:
        """Serve one connection to its end, as inetd would."""
        self.sessions += 1
        mounts = (
            *("--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/home", "--bind", str(self._folder / "home"), _HOME),
            *("--ro-bind", str(self._folder / "passwd"), "/etc/passwd"),
        )
        inside = ("--unshare-user", "--uid", "1000", "--gid", "1000", "--die-with-parent")
        server = ("dropbear", "-i", "-m", "-s", "-j", "-k", "-r", str(self._folder / "host_key"))
        subprocess.run(
            [find_bubblewrap().path, *inside, *mounts, *server],
            stdin=sock.fileno(),
            stdout=sock.fileno(),
            stderr=subprocess.DEVNULL,
            check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
