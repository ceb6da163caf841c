"""What a rollout may do: one YAML file, read strictly, held as values that cannot be wrong.

This room is pure (reading a file aside): no clock, no network, no log. Both import trees share it, so it knows
nothing of sandboxes or proxies. A host that no rule names is denied; whatever cannot be understood is an error with
file, line, key and the nearest valid name.
"""

from __future__ import annotations

from stockade.policy._base import StrictModel
from stockade.policy._derive import Row, RowKind, effective, explain, policy_digest, unsafe_options
from stockade.policy._hosts import HostPattern
from stockade.policy._load import load_document, load_policy, parse_document, parse_policy, policy_schema
from stockade.policy._models import (
    Data,
    Egress,
    EgressLimits,
    Mount,
    Policy,
    SandboxLimits,
    Service,
    Waiver,
)
from stockade.policy._operator import (
    CredentialFile,
    OperatorConfig,
    SecretFile,
    StoreConfig,
    UidRange,
    UnsafeCidr,
    Upstream,
    load_operator,
)
from stockade.policy._paths import PathGlob
from stockade.policy._presets import PRESETS, Preset, load_preset
from stockade.policy._rules import SERVICE_ZONE, DenyRule, HostRule, RuleLimits, RunLimits
from stockade.policy._secrets import CredentialValue, SecretValue, read_credentials, read_known_secrets
from stockade.policy._site import check_site
from stockade.policy._trifecta import Held, Leg, Trifecta, trifecta
from stockade.policy._values import METHODS, ByteCount, Seconds

__all__ = [
    "METHODS",
    "PRESETS",
    "SERVICE_ZONE",
    "ByteCount",
    "CredentialFile",
    "CredentialValue",
    "Data",
    "DenyRule",
    "Egress",
    "EgressLimits",
    "Held",
    "HostPattern",
    "HostRule",
    "Leg",
    "Mount",
    "OperatorConfig",
    "PathGlob",
    "Policy",
    "Preset",
    "Row",
    "RowKind",
    "RuleLimits",
    "RunLimits",
    "SandboxLimits",
    "Seconds",
    "SecretFile",
    "SecretValue",
    "Service",
    "StoreConfig",
    "StrictModel",
    "Trifecta",
    "UidRange",
    "UnsafeCidr",
    "Upstream",
    "Waiver",
    "check_site",
    "effective",
    "explain",
    "load_document",
    "load_operator",
    "load_policy",
    "load_preset",
    "parse_document",
    "parse_policy",
    "policy_digest",
    "policy_schema",
    "read_credentials",
    "read_known_secrets",
    "trifecta",
    "unsafe_options",
]
