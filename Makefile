# Everything runs in .venv, made here from nothing but Python 3.11 or newer.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

.PHONY: demo test test-all lint types tests compare clean

## demo: train a small model on four CPU ranks, each micro-batch with its own context-parallel size
demo: $(VENV)/.installed
	$(BIN)/lightning-dcp fit --config configs/demo_cpu.yaml

## compare: static against dynamic context parallelism on two CPU ranks
compare: $(VENV)/.installed
	$(BIN)/python examples/compare_static_dynamic.py

## test: lint, types, and all tests that are not slow
test: lint types tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

tests: $(VENV)/.installed-dev
	$(BIN)/pytest -m "not slow"

## test-all: the slow ones too
test-all: $(VENV)/.installed-dev lint types
	$(BIN)/pytest

# torch first and alone: the version is pinned, so that nothing later in the list pulls another build.
$(VENV)/.installed: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
