"""Where a gateway listens: a UNIX socket for ssh to forward, or an address, and there with certificates on both sides."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stockade.agent._site import answers
from stockade.agent._wayout import read_pem
from stockade.broker import check_socket_path
from stockade.egress import Equipment, Role
from stockade.egress.gate import Address
from stockade.errors import ConfigError

_BACKLOG = 512
_LOOPBACK_NET = 127
_UNIX = "unix:"
_HINT = "write unix:/run/user/1000/egress.sock or 10.0.0.2:3129"


def is_loopback(text: str) -> bool:
    """Whether only this host can reach the address in ``text`` (RFC 1122 section 3.2.1.3, RFC 4291 section 2.5.3)."""
    address = Address.parse(text.partition("%")[0])
    return address.value >> 24 == _LOOPBACK_NET if address.version == 4 else address.value == 1


@dataclass(frozen=True, slots=True)
class Keys:
    """Files in PEM form: the gateway's certificate and key, and the authorities of its clients."""

    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        found = {"--cert": self.cert, "--key": self.key, "--client-ca": self.client_ca}
        return [name for name, path in found.items() if path is not None]

    def added_to(self, equipment: Equipment) -> Equipment:
        """Return a worker's equipment with what these files hold. Raises ConfigError, naming the file."""
        self._check()
        return replace(
            equipment,
            gateway_cert=read_pem(self.cert),
            gateway_key=read_pem(self.key),
            gateway_ca=read_pem(self.client_ca),
        )

    def _check(self) -> None:
        """Find out now what a worker would stumble over: by then a record has begun."""
        if self.cert is None or self.client_ca is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            hint = "name a certificate and its own key, both in PEM form and not encrypted"
            raise ConfigError(
                f"no certificate with its key: {error}", path=self.cert, key="--cert", hint=hint
            ) from error
        try:
            context.load_verify_locations(self.client_ca)
        except OSError as error:
            hint = "name a file of certificates in PEM form"
            raise ConfigError(f"no authorities: {error}", path=self.client_ca, key="--client-ca", hint=hint) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket: ``where`` it is, and the role that it has for a worker."""

    sock: socket.socket
    where: str
    role: Role


@contextlib.contextmanager
def opened(listen: str, keys: Keys) -> Iterator[Listener]:
    """Listen at ``unix:/path`` or ``host:port``; the socket, and its file, go with the block.

    An address that others reach needs all three of ``keys``; loopback may do without, and a UNIX socket takes none.
    Raises ConfigError for what cannot be.
    """
    if listen.startswith(_UNIX):
        if keys.given:
            raise ConfigError("a UNIX socket needs no certificates", key=keys.given[0], hint="leave it away")
        with _at_path(Path(listen.removeprefix(_UNIX))) as sock:
            yield Listener(sock, listen, Role.PROXY)
        return
    family, address = _resolved(listen)
    if keys.given and len(keys.given) < 3:
        raise ConfigError("--cert, --key and --client-ca go together", key=keys.given[0], hint="give all three")
    if not keys.given and not is_loopback(address[0]):
        raise ConfigError(
            f"{listen} can be reached from elsewhere", key="--listen", hint="give --cert, --key and --client-ca"
        )
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {listen}: {error.strerror}", key="--listen", hint=_HINT) from error
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        yield Listener(sock, shown, Role.GATEWAY if keys.given else Role.PROXY)


def _resolved(listen: str) -> tuple[int, tuple[str, int]]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"{listen!r} is no place to listen", key="--listen", hint=_HINT)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{host!r} has no address: {error.strerror}", key="--listen", hint=_HINT) from error
    return family, (str(address[0]), int(address[1]))


@contextlib.contextmanager
def _at_path(path: Path) -> Iterator[socket.socket]:
    """Listen at a path, for this user alone; a socket that nobody answers any more makes room, and nothing else does."""
    if not path.is_absolute():
        raise ConfigError(f"{path} is not an absolute path", key="--listen", hint=_HINT)
    check_socket_path(path)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode) or answers(path):
            raise ConfigError(f"{path} is taken", key="--listen", hint="name a path where nothing is")
        path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        before = os.umask(0o177)  # mode 0600 from the first instant, not after a chmod
        try:
            sock.bind(str(path))
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error.strerror}", key="--listen", hint=_HINT) from error
        finally:
            os.umask(before)
        made = path.lstat().st_ino
        sock.listen(_BACKLOG)
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):
                if path.lstat().st_ino == made:
                    path.unlink()
