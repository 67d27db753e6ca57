# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.

# Another Python than the usual has an environment of its own: `make test PYTHON=python3.13`.
PYTHON ?= python3
VERSION = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(VERSION))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# pip compiles packages on one core, compileall on all. Some packages have files that do not compile.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
PLAN_MODEL := tests/data/configs/llama-3.3-70b.json

# vLLM has an environment of its own for each version, about 4 GB, which may lie anywhere.
VLLM ?= 0.32
VLLM_VENV ?= .venv-vllm-$(VLLM)

# SGLang has an environment of its own for each version, about 3 GB, which may lie anywhere.
SGLANG ?= 0.5.23
SGLANG_VENV ?= .venv-sglang-$(SGLANG)

# Tests start hundreds of processes: none should have to compile what another one has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo plan test test-vllm test-sglang test-page unit lint format bench soak mutants clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED) ## make the virtual environment

$(INSTALLED): pyproject.toml requirements/dev.txt requirements/no-deps.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) -r requirements/dev.txt
	$(BIN)/pip install $(PIP_FLAGS) --no-deps -r requirements/no-deps.txt
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

demo: $(INSTALLED) ## a real model: prefill on 3 ranks, decode on 1, every token checked
	$(BIN)/kvferry demo

plan: $(INSTALLED) ## plan a real model's transfer and draw it
	@mkdir -p build
	$(BIN)/kvferry plan --model $(PLAN_MODEL) --prefill tp=4 --decode tp=2,dp=2,page=64 \
	    --tokens 8192 --cost-model nixl-gpu --svg build/plan.svg --html build/plan.html

test: $(INSTALLED) ## lint, types, import rules, tests
	@$(MAKE) --no-print-directory -j2 lint unit

# Many tests wait for processes and deadlines, so there are more workers than cores. Neighbours
# stay with one worker as far as they can, because they share fixtures (models, clusters). The copy
# loops are compiled before, or every worker would do it.
unit: $(INSTALLED)
	@scripts/install-libibverbs $(BIN)/python
	@$(BIN)/python -c 'import kvferry; kvferry.warm_up()'
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not gpu and not page"

# Needs Debian's chromium (apt-get install chromium); playwright only drives it.
test-page: $(INSTALLED) ## the page in a real Chromium
	$(BIN)/pip install --quiet --disable-pip-version-check 'playwright>=1.50,<2'
	$(BIN)/python -m pytest -n0 -m page tests/dashboard/page

test-vllm: ## real vLLM engines on this machine's CPU (VLLM=0.31 for another version)
	@scripts/vllm-env $(VLLM_VENV) $(PYTHON) $(VLLM)
	@scripts/test-vllm $(VLLM_VENV)/bin/python

test-sglang: ## real SGLang servers on this machine's CPU (SGLANG=0.5.22 for another version)
	@scripts/sglang-env $(SGLANG_VENV) $(PYTHON) $(SGLANG)
	@VLLM_VENV=$(abspath $(VLLM_VENV)) scripts/test-sglang $(SGLANG_VENV)/bin/python

lint: $(INSTALLED) ## ruff, mypy --strict, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(INSTALLED) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## measure planning, binding, the protocol, copies and transports
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/protocol.py
	$(BIN)/python benchmarks/copy_cpu.py
	$(BIN)/python benchmarks/transport_posts.py nixl mooncake shm
	$(BIN)/kvferry bench control --json

soak: $(INSTALLED) ## 10,000 rooms while ranks are killed and stopped, then many short ones (10 min)
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/short_rooms.py

# ARGS="--only endpoint/driver", ARGS="--sample 100 --seed 7 --jobs 2", ARGS=--named
mutants: $(INSTALLED) ## which small mistakes in endpoint/ and protocol/ would no test notice?
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

clean: ## remove everything that make made
	rm -rf .venv .venv-* build
