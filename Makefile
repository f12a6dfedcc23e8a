# Everything runs in .venv, made here from nothing but Python 3.11 or newer.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

HF4 := .venv-hf4

.PHONY: demo test test-all test-hf4 lint types tests compare gpu-check clean

## demo: train a small model on four CPU ranks, each micro-batch with its own context-parallel size
demo: $(VENV)/.installed
	$(BIN)/lightning-dcp fit --config configs/demo_cpu.yaml

## compare: static against dynamic context parallelism on two CPU ranks
compare: $(VENV)/.installed
	$(BIN)/python examples/compare_static_dynamic.py

## gpu-check: on a machine with one CUDA GPU, in a few minutes: kernels against the reference, their speed, two training steps
## (GPU_PYTHON: an interpreter that has what this package needs, with torch for CUDA)
GPU_PYTHON ?= $(BIN)/python
gpu-check:
	$(GPU_PYTHON) -m lightning_dcp bench attention --device cuda --check --repeats 3 --cp-sizes 2 4
	$(GPU_PYTHON) -m lightning_dcp bench attention --device cuda --check --repeats 1 --cp-sizes 4 --lengths 1,2,3,7,13,64,257 \
		--kinds causal bidirectional window:64 softcap:30 sinks --kv-heads 2
	$(GPU_PYTHON) -m lightning_dcp fit --config configs/demo_cpu.yaml --trainer.accelerator gpu --trainer.devices 1 \
		--trainer.precision bf16-mixed --trainer.max_steps 2 --trainer.val_check_interval 2

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

## test-hf4: the tests of Hugging Face models with the last transformers 4, in an environment of its own
test-hf4: $(HF4)/.installed
	$(HF4)/bin/pytest tests/models -m "not slow"

# The packages that come with a transformers are those of its time.
$(HF4)/.installed: constraints.txt pyproject.toml
	test -x $(HF4)/bin/python || $(PYTHON) -m venv $(HF4)
	grep -v -E "^(transformers|peft|tokenizers|huggingface_hub)==" constraints.txt > $(HF4)/constraints.txt
	echo "transformers==4.57.6" >> $(HF4)/constraints.txt
	$(HF4)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(HF4)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(HF4)/constraints.txt --editable ".[dev]"
	touch $@

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
	rm -rf $(VENV) $(HF4) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
