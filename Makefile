# Everything a person or CI runs here. `make` alone explains the targets.
#
# The environment is .venv, made from requirements/dev.lock by the uv that the same lock pins.
# It is built once, checked by time stamps, and synced again when the lock changes. Nothing is
# resolved or downloaded outside the lock: the build backend, node for pyright and uv are in it.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/dev.lock
JOB ?= manifests/samples/stdlib-4k.yaml
# Those that run on any machine take --output; those that need a certain GPU say so at their top.
BENCH ?= $(shell grep -l '"--output"' benchmarks/*/*.py)
ARGS ?=
PYTEST_ARGS ?=
# One waits for the cluster's pods while the other computes; more do not fit two cores.
TEST_PROCESSES ?= 2

# The interpreter that makes the environment is looked for outside of it.
HOST_PATH := $(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PATH := $(CURDIR)/$(BIN):$(PATH)
# A missing interpreter is an error with a name, not a download.
export UV_PYTHON_DOWNLOADS := never
# The CUDA wheels are large; the default of 30 seconds without data is short for them.
export UV_HTTP_TIMEOUT ?= 180
# Otherwise pyright asks the package index for a newer version of itself on every run.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help setup demo test cluster cluster-down lint format bench crd charts lock hooks clean

help: ## Explain the targets
	@printf 'Flash-MSA Operator\n\n'
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile
	@printf '\nTo use the msa command in this shell: . %s/activate\n' '$(BIN)'
	@printf 'Another job file: make demo JOB=my-job.yaml ARGS="--set training.maxSteps=20"\n'
	@printf 'One benchmark:    make bench BENCH=benchmarks/kernels/memory_tiled.py\n'
	@printf 'One test file:    .venv/bin/pytest tests/test_house.py\n'

setup: $(VENV)/.installed ## Create or update the environment in .venv
	@echo 'Ready. To use the msa command in this shell: . $(BIN)/activate'

demo: $(VENV)/.installed ## Train a small model at context length 4096 on this machine
	$(BIN)/msa run $(JOB) $(ARGS)

test: lint ## Run the linters, then every test
	@# First: a cold build takes longer than a test may. What cannot be built, its tests name.
	$(BIN)/python tests/e2e build || test $$? -eq 3
	$(BIN)/pytest --numprocesses=$(TEST_PROCESSES) --no-loadscope-reorder $(PYTEST_ARGS)

cluster: $(VENV)/.installed ## Bring up a Kubernetes of two nodes with KubeRay; make cluster-down ends it
	$(BIN)/python tests/e2e up $(or $(NAME),dev)

cluster-down: $(VENV)/.installed
	$(BIN)/python tests/e2e down $(or $(NAME),dev)

lint: $(VENV)/.installed ## Style, types, import rules, and whether what is generated is current
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m msa_operator.crd --check
	$(BIN)/python -m msa_operator.chart --check

format: $(VENV)/.installed ## Format the code and fix what can be fixed by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.installed ## Run the benchmarks and record each result beside its script
	@set -e; for script in $(BENCH); do \
	    echo "$$script"; $(BIN)/python "$$script" --output "$${script%.py}.json" $(ARGS); \
	done

crd: $(VENV)/.installed ## Generate manifests/crds, and what the charts take from the code
	$(BIN)/python -m msa_operator.crd
	$(BIN)/python -m msa_operator.chart

charts: crd ## Render manifests/install.yaml from the charts; builds helm once
	$(BIN)/python tests/e2e render

# Existing pins are kept; `make lock ARGS=--upgrade` moves them.
PIN := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
       --no-emit-index-url --no-header $(ARGS) pyproject.toml
lock: $(BIN)/uv ## Pin the dependencies of pyproject.toml again
	$(BIN)/$(PIN) --extra train --extra dev --output-file $(LOCK)
	$(BIN)/$(PIN) --constraints $(LOCK) --output-file requirements/operator.lock
	$(BIN)/$(PIN) --extra train --constraints $(LOCK) --output-file requirements/worker.lock
	echo 'hatchling' | $(BIN)/$(subst pyproject.toml,-,$(PIN)) --constraints $(LOCK) \
	    --output-file requirements/build.lock

hooks: $(VENV)/.installed ## Run the linters before every commit in this checkout
	$(BIN)/pre-commit install

clean: ## Remove the environment and every cache; runs/ is kept
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/uv:
	@set -e; \
	python=$$(PATH='$(HOST_PATH)' sh requirements/find-python.sh \
	    $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)); \
	echo "Creating $(VENV) with $$python"; \
	"$$python" -m venv $(VENV); \
	awk '/^[^ #]/ {keep = /^uv==/} keep' $(LOCK) > $(VENV)/uv.lock; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --require-hashes --only-binary :all: --requirement $(VENV)/uv.lock

$(VENV)/.synced: $(LOCK) | $(BIN)/uv
	@# Compiled here: where PYTHONDONTWRITEBYTECODE is set, and in pods that mount this folder for
	@# reading, every process would compile all of PyTorch and Ray that it imports, for itself.
	$(BIN)/uv pip sync --compile-bytecode --require-hashes $(LOCK)
	@touch $@

$(VENV)/.installed: $(VENV)/.synced pyproject.toml
	$(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
