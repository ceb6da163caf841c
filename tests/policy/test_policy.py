"""The policy as a value: defaults, digest, round trip, effective form, rows, schema."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pydantic
import pytest
import rfc8785

from stockade.errors import PolicyError
from stockade.policy import (
    Data,
    Egress,
    EgressLimits,
    HostPattern,
    HostRule,
    Mount,
    PathGlob,
    Policy,
    RowKind,
    SandboxLimits,
    effective,
    explain,
    parse_policy,
    policy_digest,
    policy_schema,
)
from tests.support import ROOT

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

TEXT = """\
version: 1
egress:
  allow:
    - {host: abc.test, methods: [GET, HEAD], paths: ["/simple/**"]}
    - {host: "*.files.hosts.test", methods: [GET, HEAD]}
    - host: files.example.org
      ports: [443, 8443]
  deny:
    - {host: secret.files.hosts.test}
  limits: {requests_per_minute: 60, bytes_out: 2 MiB, bytes_in: 1 GiB, bytes_out_per_request: 32 KiB, idle: 30 s, total: 1 h}
services:                       # the only exemption from the special-use table
  - {name: model, address: 127.0.0.1, port: 8000, methods: [POST], paths: ["/v1/completions"]}
sandbox: {backend: auto, memory: 512 MiB, cpus: 0.5, pids: 64, disk: 1 GiB, wall: 10 min, cpu: 90, file_size: 1024}
mounts:
  - {source: /srv/data, target: /data, read_only: true}
data: {private: false}
"""


def read(text: str = TEXT) -> Policy:
    return parse_policy(text, source="p.yaml")


def test_every_key_is_read():
    policy = read()
    first, second, third = policy.egress.allow
    assert (first.host.text, first.methods, first.ports) == ("abc.test", ("GET", "HEAD"), (443,))
    assert first.paths == (PathGlob("/simple/**"),)
    assert (second.host.text, second.paths) == ("*.files.hosts.test", None)
    assert (third.ports, third.tunnel, first.tunnel, second.tunnel) == ((443, 8443), True, False, False)
    assert [rule.source_line for rule in policy.egress.allow] == [4, 5, 6]
    assert (policy.egress.deny[0].ports, policy.egress.deny[0].source_line) == (None, 9)
    limits = policy.egress.limits
    assert (limits.requests_per_minute, limits.bytes_out, limits.bytes_in) == (60, 2 * MIB, GIB)
    assert (limits.bytes_out_per_request, limits.idle_s, limits.total_s) == (32 * KIB, 30.0, 3600.0)
    service = policy.services[0]
    assert (service.name, service.host) == ("model", "model.stockade.internal")
    assert (service.address, service.port, service.methods) == ("127.0.0.1", 8000, ("POST",))
    assert service.source_line == 12
    sandbox = policy.sandbox
    assert (sandbox.memory, sandbox.cpus, sandbox.pids, sandbox.disk) == (512 * MIB, 0.5, 64, GIB)
    assert (sandbox.wall_s, sandbox.cpu_s, sandbox.file_size) == (600.0, 90.0, 1024)
    assert policy.mounts == (Mount(source="/srv/data", target="/data", source_line=15),)
    assert (policy.data.private, policy.data.source_line) == (False, 16)


@pytest.mark.promise("S1.2")
def test_least_policy_denies_everything_and_has_small_limits():
    policy = read("version: 1\n")
    assert policy == Policy(version=1)
    assert (policy.egress.allow, policy.services, policy.mounts, policy.waivers) == ((), (), (), ())
    assert policy.egress.limits == EgressLimits(
        requests_per_minute=120,
        connections=16,
        bytes_out=MIB,
        bytes_in=256 * MIB,
        bytes_out_per_request=64 * KIB,
        header_bytes=64 * KIB,
        header_count=100,
        idle_s=60.0,
        total_s=600.0,
    )
    assert policy.sandbox == SandboxLimits(
        backend="auto",
        memory=2 * GIB,
        cpus=1.0,
        pids=256,
        disk=GIB,
        inodes=65_536,
        wall_s=600.0,
        cpu_s=600.0,
        file_size=256 * MIB,
        open_files=1024,
        output=16 * MIB,
    )
    assert policy.data == Data(private=False)


def test_models_are_frozen_strict_and_closed():
    policy = read()
    with pytest.raises(pydantic.ValidationError):
        policy.version = 1  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError):
        EgressLimits.model_validate({"bytes": 1})
    with pytest.raises(pydantic.ValidationError):
        EgressLimits.model_validate({"connections": "16"})
    with pytest.raises(pydantic.ValidationError):
        SandboxLimits(pids=True)


def test_wrong_policies_cannot_be_built_in_code_either():
    rule = HostRule(host=HostPattern("abc.test"))
    with pytest.raises(pydantic.ValidationError, match="given twice"):
        Policy(version=1, egress=Egress(allow=(rule, rule)))
    with pytest.raises(pydantic.ValidationError, match="anybody can own"):
        HostRule(host=HostPattern("*.github.io"))


def test_json_round_trip():
    policy = read()
    text = policy.model_dump_json()
    again = Policy.model_validate_json(text)
    assert again == policy
    assert again.model_dump_json() == text
    assert [rule.source_line for rule in again.egress.allow] == [4, 5, 6]
    assert policy_digest(again) == policy_digest(policy)


def test_json_from_elsewhere_is_checked():
    data = json.loads(read().model_dump_json())
    data["egress"]["allow"][0]["host"] = "*.com"
    with pytest.raises(pydantic.ValidationError, match="anybody can own"):
        Policy.model_validate_json(json.dumps(data))


def test_digest_is_over_canonical_json():
    policy = read()
    data = json.loads(policy.model_dump_json())

    def without_lines(value):
        if isinstance(value, dict):
            return {key: without_lines(one) for key, one in value.items() if key not in ("source_line", "source_name")}
        return [without_lines(one) for one in value] if isinstance(value, list) else value

    assert policy_digest(policy) == "sha256:" + hashlib.sha256(rfc8785.dumps(without_lines(data))).hexdigest()


def test_digest_follows_the_rules_and_nothing_else():
    base = policy_digest(read())
    assert policy_digest(read("# a comment\n\n" + TEXT)) == base
    assert policy_digest(read(TEXT.replace("1 GiB, bytes_out_per", "1024 MiB, bytes_out_per"))) == base
    assert policy_digest(read(TEXT.replace("10 min", "600"))) == base
    changed = {
        policy_digest(read(TEXT.replace(old, new)))
        for old, new in [
            ("abc.test", "pypi.com"),
            ("cpus: 0.5", "cpus: 0.25"),
            ("private: false", "private: true"),
            ("[443, 8443]", "[443]"),
            ("  deny:\n    - {host: secret.files.hosts.test}\n", ""),
            ("/srv/data", "/srv/other"),
        ]
    }
    assert len(changed | {base}) == 7


def test_effective_without_network_has_no_way_out():
    policy = read()
    graded = effective(policy, network=False)
    assert (graded.egress.allow, graded.egress.deny, graded.services) == ((), (), ())
    assert graded.egress.limits == policy.egress.limits
    assert (graded.sandbox, graded.mounts) == (policy.sandbox, policy.mounts)
    assert effective(policy, network=True) == policy
    assert policy_digest(graded) != policy_digest(policy)
    assert Policy.model_validate_json(graded.model_dump_json()) == graded


def test_explain_lists_every_rule_with_its_line():
    rows = explain(read())
    assert [(row.kind, row.host, row.line) for row in rows] == [
        (RowKind.DENY, "secret.files.hosts.test", 9),
        (RowKind.ALLOW, "abc.test", 4),
        (RowKind.ALLOW, "*.files.hosts.test", 5),
        (RowKind.ALLOW, "files.example.org", 6),
        (RowKind.SERVICE, "model.stockade.internal", 12),
        (RowKind.MOUNT, "/data", 15),
    ]
    assert [row.tunnel for row in rows] == [False, False, False, True, False, False]
    assert rows[0].ports is None
    assert (rows[1].methods, rows[1].paths) == (("GET", "HEAD"), ("/simple/**",))
    assert "each request is decided" in rows[1].note
    assert "127.0.0.1" in rows[4].note


def test_schema_describes_the_file():
    schema = policy_schema()
    text = json.dumps(schema)
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["required"] == ["version"]
    assert set(schema["properties"]) == {"version", "egress", "services", "sandbox", "mounts", "data", "waivers"}
    limits = schema["$defs"]["SandboxLimits"]["properties"]
    assert {"wall", "cpu"} <= set(limits)
    assert "wall_s" not in text
    assert "source_line" not in text
    assert '"null"' not in text
    objects = [one for one in [schema, *schema["$defs"].values()] if one.get("type") == "object"]
    assert all(one["additionalProperties"] is False for one in objects)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("1 B", 1),
        ("64 KiB", 64 * KIB),
        ("64KiB", 64 * KIB),
        ("256 MiB", 256 * MIB),
        ("2 GiB", 2 * GIB),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text, size_bytes):
    assert read(f"version: 1\nsandbox: {{memory: {text}}}\n").sandbox.memory == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "-1",
        "0",
        "0 KiB",
        "1 kib",
        "1 K",
        "1 KB",
        "1 MB",
        "1.5 MiB",
        "1  MiB",
        "MiB",
        "1 MiB 2",
        "''",
        "2048 TiB",
        "1e3",
        "99999999999999999999",
    ],
)
def test_not_sizes(text):
    with pytest.raises(PolicyError):
        read(f"version: 1\nsandbox: {{memory: {text}}}\n")


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("90 s", 90),
        ("10 min", 600),
        ("10min", 600),
        ("1 h", 3600),
        ("2 d", 172_800),
        ("250 ms", 0.25),
        ("1.5 h", 5400),
    ],
)
def test_durations(text, duration_s):
    assert read(f"version: 1\nsandbox: {{wall: {text}}}\n").sandbox.wall_s == duration_s


@pytest.mark.parametrize(
    "text", ["0", "-1", "1 m", "1 hour", "1:30", ".inf", ".nan", "31 d", "min", "1 s 2", "''", "true", "1e2"]
)
def test_not_durations(text):
    with pytest.raises(PolicyError):
        read(f"version: 1\nsandbox: {{wall: {text}}}\n")


def test_import_is_light_and_pure():
    """The command line starts with this room, and the learning side shares it."""
    heavy = ["typer", "rich", "ruamel.yaml", "idna", "publicsuffixlist", "asyncio", "socket", "subprocess", "logging"]
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        f"import pydantic.json_schema, pydantic.networks; before = set(sys.modules)\n"
        f"import stockade.policy\n"
        f"print(*[name for name in {heavy!r} if name in sys.modules and name not in before])\n"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == ""
