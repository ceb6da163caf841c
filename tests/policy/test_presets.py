"""Presets as values: strict files of the package, expanded once, named wherever a rule is named."""

from __future__ import annotations

import datetime as dt
from importlib import resources

import pytest

from stockade.errors import PolicyError
from stockade.policy import (
    PRESETS,
    Policy,
    effective,
    explain,
    load_preset,
    parse_policy,
    policy_digest,
    policy_schema,
    trifecta,
    unsafe_options,
)


def read(presets: str, *more: str) -> Policy:
    return parse_policy("\n".join(["version: 1", "egress:", f"  presets: [{presets}]", *more, ""]), source="p")


ALL = ", ".join(PRESETS)


def test_every_file_is_a_preset_and_every_preset_a_file():
    folder = resources.files("stockade.policy").joinpath("presets")
    assert sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("__")) == [
        f"{name}.yaml" for name in PRESETS
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_only_reads_and_takes_no_dangerous_option(name):
    preset = load_preset(name)
    assert preset.about
    for rule in preset.allow:
        taken = (rule.unsafe_many_owners, rule.tcp, rule.websocket, rule.credential, rule.host.is_suffix)
        assert not any(taken)
        assert rule.inspected
        assert rule.paths is not None
        assert rule.read_only or rule.methods == ("POST",)
        assert rule.source_name == f"preset {name}"
        assert rule.source_line > 0
    assert unsafe_options(read(name)) == ()


def test_writing_methods_are_only_those_that_ask():
    posts = [rule for name in PRESETS for rule in load_preset(name).allow if not rule.read_only]
    assert {str(glob).rsplit("/", 1)[-1] for rule in posts for glob in rule.paths or ()} == {"git-upload-pack", "*"}
    assert all("paths-info" in str(glob) for rule in posts for glob in rule.paths or () if str(glob).endswith("/*"))


def test_rules_of_presets_come_first_and_in_order():
    policy = read("npm-read, pypi-read", "  allow:", "    - {host: a.example}", "  deny:", "    - {host: b.example}")
    names = [rule.source_name for rule in policy.egress.allow]
    assert names == ["preset npm-read"] * 3 + ["preset pypi-read"] * 3 + [""]
    assert policy.egress.allow[-1].source_line == 5
    assert [rule.source_name for rule in policy.egress.deny] == [""]
    assert policy.egress.presets == ("npm-read", "pypi-read")


def test_a_policy_read_back_from_json_is_not_expanded_twice():
    policy = read(ALL)
    again = Policy.model_validate_json(policy.model_dump_json())
    assert again == policy
    assert [rule.source_name for rule in again.egress.allow] == [rule.source_name for rule in policy.egress.allow]
    assert policy_digest(again) == policy_digest(policy)


def test_the_digest_covers_what_a_preset_allows():
    digests = {policy_digest(read(name)) for name in PRESETS}
    assert len(digests | {policy_digest(parse_policy("version: 1\n", source="p"))}) == len(PRESETS) + 1


def test_presets_built_in_code_are_expanded_too():
    policy = Policy.model_validate({"version": 1, "egress": {"presets": ("pypi-read",)}})
    assert policy.egress.allow == read("pypi-read").egress.allow


def test_without_network_nothing_is_left():
    assert effective(read(ALL), network=False).egress.allow == ()


def test_errors_name_the_files_own_rule():
    """Places of a document count its own rules, not those that presets put before them."""
    with pytest.raises(PolicyError, match="given twice") as caught:
        read("pypi-read", "  allow:", "    - {host: a.example}", "    - {host: a.example}")
    assert (caught.value.line, caught.value.key) == (6, "egress.allow[1].host")
    with pytest.raises(PolicyError, match="never takes effect") as limited:
        read("pypi-read", "  allow:", "    - {host: a.example}", "    - {host: b.example, query_bytes: 9999}")
    assert (limited.value.line, limited.value.key) == (6, "egress.allow[1].query_bytes")


def test_a_policy_may_take_away_from_a_preset():
    for deny in (
        "host: codeload.github.com",
        "host: '*.githubusercontent.com'",
        "host: github.com, paths: ['/o/answer/**']",
    ):
        policy = read("github-read", "  deny:", f"    - {{{deny}}}")
        assert len(policy.egress.deny) == 3


@pytest.mark.parametrize("rule", ["host: github.com", "host: github.com, tcp: true, ports: [443]"])
def test_egress_case_067_a_policy_cannot_go_around_a_preset(rule):
    with pytest.raises(PolicyError, match=r"tunnels to it are open|go through as they are") as caught:
        read("github-read", "  allow:", f"    - {{{rule}, unsafe_many_owners: true}}")
    assert (caught.value.line, caught.value.key) == (5, "egress.allow[0].host")
    assert "see preset github-read line 8" in str(caught.value.hint)


def test_git_over_ssh_is_a_rule_of_its_own():
    policy = read(
        "github-read", "  allow:", "    - {host: github.com, tcp: true, ports: [22], unsafe_many_owners: true}"
    )
    assert policy.egress.allow[-1].tcp


def test_as_many_rules_as_without_presets_may_be_listed():
    rules = [f"    - {{host: h{index}.example.org, methods: [GET]}}" for index in range(500)]
    assert len(read(ALL, "  allow:", *rules).egress.allow) > 500
    with pytest.raises(PolicyError, match="too long"):
        read(ALL, "  allow:", *rules, "    - {host: x.example.org}")


def test_rows_and_the_trifecta_name_the_preset():
    policy = read("npm-read, pypi-read", "  allow:", "    - {host: a.example}", "data: {private: true}")
    rows = explain(policy)
    assert [row.source for row in rows] == ["preset npm-read"] * 3 + ["preset pypi-read"] * 3 + [""]
    result = trifecta(policy, today=dt.date(2026, 11, 30))
    assert result.refused, "reading is sending too"
    assert "external communication: line 5, preset npm-read, preset pypi-read" in result.message
    assert [held.line for held in result.external] == [None] * 6 + [5]


def test_the_schema_lists_them():
    egress = policy_schema()["$defs"]["Egress"]["properties"]
    assert egress["presets"]["items"]["enum"] == list(PRESETS)
    assert egress["allow"]["maxItems"] == 500
