"""The egress proxy under everything at once: ``python -m bench.egress_soak --minutes 10``.

Rounds of 200 rollouts with mixed traffic, good and bad, by every way in, against origins in a network namespace, while
workers are killed at random every few seconds. After each round every record is verified and held against what the
origins received (:mod:`bench._soak_check`), and what the agent and its workers hold is compared with the first round.
Ends with exit code 1 at the first thing that is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import resource
import socket
import ssl
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench._soak_check import Caps, Case, Finding, check_rollout
from bench._soak_clients import Guest, act
from bench._soak_lab import OPAQUE_PORT, OWN, RAW_PORT, RESOLVER, STUCK_PORT, TLS_PORT, Origins
from stockade.egress import EgressFault, EgressPool, Equipment, Role, Settings, make_authority
from stockade.egress._ledger import live_accounts, used
from stockade.egress.gate import Rules, RunLimits
from stockade.errors import RecordError
from stockade.events import Context
from stockade.ids import new_rollout_id
from stockade.policy import load_operator, parse_policy
from tests.egress.netlab import NetLab
from tests.egress.proxy.guestnet import GuestNet

RUN_ID = "run-soak"
WORKERS = 2
LIVE = 200
PARALLEL = 2
"""Connections that one rollout has at a time, about."""
ROUND_S = 60.0
KILLS_PER_WINDOW, KILL_WINDOW_S = 2, 20.0
"""The third end of one worker within 10 s ends the attempts to replace it, which is another test's subject. A busy machine
takes notice of an end seconds later."""
POLICY = f"""\
version: 1
egress:
  allow:
    - {{host: plain-@.soak.test, methods: [GET, POST], paths: ["/ok/**"], ports: [80]}}
    - {{host: capped-@.soak.test, methods: [POST], paths: ["/ok/**"], ports: [80], limits: {{bytes_out: 60 KiB}}}}
    - {{host: "*.tun-@.soak.test", ports: [{OPAQUE_PORT}]}}
    - {{host: "*.stuck-@.soak.test", ports: [{STUCK_PORT}]}}
    - {{host: "*.raw-@.soak.test", ports: [{RAW_PORT}], tcp: true}}
    - {{host: insp-@.soak.test, methods: [GET], paths: ["/ok/**"], ports: [{TLS_PORT}]}}
  limits: {{requests_per_minute: 7777, bytes_out: 888 MiB, bytes_in: 999 MiB, bytes_out_per_request: 256 KiB, names: 1024, idle: 8 s, total: 20 s}}
data: {{private: false}}
"""
_MIB = 1 << 20
_RUN_BYTES = 1 << 50
_PIECE = 256 << 10
"""The most that is counted at once."""
_FREE_PIPES = 128
"""Descriptors of empty pipes that a worker may keep."""
_RSS_FACTOR, _RSS_SLACK = 1.3, 24 * _MIB


@dataclass(slots=True)
class Soaked:
    """One rollout, from attach to detach."""

    guest: Guest
    rollout_id: str
    listener: socket.socket
    record: int
    path: Path
    caps: Caps
    since_s: float
    frozen: int | None = None


@dataclass(slots=True)
class Report:
    """What the soak came to."""

    problems: list[str] = field(default_factory=list)
    rounds: int = 0
    rollouts: int = 0
    kills: list[int] = field(default_factory=list)
    actions: Counter[str] = field(default_factory=Counter)
    wins: Counter[str] = field(default_factory=Counter)
    """How much came back whole, by action."""
    sums: Counter[str] = field(default_factory=Counter)
    held: list[tuple[int, int, int, int]] = field(default_factory=list)
    """After each round: descriptors of the agent and of its workers, bytes of memory of both."""


class Soak:
    """The soak; ``live`` rollouts a round, of ``round_s`` seconds."""

    def __init__(self, folder: Path, lab: NetLab, *, live: int = LIVE, round_s: float = ROUND_S, seed: int = 0) -> None:
        self.report = Report()
        self._folder = folder
        self._live, self._round_s = live, round_s
        self._origins = Origins(lab)
        self._chance = random.Random(seed)  # noqa: S311 - traffic, no secrets
        self._authority = make_authority(["*.soak.test"], run_id=RUN_ID)
        self._trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._trust.load_verify_locations(cadata=self._authority.cert_pem.decode("ascii"))
        roots = self._origins.authority.cert_pem.bytes()
        self._faults: list[str] = []
        self._pool = EgressPool(
            settings=Settings(resolvers=(RESOLVER,), run_limits=RunLimits(bytes_out=_RUN_BYTES, bytes_in=_RUN_BYTES)),
            equipment=Equipment(
                authority_cert=self._authority.cert_pem, authority_key=self._authority.key_pem, roots=roots
            ),
            workers=WORKERS,
            own_addresses=lambda: [OWN],
            prefix=lab.command([]),
            on_broken=lambda rollout_id, why: self._faults.append(f"{rollout_id} broke: {why}"),
            on_fault=lambda rollout_id, why: self._faults.append(f"{rollout_id} has no way out: {why}"),
        )
        policy = parse_policy(POLICY.replace("@", "11111"), source="soak")
        self._rules = Rules.from_policy(policy, load_operator(None), inspection=True).to_json()
        self._number = 0
        self._nets: list[GuestNet] = []
        self._killed: dict[int, list[float]] = {place: [] for place in range(WORKERS)}

    # ---- life

    async def run(self, minutes: float) -> Report:
        """Soak for that long, at least two rounds."""
        end = time.monotonic() + minutes * 60
        await self._origins.start()
        try:
            async with self._pool:
                self._nets = [GuestNet((80, OPAQUE_PORT)) for _ in range(max(1, self._live // 20))]
                while not self.report.problems and (self.report.rounds < 2 or time.monotonic() < end):
                    # In the second half one worker is spared, so that it can grow, if it does.
                    spared = time.monotonic() > end - minutes * 30
                    await self._round(killing=(0,) if spared else (0, 1))
        finally:
            for net in self._nets:
                net.close()
            await self._origins.close()
        return self.report

    async def _round(self, *, killing: tuple[int, ...]) -> None:
        report = self.report
        rollouts = [await self._attach(place) for place in range(self._live)]
        killer = asyncio.ensure_future(self._kill(killing))
        end = time.monotonic() + self._round_s
        wrong: list[str] = []
        tasks = [asyncio.ensure_future(self._live_on(one, end, wrong)) for one in rollouts for _ in range(PARALLEL)]
        # Some are cut off while they run, some end while their connections are open.
        await asyncio.sleep(self._round_s * 0.7)
        for one in rollouts[::16]:
            await self._pool.revoke(one.rollout_id)
            await self._origins.quiet(one.guest.number)
            one.frozen = self._origins.received[one.guest.number]
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        early = rollouts[::3]
        cases = await self._detach_all(early)
        await asyncio.gather(*tasks)
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        cases += await self._detach_all([one for one in rollouts if one not in early])
        for case in cases:
            await self._origins.quiet(case.number)
            self._take(case, check_rollout(case, self._origins, report.kills))
            self._origins.forget(case.number)
        report.problems += [*self._faults, *dict.fromkeys(self._origins.trespasses), *wrong]
        report.rounds += 1
        report.rollouts += len(rollouts)
        for one in rollouts:
            report.wins.update(one.guest.wins)
        await self._measure()
        show(report)

    def _take(self, case: Case, finding: Finding) -> None:
        self.report.problems += [f"rollout {case.number}: {problem}" for problem in finding.problems]
        for name in ("events", "permitted", "denied", "unended", "exact", "bytes_out", "bytes_in"):
            self.report.sums[name] += getattr(finding, name)
        case.path.unlink()

    # ---- rollouts

    def _caps(self, number: int) -> Caps:
        """A fifth has little to send, a fifth little to fetch, a tenth few requests."""
        caps = Caps(64 * _MIB, 512 * _MIB, 60 << 10, 6000)
        if number % 5 == 1:
            caps.bytes_out = 300_001
        elif number % 5 == 2:
            caps.bytes_in = 2_000_003
        elif number % 10 == 3:
            caps.requests_per_minute = 20
        return caps

    async def _attach(self, place: int) -> Soaked:
        number = self._number
        self._number += 1
        rollout_id, caps = new_rollout_id(), self._caps(number)
        text = self._rules.replace("11111", str(number)).replace(
            '"requests_per_minute":7777', f'"requests_per_minute":{caps.requests_per_minute}'
        )
        text = text.replace(str(888 * _MIB), str(caps.bytes_out)).replace(str(999 * _MIB), str(caps.bytes_in))
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        path = self._folder / f"{rollout_id}.egress.jsonl"
        record = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        net = self._nets[place] if place < len(self._nets) else None
        sockets = {fd: role for fd, role in net.sockets.items() if role is not Role.PROXY} if net is not None else {}
        await self._pool.attach(
            rollout_id,
            context=Context(RUN_ID, rollout_id, "sha256:" + "0" * 64),
            rules=Rules.from_json(text),
            sockets={listener.fileno(): Role.PROXY, **sockets},
            record=record,
            record_path=path,
        )
        chance = random.Random(self._chance.random())  # noqa: S311
        guest = Guest(number, listener.getsockname()[:2], self._trust, chance, net)
        return Soaked(guest, rollout_id, listener, record, path, caps, time.monotonic())

    async def _live_on(self, one: Soaked, end: float, wrong: list[str]) -> None:
        """Do one thing after the other until the round is over."""
        while time.monotonic() < end and not wrong:
            await asyncio.sleep(one.guest.chance.expovariate(1))
            await act(one.guest, self.report.actions, wrong)

    async def _detach_all(self, rollouts: list[Soaked]) -> list[Case]:
        """Detach those that still have a way out; why the others have none is among the faults."""
        cases = []
        for one in rollouts:
            try:
                cases.append(await self._detach(one))
            except (EgressFault, RecordError) as error:
                self._faults.append(str(error))
                one.listener.close()
                os.close(one.record)
        return cases

    async def _detach(self, one: Soaked) -> Case:
        usage = (await self._pool.detach(one.rollout_id)).usage
        # The last copy of the listener: whoever waits in its queue is told, and needs not wait for an end.
        one.listener.close()
        os.close(one.record)
        guest, alive_s = one.guest, time.monotonic() - one.since_s
        return Case(
            guest.number,
            one.rollout_id,
            RUN_ID,
            one.path,
            usage,
            one.caps,
            alive_s,
            time.time_ns(),
            guest.done,
            guest.got,
        )

    # ---- workers

    async def _kill(self, places: tuple[int, ...]) -> None:
        """Kill one of the workers every few seconds."""
        times = self._killed
        while True:
            await asyncio.sleep(self._chance.uniform(1.5, 5.5))
            place, now = self._chance.choice(places), time.monotonic()
            times[place] = [at for at in times[place] if at > now - KILL_WINDOW_S]
            pids = self._pool.pids
            if len(times[place]) < KILLS_PER_WINDOW and len(pids) == WORKERS:
                times[place].append(now)
                self.report.kills.append(time.time_ns())
                # Numbers are used again: only a child of ours, which nobody else reaps in between, may be hit.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pids[place])
                    if process.ppid() == os.getpid():
                        process.kill()

    async def _measure(self) -> None:
        """Note what agent and workers hold when no rollout is attached, and compare it with the first time."""
        deadline = time.monotonic() + 30
        while (await self._pool.stats()).workers < WORKERS or len(self._pool.pids) < WORKERS:
            if time.monotonic() > deadline:
                self.report.problems.append("a killed worker was not replaced")
                return
            await asyncio.sleep(0.1)
        stats = await self._pool.stats()
        if stats.rollouts or stats.connections:
            self.report.problems.append(
                f"left in the workers: {stats.rollouts} rollouts, {stats.connections} connections"
            )
        # The run's account is counted in before the rollout's: each kill may come between the two, once.
        run = used(self._pool._run_ledger, accounts=1 + live_accounts(WORKERS), names=0)  # noqa: SLF001
        for name, counted in zip(("bytes_out", "bytes_in"), run[:2], strict=True):
            if not 0 <= counted - self.report.sums[name] <= len(self.report.kills) * _PIECE:
                self.report.problems.append(f"{name} of the run: {counted}, of its rollouts {self.report.sums[name]}")
        if stats.restarts > len(self.report.kills):
            self.report.problems.append(
                f"{len(self.report.kills)} kills, {stats.restarts} new workers: one ended by itself"
            )
        await asyncio.sleep(0.5)
        gc.collect()
        me, below = psutil.Process(), [psutil.Process(pid) for pid in self._pool.pids]
        self.report.held.append(
            (
                me.num_fds(),
                max(process.num_fds() for process in below),
                me.memory_info().rss,
                max(process.memory_info().rss for process in below),
            )
        )
        first, now = self.report.held[0], self.report.held[-1]
        if now[0] > first[0]:
            self.report.problems.append(f"descriptors of the agent: {first[0]} → {now[0]}")
        if now[1] > first[1] + _FREE_PIPES:
            self.report.problems.append(f"descriptors of a worker: {first[1]} → {now[1]}")
        for index, who in ((2, "agent"), (3, "worker")):
            if now[index] > first[index] * _RSS_FACTOR + _RSS_SLACK:
                self.report.problems.append(
                    f"memory of the {who}: {first[index] / _MIB:.0f} → {now[index] / _MIB:.0f} MiB"
                )


def show(report: Report) -> None:
    """Print the last round, and what all came to so far."""
    sums, held = report.sums, report.held[-1] if report.held else (0, 0, 0, 0)
    print(
        f"round {report.rounds}: {report.rollouts} rollouts, {sum(report.actions.values())} actions, {len(report.kills)} kills; "
        f"{sums['events']} events verified: {sums['permitted']} permitted, {sums['denied']} denied, {sums['unended']} ends lost to kills, "
        f"{sums['exact']} messages equal to the byte; {sums['bytes_out'] / _MIB:.1f} MiB out, {sums['bytes_in'] / _MIB:.1f} MiB in; "
        f"descriptors {held[0]} agent, {held[1]} worker; memory {held[2] / _MIB:.0f} MiB agent, {held[3] / _MIB:.0f} MiB worker",
        flush=True,
    )


async def soak(minutes: float, *, live: int = LIVE, round_s: float = ROUND_S, seed: int = 0) -> Report:
    """Soak in a lab of its own, and return what came of it."""
    with tempfile.TemporaryDirectory(prefix="sk-soak-") as folder, NetLab() as lab:
        return await Soak(Path(folder), lab, live=live, round_s=round_s, seed=seed).run(minutes)


def main() -> int:
    """Soak and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.egress_soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--live", type=int, default=LIVE, help=f"rollouts at a time (default: {LIVE})")
    parser.add_argument("--round", type=float, default=ROUND_S, help=f"seconds of a round (default: {ROUND_S:g})")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = asyncio.run(soak(given.minutes, live=given.live, round_s=given.round, seed=given.seed))
    print("actions: " + ", ".join(f"{name} {count}" for name, count in sorted(report.actions.items())))
    print("came back whole: " + ", ".join(f"{name} {count}" for name, count in sorted(report.wins.items())))
    report.problems += [f"left behind: {child}" for child in psutil.Process().children(recursive=True)]
    for problem in report.problems[:50]:
        print(problem, file=sys.stderr)
    print(f"{len(report.problems)} problems" if report.problems else "nothing is wrong")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
