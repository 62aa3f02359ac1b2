# `make run` and `make test` are all that a new machine needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
# Only files whose SHA-256 is known, none that is built here, and nothing that is not on the list.
LOCKED := $(INSTALL) --require-hashes --no-deps --only-binary :all: --no-compile
# pip compiles 20,000 files one after the other; this takes all cores. Some packages have files for other Pythons.
COMPILE_ALL := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
# Tests start hundreds of processes. Each would compile the sources anew where the machine says not to keep bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-long newcomer lint bench bench-scale docs same-bits lock clean

run: $(VENV)/.installed
	@echo "Training FSL-SAGE on 5,000 CIFAR-10 images: ResNet-18, 5 clients, 10 rounds. About two minutes on two cores."
	$(BIN)/fsl-sage run

# Each process has one half of the quick tests, and helps the other when it has finished its own. The slow tests start
# servers and clusters of their own. Those of Flower mostly wait for each other, so there are three processes for two
# cores: one for Ray, one for the federation that meets faults, one for other federations, and each for what is left.
test: lint
	@echo "2 of 3: the quick tests, two at a time. About 8 minutes on two cores."
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not long"
	@echo "3 of 3: the slow tests, which start servers and clusters. About 14 minutes."
	$(BIN)/pytest -n 3 --dist loadgroup -m "slow and not long"

# Attacks and accidents at full length, about two hours; what they gave last is in docs/reliability.md.
test-long: $(VENV)/.installed-for-tests
	$(BIN)/python -m benchmarks.hostile
	$(BIN)/pytest -m long
	FSL_SAGE_FUZZ=3000 $(BIN)/pytest tests/fuzz
	$(BIN)/python -m benchmarks.chaos --kills 20 --kills-a-run 4
	$(MAKE) newcomer

# The first hour of a newcomer at full length: from a wheel, in an environment of its own, outside of this folder.
newcomer:
	@echo "Building a wheel, installing it in a new environment and playing a newcomer's first hour. About ten minutes."
	there=$$(mktemp -d) && trap 'rm -rf '$$there EXIT && unset PYTHONPATH && $(PYTHON) -m venv $$there/venv && \
	    mkdir $$there/sources && cp -R pyproject.toml README.md LICENSE src $$there/sources && \
	    $$there/venv/bin/pip wheel --quiet --no-deps -w $$there $$there/sources && rm -r $$there/sources && \
	    $$there/venv/bin/pip install --quiet -c constraints.txt $$there/*.whl && cp tests/newcomer/hour.py $$there && \
	    cd $$there && venv/bin/python hour.py --long

lint: $(VENV)/.installed-for-tests
	@echo "1 of 3: style (ruff) and types (mypy). About a minute."
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

# A thousand ResNet-18 clients, ten thousand small ones: an hour and more, and up to 45 GB of disk.
bench-scale: $(VENV)/.installed
	$(BIN)/python -m benchmarks.scale

# The site needs no network, neither to be built nor to be read; its search needs a server, such as the one below.
docs: $(VENV)/.installed-for-tests
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is build/docs/index.html; with its search: $(PYTHON) -m http.server --bind 127.0.0.1 -d build/docs"

# A refactoring leaves the bits: small runs with the sources of the commit BASE and with those of the working tree.
same-bits: $(VENV)/.installed-for-tests
	$(BIN)/python -m tools.same_bits $(or $(BASE),$(error Give the commit to compare with: make same-bits BASE=COMMIT))

# torch is installed by its version, since its file differs from machine to machine; the rest of what it needs comes
# last, when all of it that is on the list has been taken by its hash.
$(VENV)/.installed: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed; this is " + sys.version.split()[0] + ". Give another: make PYTHON=...") if sys.version_info < (3, 11) else None'
	@echo "Making $(VENV) and installing what is needed, torch among it: a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --no-compile --no-deps torch==2.13.0
	$(LOCKED) -r requirements.lock
	$(INSTALL) --no-compile -c constraints.txt torch==2.13.0
	$(INSTALL) --no-deps --no-build-isolation -e .
	$(COMPILE_ALL)
	touch $@

$(VENV)/.installed-for-tests: $(VENV)/.installed requirements-test.lock
	@echo "Installing the tools for tests: about a minute, once."
	$(LOCKED) -r requirements-test.lock
	$(COMPILE_ALL)
	touch $@

# uv lists the hashes of all files of a version, for every system; pip would list this machine's alone.
TORCHS := torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc \
	cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade -c constraints.txt --generate-hashes \
	--no-emit-index-url --no-header --no-annotate $(addprefix --no-emit-package ,$(TORCHS)) pyproject.toml -
lock: $(VENV)/.installed-for-tests
	for lock in requirements.lock "requirements-test.lock --all-extras"; do set -- $$lock; \
	    grep '^#' $$1 > $$1.new && printf 'setuptools>=77\nwheel\n' | $(COMPILE) $$2 >> $$1.new && mv $$1.new $$1; done

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
