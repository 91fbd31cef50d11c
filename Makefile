# `make check` is what CI runs, in the environment that the README's test command makes.
PYTHON ?= .venv/bin/python

.PHONY: check lint types test slow parity notebooks
check: lint types test slow

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

test:
	$(PYTHON) -m pytest -n 2

slow:
	$(PYTHON) -m pytest -n 2 -m slow

parity:
	$(PYTHON) -m pytest -m parity

notebooks:
	EAGLE4_FAST=1 $(PYTHON) notebooks/run.py
