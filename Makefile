# `make help` lists the targets. Everything lives in .venv; nothing is installed
# outside it. Choose another interpreter with `make PYTHON=python3.12 ...`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
STAMP_UNIT := .venv/.installed-unit
STAMP_DEMO := .venv/.installed-demo
STAMP_HF := .venv/.installed-hf
COMPILERS := .venv-aot
STAMP_AOT := $(COMPILERS)/.installed
TEST_JOBS ?= 2
CODE := osd_jax osd_serve osd_tools tests benchmarks experiments notebooks
UNIT_EXTRAS := llama,gguf,parquet,plots,log,serve,test
$(STAMP): EXTRAS := data,replicas,docs,dev,$(UNIT_EXTRAS)
$(STAMP_UNIT): EXTRAS := $(UNIT_EXTRAS)
$(STAMP_DEMO): EXTRAS := plots
# Run uv to check it: on PATH there may be a shim of a version manager that fails.
UV := $(shell uv --version >/dev/null 2>&1 && echo uv)

# Silences TensorFlow's messages about its build and missing GPUs.
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Silences mkdocs-material's notice about another generator at every build.
export NO_MKDOCS_2_WARNING = 1

.PHONY: help install demo demo-independent docs site fork figures test test-unit test-quick test-slow test-release \
  durations test-hf test-aot test-versions lint style types format bench clean

help: ## show this list
	@grep -hE '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# Without bytecode, importing tensorflow and seqio takes 9 s instead of 3. Both installers
# therefore compile it, even if PYTHONDONTWRITEBYTECODE is set.
$(STAMP) $(STAMP_UNIT) $(STAMP_DEMO): pyproject.toml constraints.txt
	@$(BIN)/python --version >/dev/null 2>&1 \
	  || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "$(PYTHON) is not Python 3.11 to 3.13; choose another: make PYTHON=python3.12" >&2; exit 1; }
ifneq ($(UV),)
	@$(BIN)/python --version >/dev/null 2>&1 || uv venv --seed --python "$$(command -v $(PYTHON))" .venv
	uv pip install --quiet --python $(BIN)/python --compile-bytecode -c constraints.txt -e '.[$(EXTRAS)]'
else
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --compile -c constraints.txt -e '.[$(EXTRAS)]'
endif
	@touch $@

# Without what speculators needs to train on several machines.
SPECULATORS := speculators loguru pydantic-settings python-dotenv

# pip installs torch here, because other installers choose a build with gigabytes of CUDA.
$(STAMP_HF): $(STAMP)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --compile -c constraints.txt torch transformers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt $(SPECULATORS)
	@touch $@

install: $(STAMP) ## make .venv with the pinned dependencies

# Demos need few packages, so a fresh clone is ready sooner.
FOR_DEMO = $(firstword $(wildcard $(STAMP) $(STAMP_UNIT)) $(STAMP_DEMO))

demo: $(FOR_DEMO) ## a draft learns from four topics and serves them faster
	$(BIN)/osd online --gin_file=gin_configs/runs/demo_padded.gin

demo-independent: $(FOR_DEMO) ## the same topics with a separate draft model, as in the paper
	$(BIN)/osd online --gin_file=gin_configs/runs/demo_independent.gin

docs: $(STAMP) ## serve the docs on this machine, rebuilt when a page changes
	$(BIN)/python -m mkdocs serve

site: $(STAMP) ## build the docs into site/ with executed notebooks
	OSD_DOCS_EXECUTE=true $(BIN)/python -m mkdocs build --strict

# Badges and notebooks cannot know where they are stored, so it is written into them.
fork: ## point the notebooks at your repository: make fork REPOSITORY=you/osd_jax
	@[[ "$(REPOSITORY)" =~ ^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$$ ]] \
	  || { echo "usage: make fork REPOSITORY=OWNER/NAME" >&2; exit 1; }
	sed -i.bak -E -e 's#(colab.research.google.com/github/)[^/]+/[^/]+#\1$(REPOSITORY)#' \
	  -e 's#(REPOSITORY = \\")[^\]+#\1$(REPOSITORY)#' notebooks/*.ipynb
	rm notebooks/*.ipynb.bak

figures: $(STAMP) ## draw the pictures of the results page from committed results
	$(BIN)/python benchmarks/figures.py

# Bytecode is written even if PYTHONDONTWRITEBYTECODE is set, because many tests start
# processes. xdist keeps the order that conftest.py chooses: the longest files first.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --durations=10 -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

# The type checker uses one core, so it runs next to the tests.
test: style ## lint, and the fast tests of single parts
	$(MAKE) --no-print-directory -j 2 types test-quick

test-quick: $(STAMP)
	$(PYTEST) -m "not slow and not release and not hf and not aot" --suite=quick

test-slow: $(STAMP) ## tests of whole runs, several processes and the docs
	$(PYTEST) -m "slow and not release and not hf and not aot" --suite=slow

test-release: $(STAMP) ## the longest tests of whole runs, which CI leaves out
	$(PYTEST) -m "release" --suite=release

# The files whose tests take at most 3 s together. They need no tensorflow and no ray.
UNIT = $(shell awk -F, '$$1 == "quick" && $$3 <= 3 { print $$2 }' tests/durations.csv)

test-unit: $(or $(wildcard $(STAMP)),$(STAMP_UNIT)) ## the test files that take seconds: a minute
	$(PYTEST) -m "not slow and not release and not hf and not aot" $(UNIT)

durations: ## store the seconds that the last run of each suite measured
	@mkdir -p runs
	{ echo suite,file,seconds; for suite in aot hf quick release slow; do \
	  cat runs/durations/$$suite.csv 2>/dev/null || grep "^$$suite," tests/durations.csv || true; \
	done; } > runs/durations.csv
	mv runs/durations.csv tests/durations.csv

test-hf: $(STAMP) ## live comparison with torch and transformers (Python 3.11)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
	  $(MAKE) --no-print-directory $(STAMP_HF); \
	  $(BIN)/python -m pytest -m hf --suite=hf || { code=$$?; test $$code -eq 5 && echo "no test is marked hf"; }; \
	else \
	  echo "test-hf skipped: torch==2.13.0 is pinned for Python 3.11, .venv has $$($(BIN)/python --version)"; \
	fi

# The compilers for TPUs (libtpu) and GPUs run without such machines. They have their own
# folder, because in .venv they would make JAX look for a TPU whenever it starts.
$(STAMP_AOT): $(STAMP) constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target $(COMPILERS) -c constraints.txt \
	  libtpu jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
	@touch $@

test-aot: $(STAMP_AOT) ## compile a run for TPUs and GPUs, without the machines
	PYTHONPATH=$(CURDIR)/$(COMPILERS) JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal -m aot --suite=aot --durations=5

# Both ends of the range of jax in pyproject.toml. Releases after 0.10 need Python 3.12.
LOWEST = $(shell sed -n 's/.*"jax>=\([0-9.]*\),.*/\1/p' pyproject.toml)
NEWER_PYTHON ?= $(firstword $(foreach name,python3.13 python3.12,$(shell $(name) --version >/dev/null 2>&1 && echo $(name))) python3.13)
VERSION_TESTS := tests/models/test_t5.py tests/models/test_attached.py tests/native/test_products.py \
  tests/decoding/test_accept.py tests/decoding/test_rounds.py tests/decoding/test_equals_plain.py \
  tests/decoding/test_law.py::test_decoding_has_the_law_of_the_target tests/engine/test_engine.py \
  tests/distillation/test_update.py tests/runs/test_checkpoint.py tests/test_online.py
with-lowest: INTERPRETER = $(PYTHON)
with-lowest: RELEASES = jax==$(LOWEST) jaxlib==$(LOWEST)
with-lowest: UNPINNED = jax|jaxlib
with-newest: INTERPRETER = $(NEWER_PYTHON)
with-newest: RELEASES = jax jaxlib flax optax orbax-checkpoint
with-newest: UNPINNED = jax|jaxlib|flax|optax|orbax-checkpoint|ml-dtypes|numpy|scipy|tensorstore

test-versions: with-lowest with-newest ## the core with the lowest and the newest jax allowed (minutes)

with-%:
	@[ -x .venv-$*/bin/python ] || $(INTERPRETER) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  -c <(grep -vE '^($(UNPINNED))=' constraints.txt) $(RELEASES) -e '.[$(UNIT_EXTRAS)]'
	.venv-$*/bin/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(VERSION_TESTS)

lint: style types ## ruff, import contracts, types, scripts and YAML of pod jobs

style: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports --no-logo
	$(BIN)/shellcheck experiments/pods/*.sh tests/*.sh .ci/run
	$(BIN)/hadolint Dockerfile
	$(BIN)/yamllint --strict -d '{extends: relaxed, rules: {line-length: {max: 110}}}' experiments/pods *.yml .*.yaml

types: $(STAMP)
	$(BIN)/pyright

format: $(STAMP) ## format the code, sort imports, apply automatic fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format $(CODE)

# Run one after another, because concurrent benchmarks would disturb each other.
BENCHMARKS := \
  bench_greedy.py \
  "bench_greedy.py --threads 2" \
  "bench_greedy.py --shapes flan-t5-base --rows 8" \
  bench_speculative.py \
  "bench_speculative.py --alphas .8 --drafted 3 --draft float32 int8 shortlist both --without_native --no_rivals" \
  bench_batching.py bench_adaptive.py \
  bench_compile.py bench_update.py versions.py \
  bench_learning.py "bench_learning.py --free --intervals 1" \
  "bench_whole_run.py --attached shipped:demo_attached_draft.safetensors --attached_gin runs/demo.gin"

bench: $(STAMP_HF) ## run every benchmark, then write benchmarks/README.md (hours; Python 3.11)
	$(BIN)/python benchmarks/write_readme.py --note
	@for program in $(BENCHMARKS); do \
	  echo "== $$program"; $(BIN)/python benchmarks/$$program; \
	done
	$(BIN)/python benchmarks/write_readme.py

clean: ## remove caches and build outputs; keeps .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis .jax_cache
	find osd_jax osd_serve osd_tools tests benchmarks experiments -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
