# Two commands on a machine with Python >= 3.11, make and a C++ compiler: `make demo` and `make test`.
# `make gpu` measures every claim about GPUs on this machine's, in GPU_ARGS="--minutes 9".
# `make results` runs every experiment again and writes the pages of their figures: hours, made up of minutes.
# `make docs` builds the documentation in build/docs.
# `make demo DEMO_ARGS="--workload resnet --seeds 3"` passes options to `qsync demo`,
# `make test TEST_ARGS="tests/lowering -x"` to pytest. `make test-deep` runs the tests that take long, which `make test` leaves out.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package works with torch 2.11 to 2.13; what is measured and tested here is this one.
TORCH := torch==2.13.0
DEMO_ARGS ?=
GPU_ARGS ?=
RESULTS_ARGS ?=
TEST_ARGS ?=
# Two workers: a test that starts ranks uses two cores by itself.
TEST_WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder
# setuptools warns of every editable install that the current directory might shadow the package.
INSTALL := PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet
# The package as it installs, of links.
define lay_out
rm -rf $(1) && mkdir -p $(1)/qsync
ln -s $(CURDIR)/qsync/* $(1)/qsync/
for folder in backend predictor replayer allocator experiments; do ln -s $(CURDIR)/$$folder $(1)/qsync/$$folder; done
endef
.PHONY: demo test test-deep gpu results docs lint types format clean

demo: $(VENV)/installed
	$(BIN)/qsync demo $(DEMO_ARGS)

test: $(VENV)/testable
	$(PYTEST) -m "not deep" $(TEST_ARGS)

test-deep: $(VENV)/testable
	$(PYTEST) -m deep $(TEST_ARGS)

# With the torch that $(PYTHON) has, whatever its version: a build for CUDA is gigabytes, and most GPU machines have one.
# Nothing is installed, and no network is needed. PYTHONSAFEPATH: `-m` would put this folder before PYTHONPATH,
# and ./qsync is not the whole package; the processes that measure inherit it.
gpu:
	@$(PYTHON) -c 'import torch, numpy, scipy, optuna, matplotlib, sklearn, rich, typer' || \
		{ echo "$(PYTHON) lacks a package that qsync needs; install it, or name another: make gpu PYTHON=/path/to/python3" >&2; exit 2; }
	$(call lay_out,build/gpu)
	PYTHONPATH=$(CURDIR)/build/gpu$${PYTHONPATH:+:$$PYTHONPATH} PYTHONSAFEPATH=1 $(PYTHON) -m qsync.experiments.gpu $(GPU_ARGS)

results: $(VENV)/testable
	$(BIN)/python -m qsync.experiments.results --publish $(RESULTS_ARGS)

# Warnings are errors. Once the tools are installed, this needs no network.
docs: $(VENV)/documentable
	$(BIN)/python -m sphinx -b html -W --keep-going --quiet docs build/docs

lint: $(VENV)/testable types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy reads files, not setup.py's mapping of folders to qsync.<folder>.
types: $(VENV)/testable
	$(call lay_out,build/typed)
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p qsync

format: $(VENV)/testable
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build

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
