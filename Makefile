# Every target but `help`, `clean` and `bench-gpu` sets up .venv first; once that is done it costs a
# moment.
.DEFAULT_GOAL := help

# Looked up before .venv/bin joins PATH: the set-up may replace .venv.
ifndef PYTHON
PYTHON := $(or $(shell command -v python3.11),$(shell command -v python3),python3)
endif

VENV := $(CURDIR)/.venv
# Runs what the settings of a study ask for and has no results yet.
COMPARE = "$(VENV)/bin/python" -m horovod_topk.cli compare
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
# TensorFlow's greetings, once for each process that horovodrun starts.
export TF_CPP_MIN_LOG_LEVEL ?= 2

# More arguments for the command behind a target: make test TESTS=tests/unit ARGS="-k payload"
ARGS ?=
TESTS ?= tests
# How many tests run at once; 0: one, in this process. Those in network namespaces need 0.
WORKERS ?= 2
# Which tests: fast, tools, all, or rest (what all adds to the first two); see tests/conftest.py.
TIER ?= fast

.PHONY: help setup demo test test-tools test-all check accuracy frontier default methods residuals practice crashes docs bench bench-kernels bench-gpu bench-network plan-grid bench-trouble bench-wire fuzz clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: ## create .venv with both frameworks and Horovod (minutes the first time; no root)
	@"$(PYTHON)" scripts/setup_env.py

demo: setup ## train a CNN on two ranks, dense and then with TopKEF; a table and a picture
	"$(VENV)/bin/python" scripts/demo.py $(ARGS)

test: setup ## test every feature and every law, on real ranks too (10 minutes on two cores)
	"$(VENV)/bin/python" -m pytest --tier=$(TIER) -n $(WORKERS) --dist worksteal $(TESTS) $(ARGS)

test-tools: TIER = tools
test-tools: test ## test the command, scripts, pages, images and set-up (minutes)

test-all: TIER = all
test-all: WORKERS = 0
test-all: test ## run every test: laws and features on every controller, large sizes (three quarters of an hour)

check: setup ## ruff (lint, format) and mypy
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/mypy"

accuracy: setup ## make the published accuracy tables anew (hours)
	$(COMPARE) scripts/study/accuracy.toml --out docs/results/accuracy.jsonl $(ARGS)
	"$(VENV)/bin/python" scripts/page.py accuracy

frontier: setup ## quality against bytes, for every format and exchange, on simulated ranks (hours)
	$(COMPARE) scripts/study/frontier.toml --out docs/results/frontier.jsonl $(ARGS)
	"$(VENV)/bin/python" scripts/page.py frontier

default: setup ## the default beside dense over models and training loops, simulated ranks (hours)
	$(COMPARE) scripts/study/default.toml --out docs/results/default.jsonl $(ARGS)
	"$(VENV)/bin/python" scripts/page.py default

methods: setup ## every method beside dense at about 16 and 64 times fewer bytes, simulated ranks (hours)
	$(COMPARE) scripts/study/methods.toml --out docs/results/methods.jsonl $(ARGS)
	"$(VENV)/bin/python" scripts/page.py methods

residuals: setup ## norms of residuals beside the bounds of theory, into docs/residuals.md (minutes)
	"$(VENV)/bin/python" scripts/bench.py residuals $(ARGS)

practice: setup ## clipping, loss scaling, momentum, restarts on real data, beside dense (an hour)
	$(COMPARE) scripts/study/practice.toml --out docs/results/practice.jsonl $(ARGS)
	"$(VENV)/bin/python" scripts/page.py practice

crashes: setup ## kill a hundred ranks of elastic jobs, and account for what is lost (a quarter of an hour)
	"$(VENV)/bin/python" scripts/bench.py crashes $(ARGS)

docs: setup ## print anew what pages show of plan, bytes, compare and formulas (seconds; a test compares)
	"$(VENV)/bin/python" scripts/printed.py $(ARGS)

bench: setup ## time compression of a ResNet-50's gradients, PyTorch against TensorFlow
	"$(VENV)/bin/python" scripts/bench.py steps $(ARGS)

bench-kernels: setup ## time selection against r += g and torch.topk; tables and a picture (minutes)
	"$(VENV)/bin/python" scripts/bench.py kernels $(ARGS)

# .venv has a PyTorch without CUDA: `make bench-gpu PYTHON=...` names one that can use the GPU.
bench-gpu: ## time the Triton kernels and whole steps on a GPU (needs a GPU; two minutes)
	PYTHONPATH="$(CURDIR)" "$(PYTHON)" scripts/bench.py gpu $(ARGS)
	PYTHONPATH="$(CURDIR)" "$(PYTHON)" scripts/bench.py gpu_steps $(ARGS)

bench-network: setup ## time a step against bandwidth, beside Horovod and torch DDP (root; half an hour)
	"$(VENV)/bin/python" scripts/bench.py network $(ARGS)

plan-grid: setup ## what `horovod-topk plan` says, against measured steps (root; an hour and a half)
	"$(VENV)/bin/python" scripts/bench.py plan $(ARGS)

bench-trouble: setup ## a slow rank and lost packets, dense beside TopKEF (root; a quarter of an hour)
	"$(VENV)/bin/python" scripts/bench.py trouble $(ARGS)

bench-wire: setup ## count the bytes that leave a host's network card, 2 to 8 hosts (root; half an hour)
	"$(VENV)/bin/python" scripts/bench.py wire $(ARGS)

fuzz: setup ## encode and decode arbitrary buckets under AddressSanitizer and UBSan
	"$(VENV)/bin/python" scripts/fuzz.py $(ARGS)

clean: ## remove .venv and build outputs; the cache with Horovod's wheel stays
	rm -rf .venv build dist horovod_topk/kernels/*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
