# Everything a newcomer needs: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin

MINUTES ?= 10
SEEDS ?= 1000
WORKERS ?= 2

.PHONY: demo test fuzz simulate check setup clean

demo: setup  ## train a real model on five local nodes
	$(BIN)/roost demo

test: setup  ## run every test, in WORKERS (2) processes
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

fuzz: setup  ## feed damaged and made-up graphs and files to the loaders for MINUTES (10)
	ROOST_FUZZ_MINUTES=$(MINUTES) $(BIN)/python -m pytest tests/fuzz

simulate: setup  ## whole pools in virtual time, with faults, from seeds 0 to SEEDS (1000); says how to replay one that fails
	ROOST_SIMULATION_SEEDS=$(SEEDS) $(BIN)/python -m pytest tests/simulation/test_whole_pools.py -k whatever_a_seed_breaks

check: setup  ## format, lint and types
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy

setup: .venv/.ready  ## a .venv in this folder with everything installed

.venv/.ready: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Roost needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch .venv/.ready

clean:
	rm -rf .venv build roost-demo roost-checkpoints roost-fuzz
