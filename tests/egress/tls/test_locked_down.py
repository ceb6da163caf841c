"""Minting, both handshakes and their failures work in a process that has given up the disk, as a worker has."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from stockade.egress._channel import worker_environment
from tests.support import ROOT

PROGRAM = r"""
import json, os, socket, ssl, sys
from stockade.egress import _lockdown, _mint, _tls_stream
from stockade.egress._authority import make_authority
from stockade.egress._loop import Loop
from stockade.egress._stream import Stream

made = make_authority(["files.test"], run_id="r")
mint = _mint.Mint(made.cert_pem, made.key_pem)
upstream = _mint.upstream_context(made.cert_pem)
stranger = _mint.upstream_context(make_authority(["files.test"], run_id="other").cert_pem)

pairs = [socket.socketpair() for _ in range(4)]

_lockdown.preload_codecs()
if os.geteuid() == 0:
    _lockdown.drop_privileges(65534, 65534)
_lockdown.harden_process()
locked = _lockdown.lock_down()
_lockdown.forget_paths()
before = set(sys.modules)
try:
    open("/etc/hostname").close()
    readable = True
except OSError:
    readable = False

def fault(error):
    raise error

def talk(host, client_context):
    loop, told, got = Loop(), [], []
    one, other = pairs.pop()
    one.setblocking(False)
    other.setblocking(False)
    def hear(events):
        piece = server.receive()
        if piece:
            got.append(piece.decode())
            server.send(b"pong")
        elif piece == b"":
            loop.stop()
    def answer(events):
        piece = client.receive()
        if piece:
            got.append(piece.decode())
            client.close()
    def greeted(why):
        told.append(why)
        if why is None:
            client.send(b"ping")
        else:
            loop.stop()
    server = _tls_stream.TlsStream.server(Stream(loop, one, hear, fault), mint.context(host), b"", told.append)
    client = _tls_stream.TlsStream.client(Stream(loop, other, answer, fault), client_context, "files.test", greeted)
    loop.run()
    server.close()
    client.close()
    return [*told, *got]

outcome = {
    "good": [talk("files.test", upstream), talk("files.test", upstream)],
    "another name": talk("other.test", upstream),
    "a stranger": talk("files.test", stranger),
    "imported": sorted(set(sys.modules) - before),
    "readable": readable,
    "landlock": str(getattr(locked, "landlock", locked)),
    "uid": os.geteuid(),
}
print(json.dumps(outcome))
"""


def test_everything_works_without_the_disk() -> None:
    environment = {**worker_environment(), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    good = outcome["good"]
    assert sorted(good[0], key=str) == sorted(good[1], key=str) == [None, None, "ping", "pong"]
    assert outcome["another name"] == ["certificate: for another name"]
    assert outcome["a stranger"] in (
        ["certificate: self-signed certificate in certificate chain"],
        ["certificate: unable to get local issuer certificate"],
    )
    assert outcome["imported"] == []
    assert outcome["readable"] is (outcome["landlock"] == "unenforced")
    assert os.geteuid() != 0 or outcome["uid"] == 65534
