"""What the sandboxes of a run get to reach the outside with, made once for all of them.

Keys and secrets are read here, in the agent, and go to the egress workers in sealed memory: no sandbox mounts a file that
holds one, and no message or manifest repeats one. The authority of the run lives as long as this process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stockade.egress import (
    ChainSettings,
    Equipment,
    Role,
    Settings,
    StoreSettings,
    make_authority,
    prepare_store,
    system_roots,
    trust_env,
    trust_files,
)
from stockade.egress.gate import Credential, RuleLimits, Rules, Secret
from stockade.errors import ConfigError
from stockade.policy import HostRule, OperatorConfig, Policy, read_credentials, read_known_secrets
from stockade.runs import state_dir
from stockade.sandbox import DNS_PORT, PROXY_PORT, TRANSPARENT_PORTS, Listeners

_WEB_PORTS = (80, 443)
_USUAL_PORTS = (21, 22, 25, 110, 119, 143, 389, 465, 587, 636, 873, 990, 993, 995, 8443, 9418, 11371)
"""Where a learning run meets clients beside the web's ports; what lies elsewhere is refused without a trace.

None that programs open for themselves (3000, 5432, 8000, …): a port that is met here is taken inside.
"""
_STRICT = ("record", "replay")
_DEFAULT_STORE_BYTES = 16 << 30
_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WayOut:
    """Settings of the workers, sockets of the sandboxes, and the rules' own secrets.

    ``trust`` are the files and ``env`` the variables that make programs in a sandbox trust the run's authority; empty
    where nothing is inspected. ``learn``: see :func:`stockade.egress.gate.decide`. ``store_path`` is where answers are
    kept, if they are; its descriptor stays open until :meth:`close`.
    """

    settings: Settings
    equipment: Equipment = field(repr=False)
    listeners: Listeners
    trust: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    env: Mapping[str, str] = field(default_factory=dict)
    credentials: tuple[Credential, ...] = ()
    secrets: tuple[Secret, ...] = ()
    learn: bool = False
    store_path: Path | None = None

    @property
    def inspects(self) -> bool:
        """Whether the run has an authority of its own."""
        return bool(self.equipment.authority_key)

    def rules(self, policy: Policy, operator: OperatorConfig) -> Rules:
        """Return the rules of one rollout."""
        return Rules.from_policy(
            policy,
            operator,
            own_names=(socket.gethostname(),),
            inspection=self.inspects,
            credentials=self.credentials,
            secrets=self.secrets,
            learn=self.learn,
        )

    def kept(self, policy: Policy) -> dict[str, str] | None:
        """Say where the answers of all requests are kept or come from, None in the other modes."""
        egress = policy.egress
        if self.store_path is None or egress.mode not in _STRICT:
            return None
        return {"mode": egress.mode, "path": str(self.store_path), "recording": egress.recording}

    def roles(self, descriptors: tuple[int, ...]) -> dict[int, Role]:
        """Return what the sockets of a sandbox are there for; they come in the order of ``listeners``."""
        names = [Role.PROXY] * len(self.listeners.addresses) + [Role.TRANSPARENT] * len(
            self.listeners.transparent_ports
        )
        if self.listeners.dns:
            names += [Role.DNS, Role.DNS_TCP]
        return dict(zip(descriptors, names, strict=True))

    def close(self) -> None:
        """Let the store go."""
        if self.equipment.store >= 0:
            os.close(self.equipment.store)


def way_out(
    policy: Policy,
    operator: OperatorConfig,
    *,
    run_id: str,
    resolvers: tuple[str, ...],
    worker_uid: int | None,
    learn: bool = False,
) -> WayOut:
    """Read what the policy needs of this machine. Raises ConfigError, NodeError and StoreFault, naming the file.

    ``learn``: every host is looked into, so the authority may vouch for all of them.
    """
    permitted = tuple(dict.fromkeys(rule.host.text for rule in policy.egress.allow if _looked_into(rule, policy)))
    inspects = learn or bool(permitted)
    credentials = read_credentials(operator)
    secrets = [Secret(one.name, one.value) for one in read_known_secrets(operator)]
    secrets += [Secret(one.name, one.secret) for one in credentials]
    chain = _chain(operator)
    parts: dict[str, bytes] = _chain_files(operator) if chain is not None else {}
    trust: Mapping[str, bytes] = {}
    if inspects or parts:
        parts["roots"] = system_roots() + read_pem(operator.extra_roots)
    if inspects:
        authority = make_authority(None if learn else permitted, run_id=run_id)
        parts |= {"authority_cert": authority.cert_pem, "authority_key": authority.key_pem}
        trust = trust_files(authority.cert_pem, parts["roots"])
    store = _store_settings(policy, operator)
    limits = policy.egress.run_limits
    return WayOut(
        settings=Settings(
            resolvers=resolvers,
            store=None if store is None else store[1],
            chain=chain,
            run_limits=None if limits is None else RuleLimits(**limits.model_dump()),
        ),
        equipment=Equipment(store=-1 if store is None else _open_store(store[0], worker_uid), **parts),
        listeners=Listeners(transparent_ports=_ports(policy, _USUAL_PORTS if learn else ()), dns=True),
        trust=trust,
        env=trust_env() if inspects else {},
        credentials=tuple(Credential(one.name, one.header, one.value) for one in credentials),
        secrets=tuple(secrets),
        learn=learn,
        store_path=None if store is None else store[0],
    )


def _looked_into(rule: HostRule, policy: Policy) -> bool:
    """Whether TLS to the rule's hosts may have to end at the worker."""
    if rule.tcp:
        return False
    if rule.inspected or policy.egress.mode in _STRICT:
        return True
    return any(deny.needs_sight and deny.host.overlaps(rule.host) for deny in policy.egress.deny)


def _ports(policy: Policy, usual: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the ports on which a sandbox's clients are met that ignore the proxy's variables.

    Of the ``usual`` ones there are as many as there is room for.
    """
    named = {*_WEB_PORTS, *(port for rule in policy.egress.allow for port in rule.ports)}
    named |= {service.port for service in policy.services}
    ports = sorted(named - {PROXY_PORT, DNS_PORT})
    if len(ports) > TRANSPARENT_PORTS:
        raise ConfigError(
            f"the policy names {len(ports)} different ports; a sandbox can have {TRANSPARENT_PORTS}",
            hint="merge rules, or split the policy",
        )
    more = [port for port in usual if port not in ports]
    return tuple(sorted([*ports, *more[: TRANSPARENT_PORTS - len(ports)]]))


def default_store() -> Path:
    """Return where answers are kept on a machine whose operators say nothing of it."""
    return state_dir() / "store"


def _store_settings(policy: Policy, operator: OperatorConfig) -> tuple[Path, StoreSettings] | None:
    egress = policy.egress
    needed = egress.mode in _STRICT
    if operator.store is None:
        if not needed:
            return None
        return default_store(), StoreSettings(_DEFAULT_STORE_BYTES, egress.recording)
    if not needed and not any(rule.store for rule in egress.allow):
        return None
    return Path(operator.store.path), StoreSettings(operator.store.max_bytes, egress.recording)


def _open_store(path: Path, worker_uid: int | None) -> int:
    uid = os.getuid() if worker_uid is None else worker_uid
    gid = os.getgid() if worker_uid is None else worker_uid
    return prepare_store(path, uid, gid)


def _chain(operator: OperatorConfig) -> ChainSettings | None:
    upstream = operator.upstream
    if upstream is None:
        return None
    return ChainSettings(upstream.scheme, *upstream.endpoint, upstream.asks_by_name, upstream.gateway)


def _chain_files(operator: OperatorConfig) -> dict[str, bytes]:
    upstream = operator.upstream
    if upstream is None:
        return {}
    names = ("ca", "cert", "key")
    found = {f"chain_{name}": read_pem(getattr(upstream, name)) for name in names}
    return {name: data for name, data in found.items() if data}


def read_pem(path: str | None) -> bytes:
    """Return what a PEM file holds, nothing for None. Raises ConfigError."""
    if path is None:
        return b""
    try:
        with open(path, "rb") as file:
            data = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=path, hint="name an existing file") from error
    if len(data) > _FILE_BYTES or b"-----BEGIN " not in data:
        raise ConfigError("is not a file in PEM form", path=path, hint="begin with a line '-----BEGIN …'")
    return data
