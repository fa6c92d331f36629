# What a developer types. `make` alone lists the targets.
BASE_PYTHON ?= python3
VENV ?= .venv
PYTHON := $(VENV)/bin/python
# Versions that were tested together. `make setup CONSTRAINTS=` takes the newest that pyproject allows.
CONSTRAINTS ?= .ci/constraints.txt
# Extras of the package to install: on a machine with an NVIDIA driver, JAX for its GPUs too.
comma := ,
GPU_EXTRAS := $(if $(shell command -v nvidia-smi),$(comma)cuda13)
EXTRAS ?= dev$(GPU_EXTRAS)
TEST_PROCESSES ?= 2
STAMP := $(VENV)/.setup-$(EXTRAS)
# The demo takes what is there, or else the little that it needs.
DEMO_STAMP := $(firstword $(wildcard $(STAMP)) $(VENV)/.setup-demo$(GPU_EXTRAS))

.PHONY: help setup demo test lint format docs
help:
	@echo 'make setup   create $(VENV) and install the package, editable, with all it is developed with'
	@echo 'make demo    train a small language model on the CPU or GPU: a minute and a half, a loss curve'
	@echo 'make test    build the native library and the kernels, and run the tests'
	@echo 'make lint    ruff and pyright'
	@echo 'make format  let ruff mend what it can'
	@echo 'make gpu     on a machine with an NVIDIA GPU: build, the GPU tests and the benchmark'
	@echo 'make docs    build the documentation into site/'

setup: $(STAMP)

$(VENV)/.setup-%: pyproject.toml $(CONSTRAINTS)
	.ci/setup '$(BASE_PYTHON)' '$(VENV)' '$(CONSTRAINTS)' '$*'
	@touch $@

demo: $(DEMO_STAMP)
	$(PYTHON) examples/train_lm.py $(DEMO_ARGS)

test: setup
# A make of its own: the fragments look at the virtual environment when they are read.
	@if [ -f build.mk ]; then $(MAKE) --no-print-directory build; fi
	$(PYTHON) -m pytest -n $(TEST_PROCESSES) $(TEST_ARGS)

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright

format: setup
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs: setup
	$(PYTHON) -m mkdocs build --strict

-include build.mk kernels.mk gpu.mk
