# The two set-up commands are `make test` and `make tune`; both make `.venv` when it is missing or the lock changed.
# Needs Python 3.11 or newer, git and make; everything else comes from the Python package registry that pip is set to.

PYTHON_BIN ?= python3
VENV := .venv
DOORS := .venv-doors
LOCK := requirements-dev.lock
VERSION ?= 2.11.0
PYTHON ?= 3.12
DRAWS ?= 200
RANKS ?= 2
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
# One thread a test process: two cores, and most tests start ranks of their own.
QUIET := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# What a GPU host without a registry may lack beside torch and transformers, and what its tests need.
WHEELS := msgspec tomlkit plotly narwhals nvidia-ml-py psutil rich markdown-it-py mdurl Pygments pytest pytest-timeout pytest-xdist \
	execnet iniconfig pluggy hypothesis sortedcontainers

.DEFAULT_GOAL := help
.PHONY: help setup test lint format types unit docs docs-write test-torch tune bench parity wheels lock clean

help: ## these lines
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(VENV)/.stamp ## make .venv (seconds when it is there)

# The interpreter is looked at first: a message beats a page of pip's.
%/.stamp: $(LOCK) pyproject.toml
	@$(PYTHON_BIN) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON_BIN) is older than 3.11; call make PYTHON_BIN=python3.12 (or another that is newer)" >&2; exit 1; }
	$(PYTHON_BIN) -m venv $*
	$*/bin/python -m pip install --quiet "torch==$(if $(filter .venv-torch-%,$*),$(patsubst .venv-torch-%,%,$*),$$(sed -n 's/^torch==//p' $(LOCK)))"
	grep -v '^torch==' $(LOCK) > $*/others.txt
	$*/bin/python -m pip install --quiet -r $*/others.txt
	$*/bin/python -m pip install --quiet --no-deps -e .
	touch $@

test: lint types unit ## everything that must pass: style, types, tests, the examples of the docs

lint: $(VENV)/.stamp ## ruff: rules and format
	$(VENV)/bin/ruff check src tests benchmarks docs
	$(VENV)/bin/ruff format --check src tests benchmarks docs

format: $(VENV)/.stamp ## rewrite files in the house's format
	$(VENV)/bin/ruff check --fix-only --quiet src tests benchmarks docs
	$(VENV)/bin/ruff format --quiet src tests benchmarks docs

types: $(VENV)/.stamp ## mypy, strict
	$(VENV)/bin/mypy

# Other frameworks live beside the development venv and see it, so that nothing of ours depends on their being there.
$(DOORS)/.stamp: $(VENV)/.stamp requirements-doors.lock
	$(PYTHON_BIN) -m venv $(DOORS)
	$(VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$($(DOORS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/development.pth"
	grep -v '^deepspeed==' requirements-doors.lock > $(DOORS)/others.txt
	$(DOORS)/bin/python -m pip install --quiet --no-deps -r $(DOORS)/others.txt
	DS_BUILD_OPS=0 $(DOORS)/bin/python -m pip install --quiet --no-deps --no-build-isolation \
		"$$(grep '^deepspeed==' requirements-doors.lock)"
	touch $@

unit: $(VENV)/.stamp $(DOORS)/.stamp ## all tests, the examples of README and docs/ included
	$(QUIET) FULLSTRIDE_DOORS_PYTHON=$(CURDIR)/$(DOORS)/bin/python $(VENV)/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

docs: $(VENV)/.stamp ## only the examples and links of README and docs/
	$(QUIET) $(VENV)/bin/python -m pytest tests/test_docs.py $(PYTEST_ARGS)

docs-write: $(VENV)/.stamp ## write what the code says into docs/ (plan entries, rules, exit codes)
	$(VENV)/bin/python docs/generate.py

test-torch: .venv-torch-$(VERSION)/.stamp ## the tests on another torch: make test-torch VERSION=2.11.0
	$(QUIET) .venv-torch-$(VERSION)/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

tune: $(VENV)/.stamp ## tune a small real model on this machine: make tune, or make tune ARGS="llama3-1b --minutes 8"
	$(VENV)/bin/fullstride tune $(ARGS)

bench: $(VENV)/.stamp ## measure a plan: make bench ARGS=plan.toml
	$(VENV)/bin/fullstride bench $(ARGS)

parity: $(VENV)/.stamp ## draw plans at random and compare each with one process: make parity DRAWS=200
	$(VENV)/bin/python -m fullstride.engine.parity --draws $(DRAWS) --ranks $(RANKS)

# Each package is taken at the lock's version, for the host's Python and glibc, without its dependencies.
wheels: $(VENV)/.stamp ## fill .wheels/ for a GPU host without a registry: make wheels PYTHON=3.12
	@mkdir -p .wheels
	@for name in $(WHEELS); do grep -i "^$$name==" $(LOCK) || { echo "$$name is not in $(LOCK)" >&2; exit 1; }; done > .wheels/list.txt
	$(VENV)/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(PYTHON) --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		-d .wheels -r .wheels/list.txt
	@du -sh .wheels

lock: $(VENV)/.stamp ## write the versions of .venv into the lock
	@{ sed -n '1,3p' $(LOCK); \
	   $(VENV)/bin/python -m pip freeze --all | sed -n 's/^\(torch==[0-9.]*\).*/\1/p'; \
	   $(VENV)/bin/python -m pip freeze --all | grep -v -E '^(#|-e|fullstride|pip==|setuptools==|torch==|triton|nvidia-c|cuda-)' ; } > $(LOCK).new
	@mv $(LOCK).new $(LOCK)

clean: ## remove what make made
	rm -rf .venv .venv-doors .venv-torch-* .wheels .mypy_cache .ruff_cache .pytest_cache .hypothesis
