# Two commands do everything: `make run` and `make test`. Both make the environment first.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help run test check docs environment clean

help:
	@echo "make run    train a federation on handwritten digits, half a minute and, the first time, a few for packages"
	@echo "make test   lint, type-check and test everything"
	@echo "make docs   build the documentation into site/"
	@echo "make clean  remove the environment and everything that was built"

run: environment
	@$(BIN)/fedsift run

test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal

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
	@echo "making the environment in $(VENV) (a few minutes, most of them for PyTorch) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) build site .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
