#!/usr/bin/env bash
# The main job: grade HumanEval in sandboxes, train with GRPO, verify both records. Called by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
stockade=.venv/bin/stockade
runs=runs/demo-$(date -u +%Y%m%d-%H%M%S)
started=$SECONDS

step() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - started)); }

step "what this machine allows"
"$stockade" doctor

step "HumanEval: the 164 reference solutions, each graded in fresh sandboxes"
"$stockade" batch humaneval:reference --policy examples/humaneval/policy.yaml --run-dir "$runs/reference" --expect all

step "HumanEval: five cheats on 20 problems; none may pass"
"$stockade" batch humaneval:cheats --limit 20 --policy examples/humaneval/policy.yaml --run-dir "$runs/cheats" --expect none

step "GRPO: a small model learns to write programs, every rollout in a sandbox"
"$stockade" train examples/grpo/job.yaml --run-dir "$runs/grpo"

step "the records"
for run in reference cheats grpo; do "$stockade" record verify "$runs/$run"; done

step "done; open these"
printf '%s\n' "$runs/reference/report.html" "$runs/cheats/report.html" "$runs/grpo/report.html"
