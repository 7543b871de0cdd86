# One place for everything a person or CI runs. `make help` lists it; ARGS="..." is handed on to the command.

.DEFAULT_GOAL := help
.PHONY: help setup demo serve lint test test-fast soak proto clean

PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/pip --disable-pip-version-check -qq
TORCH = $(shell grep '^torch==' constraints.txt)
# PyPI's torch for Linux brings the CUDA libraries. TORCH_INDEX names an index that has a smaller CPU build.
TORCH_INDEX ?=
HAS_GPU = $(shell command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && echo yes)

PACKAGES := deployments cluster engine kv_store messages telemetry
TYPED := $(PACKAGES) client/src scripts $(patsubst %/,%,$(sort $(dir $(wildcard benchmarks/*.py))))
MODEL ?= demo
ARGS ?=
# Several processes compute on the same cores: threads that spin while they wait take them from each other.
export OMP_WAIT_POLICY := PASSIVE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with pinned dependencies; again only when they change

$(READY): pyproject.toml client/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setup: environment .venv ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv .venv || { echo "python cannot make environments: install its venv package (python3-venv)" >&2; exit 1; }
	@echo "setup: $(TORCH) ($(if $(HAS_GPU),for the GPU,for the CPU))"
	@$(PIP) install $(TORCH) -c constraints.txt $(if $(HAS_GPU),,$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)))
	@echo "setup: kvferry, its client and the development tools"
	@$(PIP) install -e client -e '.[dev]' -c constraints.txt
	@touch $@
	@echo "setup: done"

demo: setup ## start a whole system here, ask it two questions, stop it
	@$(BIN)/kvferry demo $(ARGS)

serve: setup ## serve MODEL (demo, a folder or a hub id) until Ctrl-C
	@$(BIN)/kvferry serve --model $(MODEL) $(ARGS)

lint: setup ## ruff, mypy, import layers, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_proto.py --check
	$(BIN)/python scripts/unasync.py --check

test: lint ## lint, then every test but the slow ones
	$(BIN)/kvferry model fetch demo
	$(BIN)/pytest -m "not slow and not gpu" $(ARGS)

test-fast: setup ## unit and contract tests that start no services
	$(BIN)/pytest -m "not slow and not gpu and not ray and not redis and not nixl" tests/unit tests/contract client/tests $(ARGS)

soak: lint ## lint, then every test with full counts
	$(BIN)/kvferry model fetch demo
	$(BIN)/pytest -m "not gpu" $(ARGS)

proto: setup ## write the generated files: protobuf modules, sync client
	$(BIN)/python scripts/generate_proto.py
	$(BIN)/python scripts/unasync.py

clean: ## remove .venv and every cache in this folder
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
