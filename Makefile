# `make run` and `make test` are all that a new machine needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test lint bench same-bits clean

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

# A refactoring leaves the bits: small runs with the sources of the commit BASE and with those of the working tree.
same-bits: $(VENV)/.installed-for-tests
	$(BIN)/python -m tools.same_bits $(or $(BASE),$(error Give the commit to compare with: make same-bits BASE=COMMIT))

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
