"""A policy and the machine that it is to hold on: what the one names and the other lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stockade.errors import PolicyError
from stockade.policy._errors import nearest

if TYPE_CHECKING:
    from pathlib import Path

    from stockade.policy._models import Policy
    from stockade.policy._operator import OperatorConfig


def check_site(policy: Policy, operator: OperatorConfig, *, path: Path | str | None = None) -> None:
    """Refuse a policy that this machine cannot keep; ``path`` is the policy's file, for messages.

    Raises:
        PolicyError: for a credential that the operator does not have, and for wildcards where the upstream looks up the
            names (egress.md case 95).
    """
    names = [one.name for one in operator.credentials]
    own = -1
    for rule in policy.egress.allow:
        own += not rule.source_name
        if rule.credential is not None and rule.credential not in names:
            message = f"the operator's file has no credential {rule.credential!r}"
            hint = nearest(rule.credential, names) if names else "it has none at all; ask the operators for one"
            raise _fault(message, hint, path, rule.source_line, f"egress.allow[{own}].credential")
        if operator.upstream is not None and operator.upstream.name_only and rule.host.is_suffix:
            message = f"a wildcard cannot be kept: the upstream looks up the names, also those under {rule.host}"
            raise _fault(message, "name each host", path, rule.source_line, f"egress.allow[{own}].host")


def _fault(message: str, hint: str, path: Path | str | None, line: int | None, key: str) -> PolicyError:
    return PolicyError(message, path=path, line=line or None, key=key, hint=hint)
