# make install | serve [PORT=8000] | test | test-all | explore [SEED=] | mutants [CHANGED=1] | soak [ROUNDS=] [WORLDS=] [SECONDS=] [SEED=]
#      | test-clients | lint | docs | bench | dist | gpu-box | gpu-dry-run
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PORT ?= 8000
# With the clients that need it, and what these need besides.
OPENAI_3 := openai==3.54.0 jiter==0.16.0 pydantic-ai-slim==2.68.0 pydantic-graph==2.68.0 genai-prices==0.2.3 griffelib==2.4.1 \
	logfire-api==5.6.0
TRITONS := 3.6.0 3.8.0
OPENAI_NODE := 6.49.0
OLLAMA_NODE := 0.6.4
ANTHROPIC_NODE := 1.14.0
AXE := 4.14.1
GRAFANA := 12.1.0
TYPESCRIPT := 5.9.2
# Their native binaries themselves: what the packages named after the agents bring for every platform is not needed.
AGENTS := @anthropic-ai/claude-code-linux-x64@2.1.197 @openai/codex-linux-x64@npm:@openai/codex@0.169.0-linux-x64 \
	opencode-linux-x64@1.18.33 @qwen-code/qwen-code@0.15.10
CLIENTS := aiperf==0.13.0 guidellm==0.8.1 lm-eval[api]==0.4.13
PACKAGES := core bundle $(wildcard plugins/*)
STAMP := $(VENV)/.installed

.PHONY: install serve test test-all explore mutants soak test-clients lint style docs bench dist gpu-box gpu-dry-run

install: $(STAMP)

# What does not depend on each other is installed side by side: a compiler keeps processors busy, and downloads the disk.
MAKEFLAGS += --jobs=3

$(STAMP): $(VENV)/.packages $(VENV)/.apart
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Bytecode is made of what is imported, not of all that is installed, which takes a minute.
PIP := $(BIN)/python -m pip install --quiet --no-compile

# Without isolation: pip would set up hatchling anew for each of our packages, which takes ten times as long as a build.
$(VENV)/.packages: Makefile constraints.txt requirements-dev.txt $(PACKAGES:%=%/pyproject.toml) \
		$(wildcard plugins/*/hatch_build.py plugins/*/src/*/native/*) | $(BIN)/python
	$(PIP) --constraint constraints.txt --requirement requirements-dev.txt
	$(PIP) --constraint constraints.txt --no-build-isolation $(PACKAGES:%=--editable %)
	touch $@

# What cannot be in one environment with the rest, or is no Python: for tests/clients, tests/kernels_triton, tests/console and
# tests/test_delivery.py.
$(VENV)/.apart: Makefile | $(BIN)/python
	$(PIP) --upgrade --no-deps --target $(VENV)/openai-3 $(OPENAI_3)
	for version in $(TRITONS); do \
		$(PIP) --upgrade --no-deps --target $(VENV)/triton-$$version triton==$$version || exit 1; \
	done
	if command -v npm > /dev/null; then npm install --silent --no-audit --no-fund --prefix $(VENV)/node openai@$(OPENAI_NODE) \
		@anthropic-ai/sdk@$(ANTHROPIC_NODE) ollama@$(OLLAMA_NODE) axe-core@$(AXE) @grafana/schema@$(GRAFANA) typescript@$(TYPESCRIPT); fi
	touch $@

serve: install
	$(BIN)/infer serve --server.port $(PORT)

lint: style
	$(BIN)/mypy

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What pages link to and git does not keep is made first. -W: a warning, such as one of a broken link or of a page in no
# list, is an error.
docs: install
	rm -rf build/site
	mkdir -p docs/demo
	$(BIN)/python docs/reference.py
	$(BIN)/infer demo --model demo --budget 128 --html docs/demo/steps.html --log.level warning > /dev/null
	$(BIN)/python -m sphinx -W --keep-going --quiet -j auto -d build/doctrees -c docs . build/site

# worksteal: neighbors share what is made once for a module, and nobody is idle at the end.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# The verdict of test and test-all depends on the code alone: tests/examples.py.
test test-all: export PYTHONHASHSEED := 0
# Dozens of processes import the same sources: they are compiled once, whatever the environment says.
test test-all: export PYTHONDONTWRITEBYTECODE :=

# Types are checked meanwhile: mypy leaves all cores but one idle.
typed = $(BIN)/mypy & types=$$!; $(1); tests=$$?; wait $$types && exit $$tests

test: install style
	$(call typed,$(PYTEST) -m 'not slow')

test-all: $(VENV)/agents/.installed
test-all: install style
	$(call typed,$(PYTEST) --again --durations 40)

# Luck belongs here: other examples, and more of them, in every run. What it finds becomes a test of its own.
explore: SEED := $(shell date +%s)
explore: install
	$(PYTEST) -m 'hypothesis or draws' --explore $(SEED)
	$(BIN)/python -m tests.mutants

# CHANGED=1: those whose file or test differs from the last commit; CHANGED=REF: from another one.
mutants: install
	$(BIN)/python -m tests.mutants $(if $(CHANGED),--changed $(if $(filter 1,$(CHANGED)),HEAD,$(CHANGED)))

# Drawn anew: worlds of clients and faults without a model (tests/simulation), then a server among hostile clients (tests/soak).
soak: ROUNDS := 400
soak: WORLDS := 1000
# Of the worlds, and of the rounds: an hour is enough for the 10,000,000 steps of the worlds on two processors.
soak: SECONDS := 7200
soak: SEED := $(shell date +%s)
soak: install
	$(BIN)/python -m tests.simulation --worlds $(WORLDS) --seconds $(SECONDS) --seed $(SEED)
	$(BIN)/python -m tests.soak --rounds $(ROUNDS) --seconds $(SECONDS) --seed $(SEED)

test-clients: $(VENV)/clients/.installed
	$(BIN)/python -m pytest tests/clients/heavy.py

$(VENV)/clients/.installed: Makefile $(STAMP)
	# An environment for each: they agree with nobody on versions.
	for client in $(CLIENTS); do \
		at=$(VENV)/clients/$${client%%[[=]*} && $(PYTHON) -m venv $$at && \
		$$at/bin/python -m pip install --quiet $$(grep -E '^(torch|transformers)==' constraints.txt) "$$client" || exit 1; \
	done
	touch $@

# For tests/agents/test_agents.py: hundreds of megabytes, which no other target needs.
$(VENV)/agents/.installed: Makefile | $(BIN)/python
	mkdir -p $(@D)
	if command -v npm > /dev/null; then npm install --silent --no-audit --no-fund --ignore-scripts --omit=optional \
		--fetch-retries 5 --prefix $(@D) $(AGENTS); fi
	touch $@

bench: install
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/infer bench --workload all --scale 0.25

dist: install
	$(BIN)/python -m deploy.dist dist

# For a bare GPU machine without a network: benchmarks/README.md.
GPU_BOX := .gpu-box
GPU_PYTHON ?= python3.12

gpu-box: install
	$(BIN)/python -m benchmarks.gpu.pack $(GPU_BOX)

gpu-dry-run: gpu-box $(VENV)/bare/.installed
	# The very same script, in an environment that has what the bare machine has and nothing else.
	OUT=$(GPU_BOX)/out $(VENV)/bare/bin/python $(GPU_BOX)/box.py --dry --work $(GPU_BOX)/work

$(VENV)/bare/.installed: benchmarks/gpu/bare.txt
	$(GPU_PYTHON) -m venv $(VENV)/bare
	$(VENV)/bare/bin/python -m pip install --quiet --requirement $<
	touch $@
