"""The worker itself, driven as the node agent drives it: a pool, attached rollouts, records on disk, names by DNS.

Settings, authority and store are made by the agent's own code out of a policy and an operator's file, so that what is
measured is what runs.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from bench.egress._lab import INSPECTED, OWN, PLAIN, RESOLVER, SILENT_NAME, STORED, TUNNEL, Cores, Lab
from bench.egress._meter import tree
from bench.egress._peers import FILLERS, WILDCARDS, Peer
from stockade.agent._wayout import way_out
from stockade.egress import EgressPool
from stockade.events import Context
from stockade.ids import new_rollout_id
from stockade.policy import load_operator, parse_policy

POLICY = f"""\
version: 1
egress:
  allow:
    - {{host: {PLAIN}, methods: [GET], paths: ["/**"], ports: [80]}}
    - {{host: {TUNNEL}, ports: [443]}}
    - {{host: {INSPECTED}, methods: [GET], paths: ["/**"], ports: [443]}}
    - {{host: {STORED}, methods: [GET], paths: ["/**"], ports: [80, 443], store: true}}
    - {{host: {SILENT_NAME}, ports: [443]}}
    @FILLERS@
  limits:
    requests_per_minute: 1000000
    connections: 10000
    bytes_out: 100 GiB
    bytes_in: 1 TiB
    idle: 60 min
    total: 60 min
data: {{private: false}}
"""

OPERATOR = """\
version: 1
extra_roots: "@ROOTS@"
store: {path: "@STORE@", max_bytes: 8 GiB}
"""


class Ours(Peer):
    """One egress worker of a real pool; each door is an attached rollout with a listener and a record of its own."""

    name = "worker"
    inspects = True
    rollouts = True
    stores = True

    def __init__(self, folder: Path, cores: Cores, lab: Lab) -> None:
        self.folder = folder / "worker"
        self.folder.mkdir()
        self._cores = cores
        settings = self.folder / "operator.yaml"
        store = self.folder / "store"
        settings.write_text(OPERATOR.replace("@ROOTS@", str(lab.roots)).replace("@STORE@", str(store)))
        settings.chmod(0o600)
        policy, operator = parse_policy(_policy(), source="bench"), load_operator(settings)
        self._way_out = way_out(policy, operator, run_id="run-bench", resolvers=(RESOLVER,), worker_uid=None)
        self._rules = self._way_out.rules(policy, operator)
        self._pool = self._made()
        self._open: dict[str, tuple[socket.socket, int]] = {}

    def _made(self) -> EgressPool:
        return EgressPool(
            settings=self._way_out.settings,
            equipment=self._way_out.equipment,
            workers=1,
            own_addresses=lambda: [OWN],
            prefix=self._cores.prefix,
        )

    async def start(self) -> None:
        """Start the pool's one worker."""
        await self._pool.start()

    async def renew(self) -> None:
        """End the pool, and start another one."""
        await self.shut()
        await self._pool.aclose()
        self._pool = self._made()
        await self.start()

    async def open(self, doors: int) -> list[str]:
        """Attach ``doors`` rollouts; each is one door."""
        words: list[str] = []
        for _ in range(doors):
            rollout_id = new_rollout_id()
            listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
            path = self.folder / f"{rollout_id}.egress.jsonl"
            record = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._open[rollout_id] = (listener, record)
            await self._pool.attach(
                rollout_id,
                context=Context("run-bench", rollout_id, "sha256:" + "0" * 64),
                rules=self._rules,
                listener=listener.fileno(),
                record=record,
                record_path=path,
            )
            words += ["-x", f"127.0.0.1:{listener.getsockname()[1]}"]
        return words

    async def shut(self) -> None:
        """Detach all rollouts and remove their records."""
        while self._open:
            rollout_id, (listener, record) = self._open.popitem()
            await self._pool.detach(rollout_id)
            listener.close()
            os.close(record)
            (self.folder / f"{rollout_id}.egress.jsonl").unlink()

    def pids(self) -> list[int]:
        """The worker."""
        return tree(*self._pool.pids)

    async def close(self) -> None:
        """End the pool."""
        await self.shut()
        await self._pool.aclose()
        self._way_out.close()


def _policy() -> str:
    fillers = [f"- {{host: {name}, ports: [443]}}" for name in FILLERS]
    fillers += [f'- {{host: "*.{name}", ports: [443]}}' for name in WILDCARDS]
    return POLICY.replace("@FILLERS@", "\n    ".join(fillers))
