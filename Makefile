# make install | serve [PORT=8000] | test | lint | bench
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PORT ?= 8000
PACKAGES := core $(wildcard plugins/*)
STAMP := $(VENV)/.installed

.PHONY: install serve test lint bench

install: $(STAMP)

$(STAMP): Makefile constraints.txt requirements-dev.txt $(PACKAGES:%=%/pyproject.toml) $(wildcard plugins/*/hatch_build.py plugins/*/src/*/native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--requirement requirements-dev.txt $(PACKAGES:%=--editable %)
	touch $@

serve: install
	$(BIN)/infer serve --server.port $(PORT)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8

bench: install
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/infer bench --workload all --scale 0.25
