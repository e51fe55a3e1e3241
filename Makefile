.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-oldest dist matrix gpu lint sync docs docs-check docs-serve clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-12s%s\n", $$1, $$2}'

demo: $(VENV)/.installed ## Find a batch size for handwritten digits and train with it (installs into .venv first)
	$(BIN)/python -m fastai_bs

test: $(VENV)/.installed-dev ## Run the whole test suite, notebooks included (installs into .venv first)
	$(PYTEST)
	OMP_NUM_THREADS=1 $(BIN)/nbdev-test --n-workers 2 --pause 0.1

test-quick: $(VENV)/.installed-dev ## Run the tests that take no seconds each, and no notebooks
	$(PYTEST) -m 'not slow'

test-oldest: $(OLDEST)/.installed ## Run the tests with the oldest fastai and torch that are claimed (installs into .venv-oldest first)
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

dist: $(VENV)/.installed-dev ## Build the wheel and the source distribution, and pass tests with each in a fresh environment
	rm -rf dist
	$(BIN)/python -m build -q
	$(BIN)/twine check --strict dist/*
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/installed.py dist

matrix: $(VENV)/.installed-dev ## Try each tool of the package with each kind of learner and beside each companion; writes docs/matrix.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/matrix.py

gpu: $(VENV)/.installed-dev ## Measure all that no CPU can tell, in ten minutes, into benchmarks/gpu.md; with DEVICE=cpu, small, see that it runs
ifeq ($(DEVICE),cpu)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu.py --quick --device cpu
else
	$(BIN)/python benchmarks/gpu.py --full $(if $(DATA),--data $(DATA))
endif

lint: $(VENV)/.installed-dev ## Check the code with ruff
	$(BIN)/ruff check .

sync: $(VENV)/.installed-dev ## Write the modules and the README from the notebooks, store their outputs, and clean them
	$(BIN)/nbdev-export
	PYTHONWARNINGS=ignore $(BIN)/nbdev-test --save --n-workers 2
	$(BIN)/nbdev-clean
	$(BIN)/python docs/readme.py

docs: $(VENV)/.installed-docs ## Build the site from the notebooks into _docs; a warning is an error
	PYTHONWARNINGS=ignore $(BIN)/python docs/pages.py
	$(BIN)/sphinx-build -q -E -W --keep-going -b html -c docs -d docs/_build/doctrees docs/_build/src _docs
	@rm -rf jupyter_execute && touch _docs/.nojekyll

docs-check: docs ## Look at every page of the site in headless Chromium
	$(BIN)/python docs/check.py

docs-serve: docs ## Show the site at http://localhost:8000
	$(BIN)/python -m http.server 8000 --bind localhost --directory _docs

clean: ## Remove the environment and all that was built
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache _proc _docs docs/_build docs/_static/tex-svg.js

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

# What pyproject.toml has as `>=` is taken as `==`; without nbdev, which is for newer versions of fastcore
$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q --upgrade pip
	$(OLDEST)/bin/python -m pip install -q -e '.[test]' $$(grep -oE '"(fastai|torch)>=[0-9.]+"' pyproject.toml | tr -d '"' | sed 's/>=/==/')
	@touch $@

# MathJax is one file, taken along so that pages ask no other host for anything
$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(BIN)/python -m pip install -q -e '.[docs]'
	cd docs/_static && npm pack --silent mathjax@3.2.2 && tar -xzf mathjax-3.2.2.tgz --strip-components=2 package/es5/tex-svg.js && rm mathjax-3.2.2.tgz \
		|| echo "npm is missing: formulas on the site will need a connection"
	mkdir -p docs/_build && cd docs/_build && npm pack --silent axe-core@4.14.1 && tar -xzf axe-core-4.14.1.tgz --strip-components=1 package/axe.min.js && rm axe-core-4.14.1.tgz \
		|| echo "npm is missing: nobody will ask whether all can read the pages"
	@touch $@
