# `make run` and `make test` are all that a new machine needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test lint bench clean

run: $(VENV)/.installed
	$(BIN)/fsl-sage run

# The slow tests start servers and clusters of their own, and want the machine to themselves.
test: lint
	$(BIN)/pytest -n 2 -m "not slow"
	$(BIN)/pytest -m slow

lint: $(VENV)/.installed-for-tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed; this is " + sys.version.split()[0] + ". Give another: make PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-for-tests: $(VENV)/.installed
	$(INSTALL) -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
