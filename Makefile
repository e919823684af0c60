# Two commands on a machine with Python >= 3.11, make and a C++ compiler: `make demo` and `make test`.
# `make gpu` measures every claim about GPUs on this machine's, in GPU_ARGS="--minutes 9".
# `make results` measures again what README and the guide cite, and writes the pages: a night, or RESULTS_ARGS="--size quick".
# `make docs` builds the documentation in build/docs, `make dist` the distributions in dist.
# `make demo DEMO_ARGS="--workload resnet --seeds 3"` passes options to `qsync demo`,
# `make test TEST_ARGS="tests/lowering -x"` to pytest. `make test-deep` runs the tests that take long, which `make test` leaves out.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package works with torch 2.11 to 2.14; what is measured and tested here is this one.
TORCH := torch==2.13.0
DEMO_ARGS ?=
GPU_ARGS ?=
RESULTS_ARGS ?=
TEST_ARGS ?=
# Two workers: a test that starts ranks uses two cores by itself.
TEST_WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder
INSTALL := $(BIN)/python -m pip install --quiet
.PHONY: demo test test-deep gpu results docs dist lint types format clean

demo: $(VENV)/installed
	$(BIN)/qsync demo $(DEMO_ARGS)

test: $(VENV)/testable
	$(PYTEST) -m "not deep" $(TEST_ARGS)

test-deep: $(VENV)/testable
	$(PYTEST) -m deep $(TEST_ARGS)

# With the torch that $(PYTHON) has, whatever its version: a build for CUDA is gigabytes, and most GPU machines have one.
# Nothing is installed, and no network is needed.
gpu:
	@$(PYTHON) -c 'import torch, numpy, scipy, optuna, matplotlib, sklearn, rich, typer' || \
		{ echo "$(PYTHON) lacks a package that qsync needs; install it, or name another: make gpu PYTHON=/path/to/python3" >&2; exit 2; }
	PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m qsync.experiments.gpu $(GPU_ARGS)

results: $(VENV)/testable
	$(BIN)/python -m qsync.experiments.results --publish $(RESULTS_ARGS)

# Warnings are errors. Once the tools are installed, this needs no network.
docs: $(VENV)/documentable
	$(BIN)/python -m sphinx -b html -W --keep-going --quiet docs build/docs

# A source distribution, and from it a wheel. This needs no network once the tools are installed.
dist: $(VENV)/testable
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

lint: $(VENV)/testable types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/testable
	$(BIN)/mypy -p qsync

format: $(VENV)/testable
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "qsync needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch on its own first: a failed download then says what failed.
$(VENV)/torch: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(TORCH)
	touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml setup.py
	$(INSTALL) -e .
	touch $@

$(VENV)/testable: $(VENV)/installed
	$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/documentable: $(VENV)/installed
	$(INSTALL) -e '.[docs,integrations]'
	touch $@
