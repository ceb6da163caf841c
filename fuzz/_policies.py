"""Policies: any text is either refused by name and line, or a policy whose rules compile and cross the wire unchanged."""

from __future__ import annotations

from stockade.egress.gate import Rules
from stockade.errors import PolicyError
from stockade.policy import load_operator, parse_policy

_OPERATOR = load_operator(None)


def check(data: bytes) -> None:
    """Take the bytes for the file's text."""
    text = data.decode("utf-8", "replace")
    try:
        policy = parse_policy(text, source="fuzz.yaml")
    except PolicyError as error:
        told = str(error)
        assert "fuzz.yaml" in told, told
        assert all(character == "\n" or character.isprintable() for character in told), told
        return
    egress = policy.egress
    if any(rule.credential for rule in egress.allow):
        return  # whose values only an operator has
    rules = Rules.from_policy(policy, _OPERATOR, own_addresses=["11.0.0.200"], inspection=True)
    assert len(rules.allow) == len(egress.allow) and len(rules.deny) == len(egress.deny)
    again = Rules.from_json(rules.to_json())
    assert again == rules and again.to_json() == rules.to_json()
    for rule in rules.allow:
        assert rule.host not in ("*", "*.", "") and rule.ports
        assert "\n" not in rule.host and rule.host == rule.host.strip().lower()
