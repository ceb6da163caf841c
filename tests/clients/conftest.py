"""One lab and one run per module; the module's ``POLICY`` says what its rollouts may do.

Hosts ending in ``example.org`` have origins that answer; so do an internal and a metadata address. What a policy does
not name is therefore *refused*, never just absent.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest
import trustme

from tests.clients import origins
from tests.clients.lab import Circle, Lab
from tests.egress.netlab import Origin
from tests.support import requires

FILES, DENIED = "11.0.0.10", "11.0.0.11"
INTERNAL, OWN, METADATA = "10.1.2.3", "10.0.0.1", "169.254.169.254"
"""In the lab all of them answer; the second is an address of the agent's own interface."""
HOSTS = {
    "files.example.org": FILES,
    "denied.example.org": DENIED,
    "inside.example.org": INTERNAL,
    "own.example.org": OWN,
    "metadata.example.org": METADATA,
    "pypi.example.org": "11.0.0.12",
    "npm.example.org": "11.0.0.13",
    "git.example.org": "11.0.0.14",
    "deb.example.org": "11.0.0.15",
    "shell.example.org": "11.0.0.16",
    "inspected.example.org": "11.0.0.17",
}


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server_context(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(*HOSTS, FILES, DENIED).configure_cert(context)
    return context


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    requires(Lab.possible(), "no network namespace can be made here")
    with Lab() as lab:
        for host, address in HOSTS.items():
            lab.add_host(host, address)
        yield lab


@pytest.fixture(scope="module")
def sites(lab: Lab, server_context: ssl.SSLContext) -> dict[str, list[Origin]]:
    """File origins by address, the plain one first."""
    return {
        ip: lab.trusting(server_context, ip, respond=origins.files) for ip in (FILES, DENIED, INTERNAL, OWN, METADATA)
    }


@pytest.fixture(scope="module")
def circle(
    request: pytest.FixtureRequest,
    lab: Lab,
    sites: dict[str, list[Origin]],
    ca: trustme.CA,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Circle]:
    """A run under the module's policy."""
    folder = tmp_path_factory.mktemp("circle")
    with Circle(lab, folder, request.module.POLICY, ca.cert_pem.bytes()) as circle:
        yield circle
