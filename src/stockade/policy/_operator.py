"""The operator's file: what holds for a machine whatever a rollout's policy says.

.. code-block:: yaml

    version: 1
    unsafe_allow_cidrs:
      - {cidr: 10.20.0.0/24, reason: "package mirror of the site"}
    deny_cidrs: [198.51.100.0/24]
    resolvers: ["10.20.0.2", "[fd00:20::2]:53"]
    uid_range: {first: 1879048192, count: 65536}
    store: {path: /var/cache/stockade, max_bytes: 50 GiB}
    credentials:
      - {name: model-api, header: authorization, prefix: "Bearer ", file: /etc/stockade/model-api.key}
    known_secrets:
      - {name: deploy-key, file: /etc/stockade/deploy.key}
    upstream: {url: "https://gateway.example.org:3129", cert: /etc/stockade/node.pem, key: /etc/stockade/node.key}
    extra_roots: /etc/stockade/site-ca.pem

Files that hold secrets are named here and read by :mod:`stockade.policy._secrets`, by whoever needs them.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from stockade.errors import ConfigError
from stockade.policy._addresses import LOOPBACK, UNUSABLE, IPNetwork, NetworkField, UnsafeNetworkField, contains
from stockade.policy._base import SourceLine, StrictModel, Version
from stockade.policy._errors import BadValue, shown, text_of
from stockade.policy._hosts import HostPattern
from stockade.policy._load import load_document
from stockade.policy._paths import parse_mount_path
from stockade.policy._values import ByteCount, Label, Line

if TYPE_CHECKING:
    from pathlib import Path

_MAX_UID = (1 << 32) - 2  # (uid_t)-1 means "no change" to setresuid(2)
_RESOLVER = re.compile(
    r"(?P<v4>[0-9.]+)(?::(?P<p4>[1-9][0-9]{0,4}))?"
    r"|(?P<v6>[0-9a-fA-F:.]*:[0-9a-fA-F:.]*)"
    r"|\[(?P<b6>[0-9a-fA-F:.]*:[0-9a-fA-F:.]*)\](?::(?P<p6>[1-9][0-9]{0,4}))?"
)
_MAX_PORT = 65_535


def parse_resolver(value: Any) -> str:
    """Return ``ip`` or ``ip:port`` (IPv6 with a port in brackets) in canonical spelling.

    Metadata addresses are accepted: on several clouds the resolver lives there, and only egress workers query it.
    """
    example = "write '10.0.0.2', '10.0.0.2:53', 'fd00::2' or '[fd00::2]:53'"
    match = _RESOLVER.fullmatch(text_of(value))
    if match is None:
        raise BadValue(f"{shown(value)} is not the address of a resolver", hint=example)
    text = match["v4"] or match["v6"] or match["b6"]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise BadValue(f"{shown(value)} is not the address of a resolver", hint=example) from None
    port = match["p4"] or match["p6"]
    if any(address in network for network in UNUSABLE) or (port is not None and int(port) > _MAX_PORT):
        raise BadValue(f"{shown(value)} cannot be asked", hint=example)
    if port is None:
        return str(address)
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


ResolverField = Annotated[str, PlainValidator(parse_resolver), WithJsonSchema({"type": "string"})]


_URL = re.compile(r"(https?)://(\[[0-9a-fA-F:]+\]|[^][/@:?#\\]+):([1-9][0-9]{0,4})/?|(unix):(/.*)", re.ASCII)
_TOKEN = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}", re.ASCII)
_NEVER_INJECTED = re.compile(
    # What frames a message, names its target or speaks of this hop is the proxy's own (RFC 9110 §7.6, RFC 9112 §6).
    r"host|content-length|transfer-encoding|connection|keep-alive|te|trailer|upgrade|expect|via|forwarded|range"
    r"|accept-encoding|(?:proxy|x-forwarded|x-stockade|sec)-.*"
)
_MAX_PREFIX = 64


def parse_upstream(value: str) -> str:
    """Return the URL of an upstream proxy in its only spelling."""
    example = "write 'http://proxy.example.org:3128', 'https://gateway.example.org:3129' or 'unix:/run/egress.sock'"
    match = _URL.fullmatch(value)
    if match is None:
        raise BadValue(f"{shown(value)} is not the URL of an upstream proxy", hint=example)
    if match[4]:
        return "unix:" + parse_mount_path(match[5])
    host = HostPattern(match[2].strip("[]"))
    if host.is_suffix or int(match[3]) > _MAX_PORT:
        raise BadValue(f"{shown(value)} is not the URL of an upstream proxy", hint=example)
    return f"{match[1]}://[{host}]:{match[3]}" if ":" in host.text else f"{match[1]}://{host}:{match[3]}"


def parse_header(value: str) -> str:
    """Return the name of a header, in lower case, that a credential may be put into."""
    name = value.lower()
    if not _TOKEN.fullmatch(name):
        raise BadValue(f"{shown(value)} is not the name of a header", hint="write one like 'authorization'")
    if _NEVER_INJECTED.fullmatch(name):
        raise BadValue(f"{name} is a header that the proxy itself writes", hint="write one like 'authorization'")
    return name


def parse_prefix(value: str) -> str:
    """Return what goes before a secret in its header: printable ASCII, a blank at the end is meant."""
    if len(value) > _MAX_PREFIX or not value.isascii() or not value.isprintable() or value.startswith(" "):
        raise BadValue(f"{shown(value)} cannot stand before a secret", hint="write one like 'Bearer '")
    return value


UpstreamUrl = Annotated[str, AfterValidator(parse_upstream)]
HeaderName = Annotated[str, AfterValidator(parse_header)]
Prefix = Annotated[str, AfterValidator(parse_prefix)]
FilePath = Annotated[str, AfterValidator(parse_mount_path)]


class UnsafeCidr(StrictModel):
    """A block of a special-use range that hosts may resolve to on this machine; shown in every report."""

    cidr: UnsafeNetworkField
    reason: Annotated[Line, Field(min_length=10)]
    source_line: SourceLine = 0


class UidRange(StrictModel):
    """Unprivileged uids for sandboxes of an agent that runs as root; no account may have one of them.

    The first one is that of the egress workers. The default begins above what systemd gives to containers (0x00080000 to 0x6FFFFFFF, systemd "UIDS-GIDS").
    """

    first: int = Field(default=0x7000_0000, ge=65_536, le=_MAX_UID)
    count: int = Field(default=65_536, ge=2, le=1 << 24)

    @model_validator(mode="after")
    def _within_uid_t(self) -> Self:
        if self.first + self.count - 1 > _MAX_UID:
            hint = f"first + count must be at most {_MAX_UID + 1}"
            raise BadValue("the range ends beyond the last uid", hint=hint, loc=("count",))
        return self


class StoreConfig(StrictModel):
    """Where answers are kept: a directory of this machine, never one that a sandbox sees."""

    path: FilePath
    max_bytes: ByteCount = 16 << 30


class CredentialFile(StrictModel):
    """A secret that the proxy adds to the requests of rules that name it; the sandbox never sees it.

    ``header`` gets ``prefix`` and what the file holds.
    """

    name: Label
    header: HeaderName
    prefix: Prefix = ""
    file: FilePath
    source_line: SourceLine = 0


class SecretFile(StrictModel):
    """A secret that must not leave a sandbox; requests that carry it are refused."""

    name: Label
    file: FilePath
    source_line: SourceLine = 0


class Upstream(StrictModel):
    """The proxy that everything is sent through: ``http://host:port``, ``https://host:port`` or ``unix:/path``.

    ``name_only``: this site looks up no public names, so the upstream gets the name and its addresses stay unchecked
    here; then only rules for exact hosts may be used. ``gateway``: the upstream is ``stockade egress gateway``, which
    gets the name too, but applies a policy of its own and checks the addresses; wildcards may be used.
    """

    url: UpstreamUrl
    ca: FilePath | None = None
    cert: FilePath | None = None
    key: FilePath | None = None
    name_only: bool = False
    gateway: bool = False

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        tls = self.url.startswith("https:")
        for name in ("ca", "cert", "key"):
            if getattr(self, name) is not None and not tls:
                raise BadValue(f"{name} has no effect: the upstream speaks no TLS", hint="remove it", loc=(name,))
        if (self.cert is None) != (self.key is None):
            missing = "cert" if self.cert is None else "key"
            raise BadValue(f"cert and key go together; {missing} is missing", hint=f"add {missing}", loc=("url",))
        if self.gateway:
            self._can_be_a_gateway()
        return self

    def _can_be_a_gateway(self) -> None:
        if self.name_only:
            hint = "keep one of the two"
            raise BadValue("a gateway gets the name anyway, and checks its addresses", hint=hint, loc=("name_only",))
        if self.scheme == "https" and self.cert is None:
            hint = "add cert and key, which the gateway's client-ca knows"
            raise BadValue("a gateway asks for a certificate", hint=hint, loc=("url",))
        if self.scheme == "http" and not _is_loopback(self.endpoint[0]):
            hint = "use https:// with cert and key, or unix:"
            raise BadValue("a gateway on another host is never reached in clear", hint=hint, loc=("url",))

    @property
    def asks_by_name(self) -> bool:
        """Whether the upstream looks up the names."""
        return self.name_only or self.gateway

    @property
    def scheme(self) -> Literal["http", "https", "unix"]:
        """How the upstream is reached."""
        scheme = self.url.partition(":")[0]
        return "unix" if scheme == "unix" else "https" if scheme == "https" else "http"

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host (an address without brackets) and port; the path and 0 for a UNIX socket."""
        if self.scheme == "unix":
            return self.url.removeprefix("unix:"), 0
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in LOOPBACK)


class OperatorConfig(StrictModel):
    """What the operators of a machine decide."""

    version: Version
    unsafe_allow: tuple[UnsafeCidr, ...] = Field(default=(), max_length=256, validation_alias="unsafe_allow_cidrs")
    deny_cidrs: tuple[NetworkField, ...] = Field(default=(), max_length=1024)
    resolvers: tuple[ResolverField, ...] = Field(default=(), max_length=8)
    uid_range: UidRange = UidRange()
    store: StoreConfig | None = None
    credentials: tuple[CredentialFile, ...] = Field(default=(), max_length=64)
    known_secrets: tuple[SecretFile, ...] = Field(default=(), max_length=256)
    upstream: Upstream | None = None
    extra_roots: FilePath | None = None

    @property
    def unsafe_allow_cidrs(self) -> tuple[IPNetwork, ...]:
        """The opened blocks without their reasons."""
        return tuple(one.cidr for one in self.unsafe_allow)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        for index, one in enumerate(self.unsafe_allow):
            for other in self.unsafe_allow[:index]:
                if one.cidr == other.cidr:
                    _conflict(index, f"{one.cidr} is given twice")
            for denied in self.deny_cidrs:
                if contains(denied, one.cidr):
                    _conflict(index, f"{one.cidr} never takes effect: deny_cidrs holds {denied}")
        _refuse_twice("credentials", [one.name for one in self.credentials])
        _refuse_twice("known_secrets", [one.name for one in self.known_secrets])
        return self


def _refuse_twice(kind: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise BadValue(f"the name {name} is given twice", hint="keep one of the two", loc=(kind, index, "name"))


def _conflict(index: int, message: str) -> None:
    raise BadValue(message, hint="keep one of the two", loc=("unsafe_allow_cidrs", index, "cidr"))


def load_operator(path: Path | None) -> OperatorConfig:
    """Read the operator's file, or return the defaults where there is none (None).

    Raises:
        ConfigError: with file, line, key and hint; also for a named file that does not exist.
    """
    if path is None:
        return OperatorConfig(version=1)
    return load_document(path, OperatorConfig, error=ConfigError)
