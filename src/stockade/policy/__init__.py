"""What a rollout may do: one YAML file, read strictly, held as values that cannot be wrong.

This room is pure (reading a file aside): no clock, no network, no log. Both import trees share it, so it knows
nothing of sandboxes or proxies. A host that no rule names is denied; whatever cannot be understood is an error with
file, line, key and the nearest valid name.
"""

from __future__ import annotations

from stockade.policy._derive import Row, RowKind, effective, explain, policy_digest
from stockade.policy._hosts import HostPattern
from stockade.policy._load import load_document, load_policy, parse_document, parse_policy, policy_schema
from stockade.policy._models import (
    SERVICE_ZONE,
    Data,
    DenyRule,
    Egress,
    EgressLimits,
    HostRule,
    Mount,
    Policy,
    SandboxLimits,
    Service,
    StrictModel,
    Waiver,
)
from stockade.policy._operator import OperatorConfig, UidRange, UnsafeCidr, load_operator
from stockade.policy._paths import PathGlob
from stockade.policy._trifecta import Held, Leg, Trifecta, trifecta
from stockade.policy._values import METHODS, ByteCount, Seconds

__all__ = [
    "METHODS",
    "SERVICE_ZONE",
    "ByteCount",
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
    "Row",
    "RowKind",
    "SandboxLimits",
    "Seconds",
    "Service",
    "StrictModel",
    "Trifecta",
    "UidRange",
    "UnsafeCidr",
    "Waiver",
    "effective",
    "explain",
    "load_document",
    "load_operator",
    "load_policy",
    "parse_document",
    "parse_policy",
    "policy_digest",
    "policy_schema",
    "trifecta",
]
