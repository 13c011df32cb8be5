# Everything a person does with this tree. Needs python3 (3.11 or newer, with its venv module) and make.
# One environment serves both running and testing: torch is most of either, and one set of pins is what was tested.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

MODEL ?=
WORKERS ?= 1
PORT ?= 8000
GRPC_PORT ?= 50051
ARGS ?=
# How long, and by which schedule, chaos does its harm.
SECONDS ?= 1800
SEED ?= 0
COMPOSE_FILES = compose/compose.yaml
WAIT = 120
# Docker's compose plug-in, or the older program by itself.
COMPOSE = PORT=$(PORT) $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose) \
  --project-name quire $(COMPOSE_FILES:%=--file %)

.PHONY: help venv serve test chaos lint format protos bench-cpu gpu-test gpu-bench compose-up compose-down compose-test compose-engine clean
.DEFAULT_GOAL := help

help:
	@printf '%s\n' \
	  'make serve         install what is missing, fetch a small model, serve it on http://127.0.0.1:8000/v1' \
	  '                   MODEL=folder|file.gguf|org/name WORKERS=1 PORT=8000 GRPC_PORT=50051 ARGS="--max-model-len 4096"' \
	  'make compose-up    the same small model in containers: build, start, wait until it is ready (PORT=8000)' \
	  '                   COMPOSE_FILES="compose/compose.yaml compose/compose.gpu.yaml" and the like: docs/deployment.md' \
	  'make compose-down  end the containers; the fetched model stays (ARGS=--volumes removes it too)' \
	  'make compose-test  builds the containers and tries them: a killed worker, more and fewer workers, a restarted router' \
	  'make test          linter, types and all tests (ARGS="tests/unit -k name" narrows the tests)' \
	  'make chaos         kills, stops, ends and cuts off workers under load, for SECONDS=1800 by a schedule of SEED=0' \
	  'make lint          linter and types only' \
	  'make format        put the code into its form' \
	  'make protos        make the gRPC stubs anew from protos/*.proto' \
	  'make bench-cpu     throughput against transformers, on this machine (ARGS="--help" lists its flags)' \
	  'make gpu-test      the tests of the GPU path, on this machine; GPU_PYTHON=python3 takes another environment' \
	  'make gpu-bench     decode, prefill, mixed requests and drafts on this GPU, in bf16, fp8 and 4 bits (ARGS=--quick)' \
	  'make venv          only install into .venv' \
	  'make clean         remove .venv and all caches in this folder'

venv: $(READY)

# Done again only when one of these files changes; a broken-off install is taken up where it ended.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Quire needs Python 3.11 or newer as '$(PYTHON)'; name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) lacks its venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo 'Installing into $(VENV) (once; torch is large)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	@$(BIN)/python -m pip install --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $(READY)

serve: $(READY)
	@exec $(BIN)/quire serve $(if $(MODEL),--model '$(MODEL)') --workers $(WORKERS) --port $(PORT) --grpc-port $(GRPC_PORT) $(ARGS)

# Unit tests have the cores to themselves, one each; the others are processes enough as they are.
ifdef ARGS
test: lint
	$(BIN)/python -m pytest $(ARGS)
else
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit --numprocesses auto --maxprocesses 8 --dist worksteal
	$(BIN)/python -m pytest --ignore tests/unit
endif

chaos: $(READY)
	$(BIN)/python -m tests.chaos.soak --seconds $(SECONDS) --seed $(SEED) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(READY)
	$(BIN)/python -m protos.generate

bench-cpu: $(READY)
	$(BIN)/python -m benchmarks.cpu_batching $(ARGS)

# Without GPU_PYTHON, .venv; with it, whatever has torch for CUDA, Triton, transformers and pytest.
GPU_PYTHON ?=
GPU_RUN = $(or $(GPU_PYTHON),$(BIN)/python)
GPU_TESTS = tests/unit/test_gpu_kernels.py tests/unit/test_shared_prefixes.py tests/unit/test_gpu_input.py tests/integration/test_shared_prefix_engine.py \
  tests/integration/test_model_families.py tests/integration/test_sampling_rules.py

gpu-test: $(if $(GPU_PYTHON),,$(READY))
	@$(GPU_RUN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo 'torch sees no CUDA device with $(GPU_RUN)' >&2; exit 1; }
	$(GPU_RUN) -m pytest -q -W ignore -o addopts=--import-mode=importlib -o timeout=0 \
	  -o asyncio_mode= -o asyncio_default_fixture_loop_scope= $(if $(ARGS),$(ARGS),$(GPU_TESTS))

gpu-bench: $(if $(GPU_PYTHON),,$(READY))
	$(GPU_RUN) -m benchmarks.gpu $(ARGS)

compose-engine:
	@docker compose version >/dev/null 2>&1 || docker-compose version >/dev/null 2>&1 || \
	  { echo "Neither 'docker compose' nor 'docker-compose' is here; on Debian and Ubuntu: apt-get install docker.io docker-compose" >&2; exit 1; }
	@$(COMPOSE) ps >/dev/null || \
	  { echo 'No Docker engine answers (the reason is above): does it run, and may you use it?' >&2; exit 1; }

compose-up: compose-engine
	@$(COMPOSE) up --build --detach $(ARGS)
	@for left in $$(seq $(WAIT) -1 0); do $(COMPOSE) ps gateway | grep -q '(healthy)' && break; sleep 1; done; \
	  test "$$left" -gt 0 || { $(COMPOSE) logs --tail 20; echo 'Not ready after $(WAIT) s (WAIT); the last logs are above' >&2; exit 1; }
	@printf '%s\n' 'Ready. Ask it something:' \
	  "  curl http://127.0.0.1:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' -d '{" \
	  '    "model": "smollm2-135m-instruct", "temperature": 0,' \
	  '    "messages": [{"role": "user", "content": "What is the capital of France?"}]}'"'"

compose-down: compose-engine
	@$(COMPOSE) down $(ARGS)

compose-test: $(READY) compose-engine
	$(BIN)/python -m tests.containers.run $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
