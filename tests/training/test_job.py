from __future__ import annotations

from pathlib import Path

import pytest

from stockade.errors import JobError
from stockade.policy import load_policy, parse_policy
from stockade.training import ResolvedJob, load_job, parse_job, rate_for, resolve_job
from stockade.training._service import service_of
from tests.support import ROOT

EXAMPLES = ROOT / "examples" / "grpo"
MINIMAL = """\
version: 1
name: small
output: out
policy: policy.yaml
model: {kind: tiny}
tasks: {kind: toy}
warm_up: {steps: 5}
"""
POLICY = """\
version: 1
services:
  - {name: rates, address: 127.0.0.1, port: 18473, methods: [GET], paths: ["/v1/rate"]}
"""


def refused(text: str) -> JobError:
    with pytest.raises(JobError) as caught:
        parse_job(text, source=Path("jobs/job.yaml"))
    return caught.value


def test_a_minimal_job_has_the_measured_defaults():
    job = parse_job(MINIMAL, source=Path("jobs/job.yaml"))
    assert (job.engine, job.threads, job.control) == ("trl", 1, "none")
    assert (job.grpo.steps, job.grpo.prompts, job.grpo.samples) == (30, 8, 8)
    assert job.unsafe == ()
    assert job.policy == "jobs/policy.yaml"


@pytest.mark.parametrize("name", ["job.yaml", "short.yaml"])
def test_the_examples_load_and_fit_their_policy(name):
    job = load_job(EXAMPLES / name)
    resolved = resolve_job(job, load_policy(Path(job.policy)))
    assert resolved.service_url == "http://rates.stockade.internal:18473"
    assert not resolved.unsafe


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("name: small", "nmae: small"), 2, ["nmae", "'name'"]),
        (("{steps: 5}", "{step: 5}"), 7, ["warm_up", "'steps'"]),
        (("kind: toy", "kind: humaneval"), 6, ["tasks.kind", "humaneval"]),
        (("{kind: tiny}", "{kind: tiny, path: here}"), 5, ["model", "either kind: tiny or a path"]),
        (("{kind: tiny}", "{}"), 5, ["model", "either kind: tiny or a path"]),
        (("{kind: tiny}", "{path: here, layers: 2}"), 5, ["model", "hidden and layers"]),
        (("{kind: tiny}", "{kind: tiny, hidden: 33}"), 5, ["model.hidden"]),
        (("version: 1", "version: 2"), 1, ["version"]),
        (("output: out\n", ""), None, ["output", "missing"]),
        (("warm_up: {steps: 5}\n", ""), None, ["tiny model starts from nothing"]),
        (("steps: 5", "steps: yes"), 7, ["warm_up.steps"]),
        (("steps: 5", "steps: 0"), 7, ["warm_up.steps", "out of range"]),
        (("steps: 5", 'steps: "5"'), 7, ["warm_up.steps", "quotes"]),
        (("name: small", "name: Small Job"), 2, ["name"]),
        (("version: 1\n", "version: 1\nversion: 1\n"), 2, ["version"]),
        (("{steps: 5}", "&x {steps: 5}"), 7, []),
        (("name: small", "name: small\nengine: verl"), 3, ["engine", "trl"]),
        (("name: small", "name: small\ncontrol: random"), 3, ["control", "coin_flip"]),
    ],
)
def test_a_bad_job_is_refused_with_file_line_and_key(change, line, words):
    error = refused(MINIMAL.replace(*change))
    assert error.path == "jobs/job.yaml"
    if line is not None:
        assert error.line == line
    for word in words:
        assert word in str(error)


def test_the_limit_of_dropped_groups_can_only_be_raised_as_unsafe():
    assert "grpo" in str(refused(MINIMAL + "grpo: {dropped_share: 0.5}\n"))
    job = parse_job(MINIMAL + "grpo: {unsafe_dropped_share: 0.5}\n", source=Path("job.yaml"))
    assert job.unsafe == ("grpo.unsafe_dropped_share: 0.5",)


def test_a_stricter_limit_is_not_unsafe():
    job = parse_job(MINIMAL + "grpo: {unsafe_dropped_share: 0.0}\n", source=Path("job.yaml"))
    assert job.unsafe == ()


def test_a_model_folder_must_hold_a_model(tmp_path):
    text = MINIMAL.replace("{kind: tiny}", "{path: weights}")
    with pytest.raises(JobError, match=r"weights holds no model"):
        parse_job(text, source=tmp_path / "job.yaml")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    job = parse_job(text.replace("warm_up: {steps: 5}\n", ""), source=tmp_path / "job.yaml")
    assert job.model.folder == tmp_path / "weights"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b""])
def test_an_unreadable_file_is_a_job_error(tmp_path, content):
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError, match=r"job\.yaml"):
        load_job(path)


def test_a_resolved_job_survives_json_and_knows_no_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = resolve_job(parse_job(MINIMAL, source=Path("job.yaml")), parse_policy(POLICY, source="p"))
    again = ResolvedJob.model_validate_json(resolved.model_dump_json())
    assert again == resolved
    assert again.folder == tmp_path / "out"
    assert "policy" not in ResolvedJob.model_fields
    assert again.rate == rate_for(3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("rates", "prices"), "has no service 'rates'"),
        (("127.0.0.1", "11.0.0.7"), "is not this machine"),
        (("/v1/rate", "/v1/cost"), "does not allow GET /v1/rate"),
        (("[GET]", "[POST]"), "does not allow GET /v1/rate"),
    ],
)
def test_a_policy_that_cannot_serve_the_tasks_is_refused(change, words):
    job = parse_job(MINIMAL, source=Path("job.yaml"))
    with pytest.raises(JobError, match=words):
        resolve_job(job, parse_policy(POLICY.replace(*change), source="policy.yaml"))


def test_the_example_policy_keeps_programs_from_the_cost():
    job = load_job(EXAMPLES / "job.yaml")
    service = service_of(job, load_policy(Path(job.policy)))
    assert any(glob.matches("/v1/rate") for glob in service.paths)
    assert not any(glob.matches("/v1/cost") for glob in service.paths)


def test_rates_are_no_operands_of_tasks():
    assert all(rate_for(seed) > 10 for seed in range(200))
    assert len({rate_for(seed) for seed in range(80)}) == 80
