# `make run` and `make test` are all you need. Both create the environment first.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin

# Container images often forbid it, and then every process that a test starts compiles all modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test pytest quick quick-pytest check docs environment clean

help:
	@echo "make run    train on handwritten digits for half a minute; the first time, install packages first"
	@echo "make test   lint, type-check and test everything"
	@echo "make quick  lint, type-check and run a tenth of the tests, in a minute"
	@echo "make docs   build the documentation into site/"
	@echo "make clean  remove the environment and all build outputs"

run: environment
	@$(BIN)/fedsift run

test: environment
	@$(MAKE) --no-print-directory -j 2 check pytest

pytest: environment
	$(BIN)/python -m pytest -n 4 --dist worksteal

quick: environment
	@$(MAKE) --no-print-directory -j 2 check quick-pytest

quick-pytest: environment
	$(BIN)/python -m pytest -n 2 --dist worksteal -q --quick

check: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: environment
	$(BIN)/mkdocs build --strict

environment: $(VENV)/ready

$(VENV)/ready: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { \
		echo "fedsift needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "creating the environment in $(VENV) (a few minutes, mostly for PyTorch) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) build site .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
