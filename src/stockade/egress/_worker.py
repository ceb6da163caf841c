"""The egress worker: one process, one loop, any number of rollouts.

Started by the node agent as ``python -m stockade.egress --control-fd N`` with nothing but a ``SOCK_SEQPACKET``
socket. It reads no file and no environment: configuration, listeners and record descriptors come over that socket
(see :mod:`stockade.egress._wire`), and when the socket closes the process ends. Before it answers ``configure`` it has
given up its user (as root), its chance of new privileges, every system call that it does not need, and, where Landlock
exists, every file but those below the store's directory.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from stockade.egress import _lockdown, _wire
from stockade.egress._connection import Connection
from stockade.egress._equip import Parts, equip, run_account
from stockade.egress._journal import LEARNT, Journal
from stockade.egress._ledger import Ledger, read_memory
from stockade.egress._loop import READ, WRITE, Loop, Watch
from stockade.egress._masking import masking
from stockade.egress._mint import warm
from stockade.egress._names import Names
from stockade.egress._resolver import Resolver
from stockade.egress._roles import Role
from stockade.egress._rollout import Rollout, Shell, first_number
from stockade.egress._settings import Settings
from stockade.egress._shelf import Shelf
from stockade.egress._splice import Pipes
from stockade.egress._usage import context_from, head_from, head_json
from stockade.egress._wire import Json, Message, WireError
from stockade.egress.gate import Account, Address, Budget, Reason, Rules
from stockade.errors import StockadeError
from stockade.events import ChainWriter, Producer

NEWS_S = 1.0
"""How often the worker shows that it lives."""
_MAX_QUEUED = 4096
_RECORD, _LEDGER, _RULES, _SOCKETS = range(4)
_MAX_PLACES = 256


class Worker:
    """Serves one control socket until it closes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._loop = Loop()
        self._shell = Shell(self._loop, Resolver(self._loop), Pipes())
        self._rollouts: dict[str, Rollout] = {}
        self._parts = Parts()
        self._outbox: deque[bytes] = deque()
        self._configured = False
        control.setblocking(False)
        self._watch: Watch = self._loop.watch(control.fileno(), self._on_control, self._on_fault, READ)

    def run(self) -> None:
        """Serve; returns when the agent closed the socket or asked for the end."""
        self._loop.run()
        for rollout in self._rollouts.values():
            rollout.stop(Reason.REVOKED)

    # ---- the control socket

    def _on_control(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if not events & ~WRITE:
            return
        try:
            received = _wire.receive(self._control)
        except BlockingIOError:
            return
        except OSError:
            received = None
        if received is None:
            self._loop.stop()
            return
        message, fds = received
        try:
            self._answer(message, fds)
        finally:
            for fd in fds:  # whoever keeps one has taken it out of the list
                os.close(fd)

    def _answer(self, message: Message, fds: list[int]) -> None:
        number = _wire.number(message, "id")
        try:
            handler = _HANDLERS.get(_wire.text(message, "op"))
            if handler is None:
                raise WireError("unknown operation")
            reply = handler(self, message, fds)
        except (WireError, StockadeError, ValueError, TypeError, OSError) as error:
            self._send({"id": number, "error": f"{type(error).__name__}: {error}"})
            return
        self._send({"id": number, "ok": True, **reply})

    def _send(self, message: Mapping[str, Json]) -> None:
        if len(self._outbox) >= _MAX_QUEUED:
            self._loop.stop()  # an agent that does not read any more is as good as dead
            return
        self._outbox.append(_wire.encode(message))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                _wire.send(self._control, self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._loop.stop()
            return
        self._loop.interest(self._watch, READ | WRITE if self._outbox else READ)

    def _on_fault(self, fault: Exception) -> None:
        """A control channel that cannot be understood leaves nobody to obey: end, and let the agent restart."""
        _complain(f"{type(fault).__name__}: {fault}")
        self._loop.stop()

    # ---- operations

    def configure(self, message: Message, fds: list[int]) -> Message:
        """Take the settings, then give up every privilege; the answer says what was enforced."""
        if self._configured:
            raise WireError("already configured")
        settings = msgspec.json.decode(_wire.text(message, "settings"), type=Settings)
        self._parts = equip(self._shell, settings, _wire.texts(message, "parts"), fds)
        place, places = _wire.number(message, "place"), _wire.number(message, "places")
        if not 0 <= place < places <= _MAX_PLACES:
            raise WireError("no such place")
        self._parts.run = run_account(self._parts, settings.run_limits, place, places)
        self._take_own(message)
        # Before the uid changes: Python may lie in a home that only the agent's user can read.
        warm()
        _lockdown.preload_codecs()
        nofile = _lockdown.raise_nofile()
        _lockdown.drop_privileges(_id(message, "uid"), _id(message, "gid"))
        _lockdown.harden_process()
        by_socket = settings.chain is not None and settings.chain.kind == "unix"
        locked = _lockdown.lock_down(self._parts.store_fd, unix=by_socket)
        _lockdown.forget_paths()
        self._configured = True
        self._loop.call_later(NEWS_S, self._tell, self._on_fault)
        return {
            "landlock": locked.landlock,
            "seccomp": locked.seccomp,
            "nofile": nofile,
            "pid": os.getpid(),
            "uid": os.geteuid(),
        }

    def attach(self, message: Message, fds: list[int]) -> Message:
        """Take over a rollout's sockets and record, and begin to accept."""
        if not self._configured:
            raise WireError("not configured")
        rollout_id = _wire.text(message, "rollout_id")
        if rollout_id in self._rollouts:
            raise WireError(f"{rollout_id} is attached already")
        roles = [Role(role) for role in _wire.texts(message, "roles")]
        if not roles or len(fds) != _SOCKETS + len(roles):
            raise WireError("attach takes record, ledger, rules and the sockets of its roles")
        if Role.GATEWAY in roles and self._shell.gateway_context is None:
            raise WireError("a gateway's listener without its certificate")
        rules = Rules.from_json(read_memory(fds[_RULES]))
        start = None if message.get("chain_start") is None else head_from(_wire.table(message, "chain_start"))
        writer = ChainWriter(fds[_RECORD], context_from(_wire.table(message, "context")), Producer.EGRESS, start=start)
        ledger = Ledger(fds[_LEDGER], accounts=1 + len(rules.rule_limits), names=rules.limits.names)
        if "own_addresses" in message:
            self._take_own(message)
        now = time.monotonic()
        accounts = [Account(one, ledger.account(at), now=now) for at, one in enumerate(rules.rule_limits, 1)]
        budget = Budget(rules.limits, now=now, cells=ledger.account(0), rules=accounts, run=self._parts.run)
        rollout = Rollout(
            rollout_id,
            self._shell,
            rules,
            budget,
            Journal(
                writer, budget, self._shell.counters, LEARNT if rules.learn else frozenset(), masking(rules.scanner)
            ),
            record_fd=fds[_RECORD],
            on_broken=self._on_broken,
            connect=Connection,
            names=Names(ledger, rules.limits.names),
            ledger=ledger,
            shelf=Shelf.of(self._parts.store, rules),
            numbered=first_number(start),
            revoked=message.get("revoked") is True,
        )
        sockets = [socket.socket(fileno=fd) for fd in fds[_SOCKETS:]]
        for fd in (fds[_LEDGER], fds[_RULES]):
            os.close(fd)
        fds.clear()  # all others are the rollout's now
        try:
            for role, sock in zip(roles, sockets, strict=True):
                rollout.open(role, sock)
        except BaseException:
            rollout.stop(Reason.INTERNAL_ERROR)
            raise
        self._rollouts[rollout_id] = rollout
        return {"head": head_json(writer.head)}

    def detach(self, message: Message, _fds: list[int]) -> Message:
        """End a rollout's connections and let its listener go; its chain stays open."""
        rollout = self._rollouts.pop(self._known(message).rollout_id)
        rollout.stop(Reason.REVOKED)
        return {"head": head_json(rollout.journal.head), "broken": rollout.broken}

    def revoke(self, message: Message, _fds: list[int]) -> Message:
        """End the connections of one rollout, or of all, and refuse what comes."""
        if message.get("rollout_id") is None:
            return {"closed": sum(rollout.revoke() for rollout in self._rollouts.values())}
        return {"closed": self._known(message).revoke()}

    def ping(self, _message: Message, _fds: list[int]) -> Message:
        """Show a sign of life."""
        return {"now_ns": time.monotonic_ns()}

    def stats(self, _message: Message, _fds: list[int]) -> Message:
        """Return the worker's own counters."""
        return {
            "rollouts": len(self._rollouts),
            "connections": sum(len(rollout.live) for rollout in self._rollouts.values()),
            "queries": self._shell.resolver.queries,
            "faults": self._loop.faults,
            **self._shell.counts(),
        }

    def shutdown(self, _message: Message, _fds: list[int]) -> Message:
        """End after this answer."""
        self._loop.call_later(0, self._loop.stop, self._on_fault)
        return {}

    # ---- news

    def _tell(self) -> None:
        """Show the sign of life that the agent waits for."""
        self._send({"event": "alive"})
        self._loop.call_later(NEWS_S, self._tell, self._on_fault)

    def _on_broken(self, rollout: Rollout) -> None:
        self._send({"event": "broken", "rollout_id": rollout.rollout_id})

    def _known(self, message: Message) -> Rollout:
        rollout_id = _wire.text(message, "rollout_id")
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            raise WireError(f"{rollout_id} is not attached")
        return rollout

    def _take_own(self, message: Message) -> None:
        self._shell.own = frozenset(Address.parse(text) for text in _wire.texts(message, "own_addresses"))


_HANDLERS: Mapping[str, Callable[[Worker, Message, list[int]], Message]] = {
    "configure": Worker.configure,
    "attach": Worker.attach,
    "detach": Worker.detach,
    "revoke": Worker.revoke,
    "ping": Worker.ping,
    "stats": Worker.stats,
    "shutdown": Worker.shutdown,
}


def _id(message: Message, key: str) -> int | None:
    return None if message.get(key) is None else _wire.number(message, key)


def _complain(what: str) -> None:
    """Say why the worker ends, where the agent's log picks it up."""
    sys.stderr.write(f"egress worker: {what}\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker on the control socket given by number; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m stockade.egress", description="egress worker of a node agent")
    parser.add_argument("--control-fd", type=int, required=True, help="a SOCK_SEQPACKET socket of the agent")
    options = parser.parse_args(argv)
    try:
        control = socket.socket(fileno=options.control_fd)
        if control.type != socket.SOCK_SEQPACKET:
            raise OSError("not a SOCK_SEQPACKET socket")
    except OSError as error:
        _complain(f"control descriptor {options.control_fd}: {error}")
        return 2
    control.set_inheritable(False)
    Worker(control).run()
    return 0
