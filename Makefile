.DEFAULT_GOAL := help
.PHONY: help demo test lint sync clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

help: ## This list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 8

demo: $(VENV)/.installed ## Measure the noise scale of a real model, plan its batch size and try it (installs into .venv first)
	$(BIN)/python -m fastai_bs

test: $(VENV)/.installed-dev ## Run the whole test suite, notebooks included (installs into .venv first)
	$(BIN)/python -m pytest
	$(BIN)/nbdev-test --n-workers 2 --pause 0.1

lint: $(VENV)/.installed-dev ## Check the code with ruff
	$(BIN)/ruff check .

sync: $(VENV)/.installed-dev ## Write the modules and the README from the notebooks, store their outputs, and clean them
	$(BIN)/nbdev-export
	PYTHONWARNINGS=ignore $(BIN)/nbdev-test --save --n-workers 2
	$(BIN)/nbdev-clean
	$(BIN)/python docs/readme.py

clean: ## Remove the environment and all that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache _proc docs/_build

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3,10) and "fastai_bs needs Python 3.10 or later: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

$(VENV)/.installed: $(BIN)/python pyproject.toml
	@echo "Installing into $(VENV): fastai brings PyTorch with CUDA, some 6 GB"
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml
	@echo "Installing into $(VENV): fastai brings PyTorch with CUDA, some 6 GB"
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@ $(VENV)/.installed
