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

.PHONY: help venv serve test lint format protos bench-cpu clean
.DEFAULT_GOAL := help

help:
	@printf '%s\n' \
	  'make serve      install what is missing, fetch a small model, serve it on http://127.0.0.1:8000/v1' \
	  '                MODEL=folder|file.gguf|org/name WORKERS=1 PORT=8000 GRPC_PORT=50051 ARGS="--max-model-len 4096"' \
	  'make test       linter, types and all tests (ARGS="tests/unit -k name" narrows the tests)' \
	  'make lint       linter and types only' \
	  'make format     put the code into its form' \
	  'make protos     make the gRPC stubs anew from protos/*.proto' \
	  'make bench-cpu  throughput against transformers, on this machine (ARGS="--help" lists its flags)' \
	  'make venv       only install into .venv' \
	  'make clean      remove .venv and all caches in this folder'

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

test: lint
	$(BIN)/python -m pytest $(ARGS)

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

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
