# Everything runs in .venv, which is made on first use and renewed when pyproject.toml or
# .ci/constraints.txt change. `make help` lists the targets.
#   PYTHON=python3.12  the interpreter to build with     OFFLINE=1  install from .wheels, no network
#   ARGS='-k digits'   passed on to pytest, the demo or the benchmarks

export PYTHON OFFLINE
BIN := .venv/bin
CONSTRAINTS := .ci/constraints.txt
BENCHES := run serving rounds
SUITE_crash := tests/faults/test_crashes.py
SUITE_rounds := tests/faults/test_rounds_long.py
SUITE_signals := tests/faults/test_signals.py
SUITE_records := tests/data/test_records_append.py
SUITE_import := tests/onnx/test_exports.py
SUITE_mutation := tests/mutation/test_search.py
SUITE_robustness := tests/federated/study/test_attacks.py
SUITE_privacy := tests/federated/study/test_private_accuracy.py
SUITE_inversion := tests/federated/privacy/test_inversion.py
SUITE_zoo := tests/engines/xla/test_zoo.py

.PHONY: help venv demo test quick deep lint format types imports proto wheels bench oracles peers gpu constraints clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 20

venv:
	@.ci/venv .venv -c $(CONSTRAINTS) -e '.[dev]'

demo: venv ## train, convert, serve, roll out, learn together: the whole story in two to three minutes
	@$(BIN)/triplane demo $(ARGS)

test: venv ## the suite, at most 8 minutes on 2 cores
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

long: venv ## the whole demo, 120 kills of every kind of process, all cases of what `make test` samples
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m 'long and not deep' $(ARGS)

quick: venv ## lint, types, imports and a sample of the fast tests, about a minute
	@$(MAKE) --no-print-directory lint imports types
	@TRIPLANE_SAMPLED=1 $(BIN)/python -m pytest -q -n 2 -m 'not deep and not long and not slow' $(ARGS)

deep: venv ## the long searches, minutes each; SUITE=crash, rounds, signals, records, import, mutation, privacy, robustness, inversion or zoo writes docs/evidence/
	@HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -o faulthandler_timeout=20000 -m 'deep or hypothesis' $(SUITE_$(SUITE)) $(ARGS)

lint: venv ## ruff: rules and format
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

format: venv ## let ruff mend what it can
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

types: venv ## mypy, strict
	@$(BIN)/mypy

imports: venv ## the direction of imports between and inside the packages
	@$(BIN)/lint-imports --no-logo

proto: ## regenerate the wire code from proto/**/*.proto
	@.ci/proto

wheels: venv ## download everything that OFFLINE=1 needs into .wheels
	@rm -rf .wheels
	@$(BIN)/python -m pip wheel -qq -w .wheels -c $(CONSTRAINTS) '.[dev]' 'hatchling>=1.27' editables
	@rm -f .wheels/triplane-*.whl
	@echo ".wheels holds $$(ls .wheels | wc -l) wheels, $$(du -sm .wheels | cut -f1) MB; now: make demo OFFLINE=1"

bench: venv peers ## ratios against PyTorch, Flower and others; docs/benchmarks.md tells how to read them
	@for bench in $(BENCHES); do $(BIN)/python benchmarks/$$bench.py $(ARGS) || exit 1; done

oracles: ## the environment that exports networks of other libraries, for `make deep SUITE=import`
	@.ci/venv .venv-oracles -r benchmarks/requirements-oracles.txt

peers: ## the environments of the benchmarks' other sides: PyTorch, Flower, its simulation, JAX, onnxsim, MindSpore, record formats
	@.ci/venv .venv-peers -r benchmarks/requirements-peers.txt
	@for rival in jax onnxsim mindspore flower-simulation $(addprefix records-,arrow arrayrecord grain mds tfrecord); do \
	  .ci/venv .venv-peers-$$rival -r benchmarks/requirements-$$rival.txt || exit 1; done
	@.ci/venv .venv-peers-flower -c .ci/constraints-flower.txt -r benchmarks/requirements-flower.txt

gpu: ## check training on a GPU, with PYTHON (python3) and its jax and onnxruntime-gpu; needs no venv
	@$(or $(PYTHON),python3) .ci/gpu_check.py --gpu $(ARGS)

constraints: ## resolve both pin sets anew: with Flower's pins (protobuf 6) and without (protobuf 7)
	@.ci/constrain .ci/constraints.txt '.[dev]'
	@.ci/constrain .ci/constraints-flower.txt '.[dev,flower]'

clean: ## remove environments, caches and build output
	rm -rf .venv .venv-* .wheels build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
