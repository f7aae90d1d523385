# `make` alone lists the targets. Everything is set up in .venv; nothing else on the machine changes.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
# Two targets at once would install into the same environment.
.NOTPARALLEL:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# The Python for .venv; empty: the system's, or else the newest supported one on PATH.
PYTHON ?=
# Parallel test processes. Tests wait for half of their time, so three keep two cores busy.
TEST_PROCESSES ?= 3
# Further arguments for the command of a target: make test ARGS="-k queue", make run ARGS="--servers 2".
ARGS ?=
# The tests of a file share its servers, so one process runs them. tests/conftest.py puts the files
# with the longest tests first.
PARALLEL := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Tests start hundreds of processes. Without kept bytecode each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install dev run llama-server test test-all test-fresh chaos drill soak fuzz check format bench bench-scheduling pins wheel wheelhouse ansible check-deploy test-deploy test-numa docs docs-serve clean

help: ## show this list
	@printf 'llama-gateway: make targets\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@printf '\nARGS="..." adds arguments to the command of run, the tests, chaos, drill, soak and the benches.\n'

install: $(VENV)/.local ## set up .venv with what `make run` needs (fast when nothing changed)
	@echo 'Ready: $(BIN)/llama-gateway'

dev: $(VENV)/.dev ## set up .venv with everything for working on it: tests, checks, documentation
	@echo 'Ready: $(BIN)/llama-gateway, and what the other targets need'

# An existing environment is kept, unless PYTHON names another Python than its own.
ifneq ($(PYTHON),)
ifneq ($(shell PYTHON='$(PYTHON)' setup/find-python 2>/dev/null),$(realpath $(BIN)/python))
.PHONY: $(BIN)/python
endif
endif
$(BIN)/python:
	@python=$$(PYTHON='$(PYTHON)' setup/find-python); \
	echo "Making $(VENV) with $$("$$python" --version) ($$python)"; \
	"$$python" -m venv --clear $(VENV)

# Each set includes the ones before it, so that one run of pip installs all missing packages.
HELD_BY_local := build local
HELD_BY_test := build local test
HELD_BY_dev := build local test dev

$(VENV)/.build: $(BIN)/python requirements/build.txt
	@$(BIN)/python setup/install.py build
	@touch $@

$(VENV)/.local $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(BIN)/python requirements/%.txt requirements/build.txt pyproject.toml
	@$(BIN)/python setup/install.py $* --checkout
	@$(BIN)/python setup/python_build.py
	@touch $(HELD_BY_$*:%=$(VENV)/.%)

run: $(VENV)/.local ## serve real llama.cpp servers of this machine on http://127.0.0.1:8000/v1
	@$(BIN)/llama-gateway up $(ARGS)

llama-server: $(BIN)/python ## fetch the real llama-server for tests, in the user's cache (Debian; no root); ARGS=--renew: the newest
	@$(BIN)/python setup/llama_server.py $(ARGS)

test: $(VENV)/.test ## run the fast tests and a smoke test of each real part; ARGS=PATH: all tests below PATH
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: $(VENV)/.dev ## run all tests, group by group: ARGS=kills, ARGS=--list, ARGS=long
	@$(BIN)/python -m tests.ci.all $(ARGS)

test-fresh: $(VENV)/.test ## run README's two commands on bare Debian 12, 13 and testing (root; mmdebstrap); ARGS="noble resolute": Ubuntu
	@$(BIN)/python -m tests.fresh $(ARGS)

chaos: $(VENV)/.test ## inject seeded faults under load, run after run: ARGS="--runs 500 --seconds 15 --resume FILE"
	@$(BIN)/python -m tests.chaos $(ARGS)

drill: $(VENV)/.test ## run three gateways as one behind HAProxy through faults (root): ARGS="--faults all"
	@$(BIN)/python -m tests.cluster.drill $(ARGS)

soak: $(VENV)/.test ## run streams for an hour; memory must be flat: ARGS="--minutes 60 --streams 2000"
	@$(BIN)/python -m tests.chaos.soak $(ARGS)

fuzz: $(VENV)/.dev ## fuzz what reads strangers' bytes: ARGS="--runs 1000000 --only head", ARGS="--cases 50000 --only api"
	@$(BIN)/python -m tests.fuzz $(ARGS)

check: $(VENV)/.dev ## check format, lint, types, import direction and the budgets that take seconds
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m tests.house.budgets

format: $(VENV)/.dev ## format the code and apply lint's automatic fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.test ## measure the data plane beside nginx, HAProxy and no proxy (two cores; peers must be installed)
	@$(BIN)/python -m tests.bench.dataplane $(ARGS)

bench-scheduling: $(VENV)/.test ## measure response times beside nginx and HAProxy (40 minutes, two cores; ARGS="--scale 4": ten)
	@$(BIN)/python -m tests.bench.scheduling $(ARGS)

wheel: $(VENV)/.build ## build the wheel of this checkout in dist/ (the playbooks do it themselves)
	@rm -f dist/llama_gateway-*.whl
	@$(BIN)/python -m pip wheel -qq --no-deps --no-build-isolation -w dist .
	@ls dist/llama_gateway-*.whl

# WHEELS_FOR="--python-version 3.12 --platform manylinux2014_aarch64": for hosts that differ from this machine.
WHEELS_FOR ?=
wheelhouse: $(BIN)/python ## pack all pinned wheels in dist/wheelhouse.tar, for hosts without a package index
	@mkdir -p dist/wheelhouse
	@$(BIN)/python -m pip download -qq --require-hashes --only-binary=:all: $(WHEELS_FOR) \
	  -r requirements/local.txt -d dist/wheelhouse
	@tar -C dist/wheelhouse -cf dist/wheelhouse.tar .
	@ls dist/wheelhouse.tar

ANSIBLE := $(VENV)/ansible
$(ANSIBLE)/.installed: deploy/ansible/requirements.txt $(BIN)/python
	@echo 'Installing Ansible, pinned, in $(ANSIBLE)'
	@$(BIN)/python -m venv --clear $(ANSIBLE)
	@$(ANSIBLE)/bin/python -m pip install -qq --require-hashes -r $<
	@touch $@

ansible: $(ANSIBLE)/.installed ## set up Ansible in .venv/ansible (its programs are in .venv/ansible/bin)
	@echo 'Ready: $(ANSIBLE)/bin/ansible-playbook'

check-deploy: $(ANSIBLE)/.installed ## lint the playbooks by the production profile
	@cd deploy/ansible && PATH="$(abspath $(ANSIBLE))/bin:$$PATH" ansible-lint -q --nocolor --offline
	@cd deploy/ansible && PATH="$(abspath $(ANSIBLE))/bin:$$PATH" yamllint --strict .

test-deploy: $(VENV)/.test $(ANSIBLE)/.installed ## start hosts (systemd-nspawn, as root) and run the playbooks over them
	@DEPLOY_TEST_ANSIBLE=$(ANSIBLE)/bin $(BIN)/python -m pytest tests/deploy -m net $(ARGS)

# Runs with the oldest supported Python, whose pins are a superset of those of newer ones.
COMPILE := CUSTOM_COMPILE_COMMAND='make pins' $(BIN)/pip-compile --quiet --upgrade --strip-extras --allow-unsafe \
  --generate-hashes --annotation-style=line --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
  --no-emit-options

pins: $(VENV)/.dev ## renew requirements/*.txt from pyproject.toml (Python 3.11)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and \
	  "make pins: needs a .venv of Python 3.11, the oldest supported one: make PYTHON=python3.11 pins")'
	@$(COMPILE) --extra local --extra tui --extra otel --extra test --extra dev --extra docs --all-build-deps -o requirements/dev.txt pyproject.toml
	@$(COMPILE) -c requirements/dev.txt -o requirements/runtime.txt pyproject.toml
	@$(COMPILE) -c requirements/dev.txt --extra otel -o requirements/otel.txt pyproject.toml
	@$(COMPILE) -c requirements/dev.txt --extra local --extra tui --extra otel -o requirements/local.txt pyproject.toml
	@$(COMPILE) -c requirements/dev.txt --extra local --extra tui --extra otel --extra test -o requirements/test.txt pyproject.toml
	@$(COMPILE) -c requirements/dev.txt --only-build-deps --all-build-deps -o requirements/build.txt pyproject.toml
	@$(COMPILE) -o deploy/ansible/requirements.txt deploy/ansible/requirements.in

test-numa: $(VENV)/.test $(ANSIBLE)/.installed ## run on an emulated machine with two NUMA nodes (as root; qemu-system-x86, mmdebstrap)
	@DEPLOY_TEST_ANSIBLE=$(ANSIBLE)/bin $(BIN)/python -m pytest tests/numa -m net $(ARGS)

docs: $(VENV)/.dev ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.dev ## serve the documentation on http://127.0.0.1:8100 while you write
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8100

clean: ## remove .venv and all build results
	rm -rf $(VENV) site build dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache \
	  .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
