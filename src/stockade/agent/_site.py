"""What an agent finds on its machine before it begins: the policy, the operator's file, name servers, its own socket."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stockade._version import __version__
from stockade.errors import ConfigError, PolicyError
from stockade.events import ChainWriter
from stockade.policy import (
    OperatorConfig,
    Policy,
    Trifecta,
    check_site,
    load_operator,
    load_policy,
    policy_digest,
    trifecta,
    unsafe_options,
)

SITE_OPERATOR_FILE = Path("/etc/stockade/operator.yaml")


@dataclass(frozen=True, slots=True)
class Site:
    """A policy that this machine can keep, and what its operators say."""

    policy: Policy
    operator: OperatorConfig
    verdict: Trifecta

    @property
    def digest(self) -> str:
        """The policy's digest."""
        return policy_digest(self.policy)

    @property
    def resolvers(self) -> tuple[str, ...]:
        """The name servers that egress workers ask."""
        return self.operator.resolvers or system_resolvers()

    @property
    def worker_uid(self) -> int | None:
        """The uid that egress workers of a root agent become; None where there is no privilege to give up."""
        return self.operator.uid_range.first if os.geteuid() == 0 else None

    @property
    def unsafe(self) -> list[str]:
        """A line for each dangerous option that policy or operator take."""
        opened = [f"unsafe_allow_cidrs {entry.cidr}: {entry.reason}" for entry in self.operator.unsafe_allow]
        return [*opened, *unsafe_options(self.policy)]

    def manifest(self) -> dict[str, Any]:
        """Return what every manifest says of the policy and this machine."""
        return {
            "policy_digest": self.digest,
            "policy": self.policy.model_dump(mode="json"),
            "unsafe": self.unsafe,
            "versions": {"stockade": __version__, "kernel": os.uname().release},
            "node": socket.gethostname(),
        }

    def record_exemptions(self, writer: ChainWriter) -> None:
        """Put on record what a person let through that is refused otherwise."""
        for entry in self.operator.unsafe_allow:
            writer.append(
                "operator.exemption",
                severity=3,
                what="unsafe_allow_cidrs",
                values=[str(entry.cidr)],
                reason=entry.reason,
            )
        waiver = self.verdict.waiver
        if waiver is not None:
            writer.append(
                "stage.waiver",
                severity=3,
                waives=waiver.waives,
                person=waiver.person,
                reason=waiver.reason,
                expires=waiver.expires.isoformat(),
            )


def read_site(policy_file: str, operator: str | None) -> Site:
    """Read and check both files. Raises ConfigError and PolicyError, naming file and line."""
    policy = load_policy(Path(policy_file))
    said = load_operator(operator_file(operator))
    check_site(policy, said, path=policy_file)
    verdict = trifecta(policy, today=dt.datetime.now(tz=dt.UTC).date())
    if verdict.refused:
        raise PolicyError(verdict.message, path=policy_file, hint="see: stockade policy check")
    return Site(policy, said, verdict)


def operator_file(given: str | None) -> Path | None:
    """Return the operator's file: the site's if there is one, which nobody can replace by naming another."""
    if SITE_OPERATOR_FILE.exists():
        if given is not None and Path(given) != SITE_OPERATOR_FILE:
            raise ConfigError(
                f"this site has its own operator's file, {SITE_OPERATOR_FILE}", path=given, hint="leave --operator away"
            )
        return SITE_OPERATOR_FILE
    return None if given is None else Path(given)


def system_resolvers(path: Path = Path("/etc/resolv.conf")) -> tuple[str, ...]:
    """Return the name servers of this node (resolv.conf(5)); its search list is not taken over, on purpose."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in path.read_text("utf-8", "replace").splitlines())
        return tuple(words[1].partition("%")[0] for words in lines if len(words) > 1 and words[0] == "nameserver")
    return ()


def socket_path(state: Path) -> Path:
    """Return a fresh path for this agent's socket; those of agents that were killed are swept away."""
    folder = state / "sockets"
    folder.mkdir(mode=0o700, exist_ok=True)
    for stale in folder.glob("*.sock"):
        pid = stale.name.partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and not answers(stale):
            stale.unlink(missing_ok=True)
    return folder / f"{os.getpid()}-{secrets.token_hex(4)}.sock"


def answers(path: Path) -> bool:
    """Whether somebody listens there: an agent of another pid namespace that shares this state is not in our /proc."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True
