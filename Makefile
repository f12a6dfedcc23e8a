# Everything runs in .venv, made here from nothing but Python 3.11 or newer.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

HF4 := .venv-hf4
PY312 := .venv-py312

.PHONY: demo browser test test-all test-hf4 test-py312 lint types tests compare gpu-check clean

## demo: train a small model on four CPU ranks, each micro-batch with its own context-parallel size
demo: $(VENV)/.installed
	$(BIN)/lightning-dcp fit --config configs/demo_cpu.yaml

## demo-report: train on made-up chats under budgets, on four CPU ranks, and draw how steady the steps were
demo-report: $(VENV)/.installed
	$(BIN)/lightning-dcp fit --config configs/chat_sft_cpu.yaml
	$(BIN)/lightning-dcp report "$$(ls -td runs/chat/version_*/ | head -1)"

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

tests: $(VENV)/.installed-dev browser
	$(BIN)/pytest -m "not slow"

## test-all: the slow ones too
test-all: $(VENV)/.installed-dev browser lint types
	$(BIN)/pytest

## browser: Chromium for the tests that look at pages, where there is none and we may install it; without it they are skipped
browser:
	@for name in chromium chromium-browser chromium-headless-shell google-chrome google-chrome-stable; do \
		if command -v $$name > /dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null \
			|| echo "Chromium could not be installed: the tests that need it will be skipped" >&2; \
	else \
		echo "no Chromium: the tests that need it will be skipped (Debian: apt-get install chromium)" >&2; \
	fi

## test-hf4: the tests of Hugging Face models with the last transformers 4, in an environment of its own
test-hf4: $(HF4)/.installed
	$(HF4)/bin/pytest tests/models -m "not slow"

## test-py312: with Python 3.12, in an environment of its own, the tests of Megatron-Core models and of the strategy. For that
## Python package indexes serve another release of Megatron-Core (constraints.txt).
## (PYTHON312: the interpreter; by default python3.12, or one of pyenv's or uv's)
MEGATRON_TESTS := tests/megatron tests/schedule/test_megatron.py tests/parallel/test_groups.py
STRATEGY_TESTS := $(addprefix tests/test_, parity.py refusals.py hooks.py resume.py evaluation.py failures.py launchers.py imports.py)
test-py312: $(PY312)/.installed
	$(PY312)/bin/pytest $(MEGATRON_TESTS) $(STRATEGY_TESTS) -m "not slow"

# A name on the PATH can be a shim without a Python behind it, so each candidate is asked.
$(PY312)/.installed: constraints.txt pyproject.toml
	@test -x $(PY312)/bin/python || for candidate in "$(PYTHON312)" python3.12 \
			"$$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12.*/bin/python 2>/dev/null | tail -1)" \
			"$$(uv python find --no-project 3.12 2>/dev/null)"; do \
		test -n "$$candidate" && $$candidate -c "import sys; sys.exit(sys.version_info[:2] != (3, 12))" 2>/dev/null \
			&& exec $$candidate -m venv $(PY312); \
	done; test -x $(PY312)/bin/python || { \
		echo "test-py312 needs Python 3.12: none is on the PATH, in pyenv or in uv. Install one (pyenv install 3.12)," \
			"or say where it is: make test-py312 PYTHON312=/path/to/python3.12" >&2; exit 1; }
	$(PY312)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY312)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

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
	rm -rf $(VENV) $(HF4) $(PY312) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
