# Two commands: `make train` runs the main job, `make test` runs the tests. Both set up .venv first; a second call installs nothing.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test check gpu bench clean

train: .venv/.train
	$(BIN)/halfstep train

test: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: .venv/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

gpu: .venv/.test
	$(BIN)/python -m pytest -m gpu -rs

bench: .venv/.bench
	$(BIN)/python -m benchmarks.engine

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.train .venv/.test .venv/.bench: .venv/.%: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -e '.[$*]'
	@touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
