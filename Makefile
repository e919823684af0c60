# Two commands on a machine with Python >= 3.11, make and a C++ compiler: `make demo` and `make test`.
# `make gpu` measures every claim about GPUs on this machine's, in GPU_ARGS="--minutes 9".
# `make docs` builds the documentation in build/docs.
# `make demo DEMO_ARGS="--workload resnet --seeds 3"` passes options to `qsync demo`,
# `make test TEST_ARGS="-m 'not slow'"` to pytest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package works with torch 2.11 to 2.13; what is measured and tested here is this one.
TORCH := torch==2.13.0
DEMO_ARGS ?=
GPU_ARGS ?=
TEST_ARGS ?=
# Two workers: a test that starts ranks uses two cores by itself.
TEST_WORKERS ?= 2
# setuptools warns of every editable install that the current directory might shadow the package.
INSTALL := PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet
.PHONY: demo test gpu docs lint types format clean

demo: $(VENV)/installed
	$(BIN)/qsync demo $(DEMO_ARGS)

test: $(VENV)/testable
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder $(TEST_ARGS)

# With the torch that $(PYTHON) has, whatever its version: a build for CUDA is gigabytes, and most GPU machines have one.
# What it has of the other packages is used, and no network is needed.
gpu: build/gpu/installed
	build/gpu/bin/python -m qsync.experiments.gpu $(GPU_ARGS)

build/gpu/installed: pyproject.toml setup.py
	$(PYTHON) -c 'import torch; assert torch.cuda.is_available() or "cpu" in "$(GPU_ARGS)"' 2>/dev/null || \
		{ echo "$(PYTHON) has no torch that sees a GPU; name one that has: make gpu PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv --system-site-packages build/gpu
	build/gpu/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

# Warnings are errors. Once the tools are installed, this needs no network.
docs: $(VENV)/documentable
	$(BIN)/python -m sphinx -b html -W --keep-going --quiet docs build/docs

lint: $(VENV)/testable types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy reads files, not setup.py's mapping of folders to qsync.<folder>: lay the package out for it as it installs.
types: $(VENV)/testable
	rm -rf build/typed && mkdir -p build/typed/qsync
	ln -s $(CURDIR)/qsync/* build/typed/qsync/
	for folder in backend predictor replayer allocator experiments; do ln -s $(CURDIR)/$$folder build/typed/qsync/$$folder; done
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
