# Everything runs in .venv, which is made when missing and brought up to date when pyproject.toml changes.
# Needs only make and Python >= 3.10; another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n auto --maxprocesses 8

RUN := $(VENV)/bin/python
OFFLINE := HF_HUB_OFFLINE=1 NO_ALBUMENTATIONS_UPDATE=1
# One thread a process: the tests' small tensors gain nothing from more, and the workers would fight over the cores.
TEST_ENV := $(OFFLINE) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# The stamps live inside the environment, so that they vanish with it.
BASE := $(VENV)/.stamp-python
CORE := $(VENV)/.stamp-core
TEST := $(VENV)/.stamp-test
DEV := $(VENV)/.stamp-dev

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' Makefile

demo: $(CORE)  ## train a small detector on drawn digits, measure it, show where the pictures are (no GPU, no network)
	@$(OFFLINE) $(RUN) tools/demo.py

test: $(TEST)  ## the default tests: no GPU, no network, minutes on two cores
	@$(TEST_ENV) $(RUN) -m pytest $(PYTEST_ARGS)

test-slow: $(TEST)  ## the tests that take longer (trainings, wheel)
	@$(TEST_ENV) $(RUN) -m pytest $(PYTEST_ARGS) -m "slow and not gpu"

lint: $(DEV)  ## ruff (rules and layout) and mypy
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

clean:  ## remove .venv, builds and caches (runs are kept)
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find vitdet tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(BASE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "vitdet needs Python >= 3.10, but '$(PYTHON)' is `$(PYTHON) --version 2>&1`; name another: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "'$(PYTHON) -m venv' failed: install the venv module of that Python" >&2; exit 2; }
	@touch $@

$(CORE): pyproject.toml $(BASE)
	@echo "installing vitdet and what it needs into $(VENV) (a few minutes the first time)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(TEST): $(CORE)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

$(DEV): $(CORE)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
