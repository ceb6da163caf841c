"""A node in a box for attacks: what a careless launcher would expose, planted at its real paths and addresses.

The script makes mount, network and IPC namespaces of its own (as an ordinary user, a user namespace first), mounts empty
directories on /run, /var/spool and /dev/shm, makes internal and metadata addresses local on ``lo``, and plants canaries:
credentials in a home, secrets in the environment and arguments, scheduler, bus, container and agent sockets, a process,
a shared memory segment, listeners. Then it runs probes for the test, line by line on stdin: as a plain child, under
bubblewrap with careless options, and in a real sandbox of a backend that lives in this node. Everything ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from stockade.sandbox import Listeners, _syscalls  # noqa: E402
from stockade.sandbox._tools import find_bubblewrap  # noqa: E402
from tests import live  # noqa: E402
from tests.egress import netlab  # noqa: E402
from tests.outside import Outside  # noqa: E402

_CLONE_NEWIPC = 0x0800_0000
CREDENTIALS = (
    *(".ssh/id_ed25519", ".netrc", ".aws/credentials", ".config/gcloud/credentials.db", ".cache/huggingface/token"),
    *(".bash_history", ".docker/config.json", ".kube/config", ".git-credentials", ".pypirc", ".config/wandb/settings"),
)
SECRET_NAMES = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "SLURM_SRUN_COMM_PORT",
    "PMIX_SERVER_URI",
    "KRB5CCNAME",
)
SOCKETS = {
    "A5": ("/run/munge/munge.socket.2",),
    "A6": ("/var/spool/slurmd/node1_1.0", "/run/slurmctld/sackd.socket"),
    "A9": (
        "gnupg/S.gpg-agent",
        "vscode-ipc-1.sock",
        "jupyter/kernel.sock",
        "/run/screen/S-user/1.tty",
        "/run/tmux/default",
    ),
    "A10": ("/run/dbus/system_bus_socket", "bus", "systemd/private", "/run/systemd/private"),
    "A11": ("/run/docker.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock", "podman/podman.sock"),
}
ABSTRACT = ("containerd-shim/k8s.io/1/shim.sock", "/tmp/.X11-unix/X0", "ray/plasma_store")
ADDRESSES = (
    *(("127.0.0.1", 6379), ("127.0.0.1", 8265), ("::1", 8000), ("169.254.169.254", 80), ("10.1.2.3", 6817)),
    *(
        ("172.16.4.5", 443),
        ("192.168.7.8", 623),
        ("100.64.9.9", 443),
        ("11.0.0.5", 443),
        ("2600:5::5", 443),
        ("fd00::5", 443),
    ),
)
LISTENERS = Listeners(transparent_ports=(80, 443, 6379), dns=True)
"""The ports that come out of the sandbox: some of those at which something listens here, and some that nobody has."""
SEGMENT_KEY = 0x5EC2E7


def make(folder: str) -> None:
    """Make the namespaces, then start again as their only inhabitant, without capabilities where not root."""
    uid, gid = os.geteuid(), os.getegid()
    wanted = _syscalls.CLONE_NEWNS | _syscalls.CLONE_NEWNET | _CLONE_NEWIPC
    if uid:
        _syscalls.unshare(_syscalls.CLONE_NEWUSER | wanted)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    else:
        _syscalls.unshare(wanted)
    _syscalls.mount("none", "/", None, _syscalls.MS_REC | _syscalls.MS_PRIVATE)
    for path in ("/run", "/var/spool", "/dev/shm"):
        _syscalls.mount("canaries", path, "tmpfs", 0, "mode=0755,size=1m")
    netlab._configure()
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    token = os.urandom(16).hex()
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": f"{folder}/home",
        "TMPDIR": f"{folder}/tmp",
        "LANG": "C.UTF-8",
    }
    env |= {name: f"{name}-{token}" for name in SECRET_NAMES} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    os.execve(sys.executable, [sys.executable, "-B", __file__, "--serve", folder, token], env)


class Node:
    """The plantings, and the three ways to run a probe."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.token = folder, token
        self.reached: Counter[str] = Counter()
        self._listening: list[socket.socket] = []
        self._ssh = Path(tempfile.mkdtemp(prefix="ssh-", dir="/tmp"))
        self._leak = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        os.set_inheritable(self._leak, True)  # the careless launcher's: any child may have it
        self.facts = {
            "token": token,
            "credentials": self._credentials(),
            "sockets": self._sockets(),
            "leak": self._leak,
            "abstract": ABSTRACT,
            "addresses": ADDRESSES,
            "transparent": LISTENERS.transparent_ports,
            "key": SEGMENT_KEY,
            "files": self._files(),
        }
        for name in ABSTRACT:
            self._listen(socket.AF_UNIX, f"\0{name}", name)
        for address, port in ADDRESSES:
            self._listen(socket.AF_INET6 if ":" in address else socket.AF_INET, (address, port), f"{address} {port}")
        self._segment()
        self._process = self._planted_process()
        self.facts["pid"] = self._process.pid
        self.owner = live.Owner(folder / "state")
        self.sandbox = self.owner.create(listeners=LISTENERS, proxied=True)
        self.outside = Outside(self.sandbox, LISTENERS)

    def _credentials(self) -> list[str]:
        paths = [self.folder / "home" / name for name in CREDENTIALS]
        for path in paths:
            self._write(path)
        return [str(path) for path in paths]

    def _files(self) -> list[str]:
        names = ["/var/spool/slurmd/job00001/slurm_script", "/var/spool/slurmd/cred_state", "/dev/shm/nccl-canary"]
        names += [
            "/run/user/krb5cc_canary",
            "/run/secrets/kubernetes.io/serviceaccount/token",
            str(self._ssh / "krb5cc_0"),
        ]
        for name in names:
            self._write(Path(name))
        return names

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.token)  # readable for all: what hides it must be the mount table, not its mode

    def _sockets(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for case, names in SOCKETS.items():
            paths = [name if name.startswith("/") else f"/run/user/{os.getuid()}/{name}" for name in names]
            if case == "A9":
                paths.append(str(self._ssh / "agent.1"))
            for path in paths:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._listen(socket.AF_UNIX, path, path)
            found[case] = paths
        return found

    def _listen(self, family: int, address: Any, name: str) -> None:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.bind(address)
        sock.listen(16)
        self._listening.append(sock)

        def serve() -> None:
            while True:
                peer, _ = sock.accept()
                self.reached[name] += 1
                with peer, contextlib.suppress(OSError):
                    peer.sendall(self.token.encode())

        threading.Thread(target=serve, daemon=True).start()

    def _segment(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.shmget(SEGMENT_KEY, 4096, 0o1666) < 0:  # IPC_CREAT; it ends with the namespace
            raise OSError(ctypes.get_errno(), "shmget")

    def _planted_process(self) -> subprocess.Popen[bytes]:
        while True:  # a number that no process of a small sandbox has
            child = subprocess.Popen(["/bin/sleep", "1000"], env={"PLANTED": self.token})
            if child.pid > 1000:
                return child
            child.kill()
            child.wait()

    def answer(self, request: dict[str, Any]) -> Any:
        """Do what the test asks for."""
        if request["op"] == "reached":
            return self.reached + Counter(self.outside.reached)
        arguments = json.dumps(request["arguments"])
        if request["op"] == "inside":
            result = self.owner.exec(
                self.sandbox, self.owner.probe(request["source"], request["arguments"]), timeout_s=30
            )
            return [result.exit.code, result.stdout.decode(), f"{result.exit} {result.stderr.decode()}"]
        command = [
            shutil.which("python3") or sys.executable,
            "-I",
            "-S",
            "-B",
            "-c",
            live.PRELUDE + request["source"],
            arguments,
        ]
        if request["op"] == "careless":
            command = [find_bubblewrap().path, *request["options"], "--", *command]
        done = subprocess.run(command, capture_output=True, timeout=30, check=False, close_fds=False)
        return [done.returncode, done.stdout.decode(), done.stderr.decode()]

    def close(self) -> None:
        """Undo what does not end with the process."""
        self.outside.close()
        self.owner.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._ssh)


def serve(folder: str, token: str) -> None:
    """Answer one JSON object a line until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    node = Node(Path(folder), token)
    try:
        print(json.dumps(node.facts), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(node.answer(json.loads(line))), file=out, flush=True)
    finally:
        node.close()
        asyncio.set_event_loop(None)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    else:
        make(sys.argv[1])
