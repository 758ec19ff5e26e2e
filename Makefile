# Every target but `help`, `clean` and `bench-gpu` sets up .venv first; once that is done it costs a
# moment.
.DEFAULT_GOAL := help

# Looked up before .venv/bin joins PATH: the set-up may replace .venv.
ifndef PYTHON
PYTHON := $(or $(shell command -v python3.11),$(shell command -v python3),python3)
endif

VENV := $(CURDIR)/.venv
RUN := "$(VENV)/bin/python"
# horovodrun looks for mpirun and python on PATH.
export PATH := $(VENV)/bin:$(PATH)
# For plain mpirun, in a container (root) and with more ranks than cores. horovodrun passes
# --allow-run-as-root and -H localhost:N itself and needs neither.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
# One thread a rank: several ranks share the cores, and sums keep their order from run to run.
export OMP_NUM_THREADS ?= 1
# horovodrun tells Open MPI of as many slots as ranks, so where cores are fewer it does not notice and
# waits by spinning on the core that another rank needs: a collective then takes 5 to 8 times longer.
export OMPI_MCA_mpi_yield_when_idle ?= 1
# Without compiled modules on disk each of some 40 ranks would compile the package and its cases anew.
unexport PYTHONDONTWRITEBYTECODE
# TensorFlow's greetings, once for each process that horovodrun starts.
export TF_CPP_MIN_LOG_LEVEL ?= 2

# More arguments for the command behind a target: make test TESTS=tests/unit ARGS="-k payload"
ARGS ?=
TESTS ?= tests
# How many tests run at once; 0: one, in this process. Those in network namespaces need 0.
WORKERS ?= 2
# Which tests: fast, tools, all, rest (what all adds to the first two), or integrations; see
# tests/conftest.py.
TIER ?= fast

STUDIES := accuracy allocation frontier default does-it-pay local-steps methods optimizers practice
BENCHMARKS := bench bench-kernels bench-network bench-pay bench-trouble bench-wire plan-grid residuals crashes gpu-compiled

.PHONY: help setup demo demo-ddp dist clean test test-tools test-all test-integrations check fuzz printed docs bench bench-kernels bench-network bench-pay bench-trouble bench-wire plan-grid residuals crashes gpu-compiled bench-gpu accuracy allocation frontier default does-it-pay local-steps methods optimizers practice

help: ## list the targets
	@sed -nE 's/^## (.*)/\n\1/p; s/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

setup: ## create .venv with both frameworks and Horovod (minutes, then a moment)
	@"$(PYTHON)" scripts/setup_env.py

demo: setup ## train a CNN on two ranks, dense and with TopKEF; a table, a picture
	$(RUN) scripts/demo.py $(ARGS)

demo-ddp: ## the same with torch DDP, without Horovod (a minute)
	@"$(PYTHON)" scripts/setup_env.py --ddp
	"$(CURDIR)/build/ddp/bin/python" scripts/demo.py --ddp

dist: ## build the released files into dist/ and check them (10 minutes)
	"$(PYTHON)" scripts/dist.py

clean: ## remove .venv and build outputs; the cache with Horovod's wheel stays
	rm -rf .venv build dist horovod_topk/kernels/*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

## Tests. A part of them: make test TESTS=tests/unit ARGS="-k payload"

test: setup ## test every feature and every law, on real ranks too (5 to 6 minutes)
	$(RUN) -m pytest --tier=$(TIER) -n $(WORKERS) --dist worksteal $(TESTS) $(ARGS)

test-tools: TIER = tools
test-tools: test ## test the command, scripts, pages, images, set-up, GPU builds (6 minutes)

test-all: TIER = all
test-all: WORKERS = 0
test-all: test ## run every test: every controller, large sizes (three quarters of an hour)

test-integrations: TIER = integrations
test-integrations: WORKERS = 0
test-integrations: TESTS = tests/integrations
test-integrations: test ## test Accelerate, Trainer and Lightning (7 minutes)

check: setup ## ruff (lint, format) and mypy; must pass (a minute)
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/mypy"

fuzz: setup ## encode and decode arbitrary buckets under sanitizers (a minute)
	$(RUN) scripts/fuzz.py $(ARGS)

## Benchmarks write docs/results and the pages that show them. Some jobs: make bench-wire ARGS="2x1:50"

bench: ## compression of a ResNet-50's gradients (minutes)
bench-kernels: ## selection beside r += g and torch.topk (half an hour)
bench-network: ## steps against bandwidth, beside Horovod and DDP (root, half an hour)
bench-pay: ## steps of 25.5 million parameters, and a whole run (root, half an hour)
bench-trouble: ## a slow rank and lost packets (root, a quarter of an hour)
bench-wire: ## bytes that leave a host's network card (root, half an hour)
plan-grid: ## measured steps beside what plan says (root, an hour and a half)
residuals: ## norms of residuals beside the bounds of theory (minutes)
crashes: ## kill a hundred ranks of elastic jobs (a quarter of an hour)
gpu-compiled: ## what the GPU kernels need, and move (minutes, no GPU)

bench: NAME := steps
bench-pay: NAME := does_it_pay
plan-grid: NAME := plan
gpu-compiled: NAME := gpu_compiled
$(BENCHMARKS): setup
	$(RUN) scripts/bench.py $(or $(NAME),$(patsubst bench-%,%,$@)) $(ARGS)

# .venv has a PyTorch without CUDA: `make bench-gpu PYTHON=...` names one that can use the GPU.
bench-gpu: ## Triton kernels and whole steps on a GPU (needs a GPU; two minutes)
	PYTHONPATH="$(CURDIR)" "$(PYTHON)" scripts/bench.py gpu $(ARGS)
	PYTHONPATH="$(CURDIR)" "$(PYTHON)" scripts/bench.py gpu_steps $(ARGS)

## Studies run what their settings ask for and has no results yet, and write pages

accuracy: ## plain error feedback beside dense, on real ranks (hours)
allocation: ## ratios by tensor at equal bytes beside one for all (hours)
frontier: ## quality against bytes for every format and exchange (hours)
default: ## the default beside dense over models and training loops (hours)
does-it-pay: ## loss at 11 and 25 million parameters, to join with seconds (hours)
local-steps: ## local steps beside an exchange in every step (hours)
methods: ## every method beside dense at 16 and 64 times fewer bytes (hours)
optimizers: ## the optimizers that people train with, beside dense (half an hour)
practice: ## clipping, loss scaling, momentum, restarts, on real ranks (an hour)

$(STUDIES): setup
	$(if $(filter optimizers,$@),$(RUN) -m pip install --quiet --no-deps pytorch_optimizer==3.8.0 bitsandbytes==0.50.2)
	$(RUN) -m horovod_topk.cli compare scripts/study/$(subst -,_,$@).toml --out docs/results/$(subst -,_,$@).jsonl $(ARGS)
	$(RUN) scripts/page.py $@

## Pages alone, from stored results: .venv/bin/python scripts/page.py NAME

printed: setup ## print anew what pages show of commands and formulas (seconds)
	$(RUN) scripts/printed.py $(ARGS)

docs: setup ## build the site into build/site; dead links are errors (half a minute)
	$(RUN) -m pip install --quiet 'mkdocs-material>=9.6,<10' 'mkdocstrings[python]>=1,<2' 'mkdocs-jupyter>=0.25,<1'
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build $(ARGS)
