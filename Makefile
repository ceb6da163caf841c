# One word per job. Every target sets up what it needs in .venv and reuses it next time.
#   make demo   the main job: HumanEval graded in sandboxes, then a GRPO run; needs no compiler
#   make test   style, types, import rules, every test; as root also the attacks again as an ordinary user
#   make lint   only style, types and import rules
#   make fuzz   every property test with many more examples, then coverage-guided fuzzing (FUZZ_MINUTES=n)
#   make soak   rollouts, then egress traffic with killed workers, ten minutes each (MINUTES=n), counting what stays behind
#   make bench  the figures of docs/performance.md
#   make clean  .venv and caches; never a run's directory, which is a record
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PY := .venv/bin/python
MINUTES ?= 10
FUZZ_MINUTES ?= 30
# Cores are shared with the sandboxes: two torch threads on busy cores spin for each other.
export OMP_NUM_THREADS := 1

SETUP := tools/setup.sh requirements/build.txt requirements/core.txt

.PHONY: help demo test lint fuzz soak bench clean

help:
	@sed -n 's/^#   make/  make/p' Makefile

.venv/.stamp-demo: $(SETUP) requirements/train.txt requirements/humaneval.txt pyproject.toml
	@bash tools/setup.sh core train humaneval
	@touch $@

.venv/.stamp-lint: $(SETUP) requirements/dev.txt pyproject.toml
	@bash tools/setup.sh core dev
	@touch $@

.venv/.stamp-test: $(SETUP) requirements/train.txt requirements/humaneval.txt requirements/dev.txt pyproject.toml
	@bash tools/setup.sh core train humaneval dev programs
	@touch $@

demo: .venv/.stamp-demo
	@bash tools/demo.sh

lint: .venv/.stamp-lint
	@bash tools/lint.sh

test: .venv/.stamp-test
	@bash tools/lint.sh
	$(PY) -m pytest
	$(PY) tools/test_as_user.py tests/attacks tests/sandbox tests/egress/proxy tests/egress/gateway tests/egress/store \
		tests/egress/test_lockdown.py tests/egress/test_lockdown_attacks.py tests/clients

fuzz: .venv/.stamp-test
	$(PY) -m pytest -m hypothesis --hypothesis-profile=fuzz --timeout=0
	$(PY) -m fuzz --minutes $(FUZZ_MINUTES)

soak: .venv/.stamp-test
	$(PY) -m bench.soak --minutes $(MINUTES)
	$(PY) -m bench.egress_soak --minutes $(MINUTES)

bench: .venv/.stamp-test
	@for name in sandbox_start exec_latency rollouts proxy egress; do $(PY) -m bench.$$name; done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests bench fuzz tools -name __pycache__ -type d -prune -exec rm -rf {} +
