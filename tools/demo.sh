#!/usr/bin/env bash
# The main job: grade HumanEval in sandboxes, train with GRPO, verify every record. Called by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
stockade=.venv/bin/stockade
name=demo-$(date -u +%Y%m%d-%H%M%S)
policy=examples/humaneval/policy.yaml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
started=$SECONDS

step() { printf '\n== %s (after %d s)\n' "$*" $((SECONDS - started)); }

step "what this machine allows"
"$stockade" doctor

step "HumanEval: the 164 reference solutions, each graded in fresh sandboxes"
"$stockade" tasks humaneval --out "$work/reference.jsonl"
"$stockade" batch "$work/reference.jsonl" --policy "$policy" --run-id "$name-reference" --expect ok

step "HumanEval: five cheats on 20 problems; none may pass"
"$stockade" tasks humaneval --limit 20 --out "$work/cheats.jsonl" --candidate empty --candidate constant \
  --candidate os_exit --candidate always_equal --candidate test_file_writer
"$stockade" batch "$work/cheats.jsonl" --policy "$policy" --run-id "$name-cheats" --json >"$work/cheats.json"
.venv/bin/python - "$work/cheats.json" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    counts = json.load(file)["verdicts"]
print(f"100 cheating candidates: {counts}")
sys.exit("a cheat passed" if counts.get("ok", 0) else 0)
PYTHON

step "GRPO: a small model learns to write programs, every rollout in a sandbox"
"$stockade" train examples/grpo/job.yaml --run-id "$name-grpo"
.venv/bin/python - runs/"$name-grpo"/report.json <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    report = json.load(file)
print(f"requests: {report['allowed']} allowed, {report['denied']} denied: {report['denied_by_reason']}")
sys.exit(0 if report["allowed"] and report["denied"] else "the report shows no denied request")
PYTHON

step "the records"
for run in reference cheats grpo; do "$stockade" record verify "$name-$run"; done

step "done; open these"
printf '%s\n' runs/"$name"-{reference,cheats,grpo}/report.html
