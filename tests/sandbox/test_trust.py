"""Trust files: what a run trusts, in every sandbox of it, and nothing of it on the host or changed by a sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stockade.ids import new_rollout_id
from stockade.sandbox import NO_LISTENERS, TRUST, Spec
from stockade.sandbox._etc import SHARED, TRUST_FOLDER
from tests.live import MIB, limits
from tests.support import requires

FILES = {"ca.pem": b"one\n", "bundle.pem": os.urandom(300_000), "truststore.p12": os.urandom(4096), "empty": b""}
LOOK = """
import hashlib
found = {}
for name in sorted(os.listdir(ARGS)):
    status = os.stat(f"{ARGS}/{name}")
    with open(f"{ARGS}/{name}", "rb") as file:
        found[name] = [oct(status.st_mode), status.st_size, hashlib.sha256(file.read()).hexdigest()]
say(found)
"""


def expected(files):
    return {name: ["0o100644", len(data), hashlib.sha256(data).hexdigest()] for name, data in sorted(files.items())}


def create(owner, files, **changed):
    spec = Spec(new_rollout_id(), limits(**changed), trust=files, proxied=False)
    sandbox = owner.run(owner.backend.create(spec, NO_LISTENERS))
    owner._made.append(sandbox)
    return sandbox


def test_the_files_are_there_and_cannot_be_changed(owner):
    assert f"/etc/{TRUST_FOLDER}" == TRUST
    sandbox = create(owner, FILES)
    assert owner.inside(sandbox, LOOK, TRUST) == expected(FILES)
    source = """
say([attempt(open, f"{ARGS}/{name}", mode) for name, mode in (("ca.pem", "a"), ("ca.pem", "w"), ("new", "w"))]
    + [attempt(os.unlink, f"{ARGS}/ca.pem"), attempt(os.rename, f"{ARGS}/ca.pem", "/tmp/x"), attempt(os.rmdir, ARGS)]
    + [attempt(os.chmod, f"{ARGS}/ca.pem", 0o777), attempt(os.symlink, "/tmp/x", f"{ARGS}/link")]
    + [attempt(os.rename, ARGS, "/etc/other"), attempt(os.utime, f"{ARGS}/ca.pem")])
"""
    assert set(owner.inside(sandbox, source, TRUST)) <= {"EROFS", "EXDEV"}
    assert owner.inside(sandbox, LOOK, TRUST) == expected(FILES)
    owner.destroy(sandbox)
    assert not Path(TRUST).exists()


def test_each_sandbox_has_those_of_its_own_run(owner):
    """The files of a run are kept for its next sandbox; another run's, in between, are not mixed up with them."""
    others = {"ca.pem": b"two\n", "more.pem": b"x" * 5000}
    sandboxes = [(files, create(owner, dict(files))) for files in (FILES, FILES, others, {}, FILES, others)]
    for files, sandbox in sandboxes:
        if files:
            assert owner.inside(sandbox, LOOK, TRUST) == expected(files)
        else:
            assert owner.inside(sandbox, "say(attempt(os.stat, ARGS))", TRUST) == "ENOENT"
        owner.destroy(sandbox)


def test_many_at_once(owner):
    async def all_of_them():
        specs = [
            Spec(new_rollout_id(), limits(), trust={"ca.pem": bytes([65 + number % 3]) * 70_000}, proxied=False)
            for number in range(9)
        ]
        sandboxes = await asyncio.gather(*(owner.backend.create(spec, NO_LISTENERS) for spec in specs))
        said = [await sandbox.exec(["/usr/bin/head", "-c", "3", f"{TRUST}/ca.pem"]) for sandbox in sandboxes]
        for sandbox in sandboxes:
            await sandbox.destroy()
        return [result.stdout for result in said]

    assert owner.run(all_of_them()) == [bytes([65 + number % 3]) * 3 for number in range(9)]


def test_they_take_nothing_from_the_sandboxs_own_disk(owner):
    sandbox = create(owner, {"bundle.pem": bytes(3 * MIB), "second.pem": bytes(MIB)}, disk=4 * MIB)
    source = """
def fill():
    with open("/workspace/full", "wb") as file:
        file.write(bytes(ARGS))
say(attempt(fill))
"""
    assert owner.inside(sandbox, source, 4 * MIB) == "done"
    owner.destroy(sandbox)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/ca.pem", "../ca.pem", "a\0b", "x" * 256])
def test_only_plain_names(name):
    with pytest.raises(ValueError, match="plain file name"):
        Spec(new_rollout_id(), limits(), trust={name: b"x"})


def test_the_hosts_own_certificates_are_shared_as_they_are(owner, sandbox):
    for path in (path for path in SHARED if Path(path).is_dir()):
        source = "say([sorted(os.listdir(ARGS)), attempt(open, ARGS + '/new', 'w')])"
        names, written = owner.inside(sandbox, source, path)
        assert names == sorted(os.listdir(path))
        assert written == "EROFS"


def test_openssl_reads_its_configuration_and_a_trust_file(owner, sandbox, tmp_path):
    requires(shutil.which("openssl"), "no openssl program")
    certificate = tmp_path / "ca.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=stockade test", "-keyout", str(tmp_path / "key.pem"), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    trusting = create(owner, {"ca.pem": certificate.read_bytes()})
    verify = ["/usr/bin/env", f"SSL_CERT_FILE={TRUST}/ca.pem", "openssl", "verify", f"{TRUST}/ca.pem"]
    result = owner.exec(trusting, verify)
    assert result.stdout == f"{TRUST}/ca.pem: OK\n".encode(), result.stderr
    assert result.stderr == b""
    owner.destroy(trusting)
    result = owner.exec(sandbox, ["openssl", "version", "-d"])
    assert result.exit.code == 0
    assert result.stderr == b""


def test_java_finds_its_security_files(owner):
    """On Debian they are links into /etc/java-*, on Fedora into /etc/java and /etc/pki: without them nothing starts."""
    requires(shutil.which("java"), "no Java here", must_run_in_ci=False)
    sandbox = owner.create(memory=2048 * MIB, pids=512, open_files=4096, disk=256 * MIB)
    source = "public class A { public static void main(String[] a) throws Exception { javax.net.ssl.SSLContext.getDefault(); } }"
    owner.run(sandbox.write_file("/workspace/A.java", source.encode()))
    result = owner.exec(sandbox, ["java", "-Xmx128m", "-XX:+UseSerialGC", "/workspace/A.java"])
    assert result.exit.code == 0, result.stderr.decode()
    owner.destroy(sandbox)
