# `make` alone explains itself. Everything is set up in .venv; nothing else of the machine is touched.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# How many test processes run side by side.
TEST_PROCESSES ?= 2
# More arguments for the command of a target: make test ARGS="-k queue", make run ARGS="--servers 2".
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help install run test test-fast test-fresh test-net chaos soak check format bench bench-scheduling pins wheel wheelhouse ansible check-deploy test-deploy test-numa docs docs-serve clean

help: ## show this list
	@printf 'llama-gateway: make targets\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@printf '\nARGS="..." adds arguments to the command of run, the tests, chaos, soak and the benches.\n'

install: $(STAMP) ## set up .venv with everything pinned (fast when nothing changed)
	@echo 'Ready: $(BIN)/llama-gateway'

# The newest supported Python on PATH makes the environment; an existing one of the right age is kept.
$(BIN)/python:
	@python=; \
	for name in python3.13 python3.12 python3.11 python3; do \
	  if command -v "$$name" >/dev/null && \
	     "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$name; \
	    if "$$name" -c 'import ensurepip, venv' 2>/dev/null; then break; fi; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make: no Python 3.11 or newer found. Remedy: apt-get install python3 python3-venv" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "make: $$python has no venv module. Remedy: apt-get install python3-venv" >&2; exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)

$(STAMP): $(BIN)/python requirements/dev.txt pyproject.toml
	@echo 'Installing the pinned dependencies (a minute or two the first time)'
	@$(BIN)/python -m pip install -qq --require-hashes -r requirements/dev.txt
	@$(BIN)/python -m pip install -qq --no-build-isolation --no-deps -e .
	@touch $@

run: $(STAMP) ## serve real llama.cpp servers of this machine on http://127.0.0.1:8000/v1
	@$(BIN)/llama-gateway up $(ARGS)

test: $(STAMP) ## pass every test that needs no root and no Debian package
	@$(BIN)/python -m pytest -m 'not net' -n $(TEST_PROCESSES) --dist loadfile $(ARGS)

test-fast: $(STAMP) ## only the tests that take no time and no server
	@$(BIN)/python -m pytest -m 'not net and not slow and not real' $(ARGS)

test-fresh: $(STAMP) ## the README's two commands on bare Debian 12, 13 and testing (root; mmdebstrap); ARGS="noble resolute": Ubuntu
	@$(BIN)/python -m tests.fresh $(ARGS)

test-net: $(STAMP) ## tests with packet loss, partitions, lost descriptors and jumping clocks (root; ip, nft)
	@$(BIN)/python -m pytest -m net tests/chaos $(ARGS)

chaos: $(STAMP) ## seeded faults under load, run after run: ARGS="--runs 500 --seconds 15 --resume FILE"
	@$(BIN)/python -m tests.chaos $(ARGS)

soak: $(STAMP) ## an hour of streams; memory must be flat: ARGS="--minutes 60 --streams 2000 --plot soak.png"
	@$(BIN)/python -m tests.chaos.soak $(ARGS)

check: $(STAMP) ## format, lint, types and import direction
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(STAMP) ## format the code and mend what lint can mend by itself
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) ## the data plane beside nginx, HAProxy and none (two cores; the peers must be installed)
	@$(BIN)/python -m tests.bench.dataplane $(ARGS)

bench-scheduling: $(STAMP) ## how soon requests are answered, beside nginx and HAProxy (40 minutes, two cores; ARGS="--scale 4": ten)
	@$(BIN)/python -m tests.bench.scheduling $(ARGS)

wheel: $(STAMP) ## build the wheel of this checkout in dist/ (the playbooks do it by themselves)
	@rm -f dist/llama_gateway-*.whl
	@$(BIN)/python -m pip wheel -qq --no-deps --no-build-isolation -w dist .
	@ls dist/llama_gateway-*.whl

# WHEELS_FOR="--python-version 3.12 --platform manylinux2014_aarch64": for hosts that differ from this machine.
WHEELS_FOR ?=
wheelhouse: $(STAMP) ## pack all pinned wheels in dist/wheelhouse.tar, for hosts without a package index
	@mkdir -p dist/wheelhouse
	@$(BIN)/python -m pip download -qq --require-hashes --only-binary=:all: $(WHEELS_FOR) \
	  -r requirements/local.txt -d dist/wheelhouse
	@tar -C dist/wheelhouse -cf dist/wheelhouse.tar .
	@ls dist/wheelhouse.tar

ANSIBLE := $(VENV)/ansible
$(ANSIBLE)/.installed: deploy/ansible/requirements.txt $(STAMP)
	@echo 'Installing Ansible, pinned, in $(ANSIBLE)'
	@$(BIN)/python -m venv --clear $(ANSIBLE)
	@$(ANSIBLE)/bin/python -m pip install -qq --require-hashes -r $<
	@touch $@

ansible: $(ANSIBLE)/.installed ## set up Ansible in .venv/ansible (its programs are in .venv/ansible/bin)
	@echo 'Ready: $(ANSIBLE)/bin/ansible-playbook'

check-deploy: $(ANSIBLE)/.installed ## lint the playbooks by the production profile
	@cd deploy/ansible && PATH="$(abspath $(ANSIBLE))/bin:$$PATH" ansible-lint -q --nocolor --offline
	@cd deploy/ansible && PATH="$(abspath $(ANSIBLE))/bin:$$PATH" yamllint --strict .

test-deploy: $(ANSIBLE)/.installed ## bring up real hosts (systemd-nspawn, as root) and run the playbooks over them
	@DEPLOY_TEST_ANSIBLE=$(ANSIBLE)/bin $(BIN)/python -m pytest tests/deploy -m net $(ARGS)

# Run with the oldest supported Python: what it needs is a superset of what newer ones need.
COMPILE := CUSTOM_COMPILE_COMMAND='make pins' $(BIN)/pip-compile --quiet --upgrade --strip-extras --allow-unsafe \
  --generate-hashes --annotation-style=line --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
  --no-emit-options

pins: $(STAMP) ## renew requirements/*.txt from pyproject.toml (Python 3.11)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and \
	  "make pins: needs a .venv of Python 3.11, the oldest supported one")'
	@$(COMPILE) --extra local --extra dev --extra docs --all-build-deps -o requirements/dev.txt pyproject.toml
	@$(COMPILE) -c requirements/dev.txt -o requirements/runtime.txt pyproject.toml
	@$(COMPILE) -c requirements/dev.txt --extra local -o requirements/local.txt pyproject.toml
	@$(COMPILE) -c requirements/dev.txt --only-build-deps --all-build-deps -o requirements/build.txt pyproject.toml
	@$(COMPILE) -o deploy/ansible/requirements.txt deploy/ansible/requirements.in

test-numa: $(ANSIBLE)/.installed ## run on an emulated machine with two NUMA nodes (as root; qemu-system-x86, mmdebstrap)
	@DEPLOY_TEST_ANSIBLE=$(ANSIBLE)/bin $(BIN)/python -m pytest tests/numa -m net $(ARGS)

docs: $(STAMP) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP) ## serve the documentation on http://127.0.0.1:8100 while you write
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8100

clean: ## remove .venv and everything that was made
	rm -rf $(VENV) site build dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache \
	  .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
