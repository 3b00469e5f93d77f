# make demo      train a draft on the CPU, serve with and without it, write demo/report.json and demo/report.png
# make test      lint, then all tests that need no GPU, in two processes (WORKERS=2)
# make test-long mode exact on a real model with every selector and budget: minutes on a GPU, a night on a CPU
# make lint      ruff, mypy, import-linter, and the pages of docs/ without a warning
# make docs      the pages of docs/ as a site in site/
# make gpu-test  tests that need a GPU
# The environment (.venv) is made on the first call and again when pyproject.toml changes.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
STAMP  := $(VENV)/.made
PYTEST_ARGS ?=
WORKERS ?= 2
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.DEFAULT_GOAL := help
.PHONY: help env demo test test-long lint docs gpu-test clean

help:
	@sed -n 's/^# make/make/p' Makefile

env: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no python3 found: install Python 3.11 or newer, or say make PYTHON=..."; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than Python 3.11: say make PYTHON=/path/to/python3.11"; exit 2; }
	@echo "making the environment in $(VENV) (about three minutes)"
	@$(BIN)/python -c 'import ssl' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV) # a second Python over the first breaks both
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/longdraft demo $(DEMO_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(MKDOCS) --quiet --site-dir .site

docs: $(STAMP)
	$(MKDOCS)

# Whole files go to the next free worker: fixtures of a file start servers.
test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest tests/long $(PYTEST_ARGS)

gpu-test: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist demo runs site .site .promtool *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
