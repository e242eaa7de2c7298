# make train and make test work on a fresh machine with python3 (3.11 or newer) and make.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
PART ?= 1/1
BIN := $(VENV)/bin
# Otherwise a venv that could not be completed, for example without ensurepip, would count as installed.
.DELETE_ON_ERROR:

.PHONY: train install-dev test test-fast test-oldest-triton aot-reports test-gpu gpu-check lint format docs clean

train: $(VENV)/.installed
	$(BIN)/python train.py $(ARGS)

install-dev: $(VENV)/.installed-dev $(VENV)/hf-kernels

# Without bytecode files, each of the many processes of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Triton's interpreter uses one thread, so each pytest worker gets one thread. JOBS should be the number of cores.
test: $(VENV)/.installed-dev $(VENV)/hf-kernels
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not gpu" $(ARGS)

# The tests to run at each change. `test` runs all of them.
test-fast: $(VENV)/.installed-dev $(VENV)/hf-kernels
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) \
		-m "not slow and not gpu" $(ARGS)

# Compiles a case of each kernel and head_dim with the oldest supported Triton (CASES= compiles all), and replays
# launches. Most other tests need Triton's interpreter, which in this old version does not work with NumPy 2.4.
CASES ?= not rest
test-oldest-triton: $(VENV)/triton-3.6
	PYTHONPATH="$(abspath $<)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -k "$(CASES)" tests/kernels/aot \
		tests/kernels/launch/test_record.py::test_replayed_launches_are_those_of_triton \
		--ignore tests/kernels/aot/test_reports.py --ignore tests/kernels/aot/test_entries.py

# Records the results of ahead-of-time compiles with both Triton versions. After a kernel changes, `test` compiles it,
# but tests/kernels/aot/test_entries.py fails until this target has run. It compiles only the kernels that changed. For
# all kernels, it takes half an hour on 2 cores.
aot-reports: $(VENV)/triton-3.6
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kernels.aot.entries
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/kernels/aot
	$(BIN)/python -m tests.kernels.aot.reports
	$(MAKE) test-oldest-triton
	PYTHONPATH="$(abspath $<)" $(BIN)/python -m tests.kernels.aot.reports

test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Runs every compiled form of every kernel once, and compares it with a dense reference. PART=1/4 runs a quarter.
gpu-check: $(VENV)/.installed-dev
	$(BIN)/python -m tests.gpu_check --part $(PART) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Builds the pages in docs/ as a website in site/. Its search needs a server: python3 -m http.server -d site
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

# The version of pip that comes with Python 3.11 takes three times as long to resolve and install the dependencies.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or \
		sys.exit("error: PYTHON must be Python 3.11 or newer; got Python " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "pip>=26"

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -e ".[dev]"
	touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -e ".[docs]"
	touch $@

$(VENV)/triton-3.6: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --no-deps --upgrade --target $@ "triton==3.6.*"
	touch $@

# Hugging Face's package `kernels`, for one test. It is outside site-packages, so that transformers does not find it.
$(VENV)/hf-kernels: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --no-deps --upgrade --target $@ "kernels>=0.17,<0.18"
	touch $@

clean:
	rm -rf $(VENV)
