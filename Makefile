# One command per verb. They use the virtual environment .venv; `make setup` makes it.
PYTHON ?= python3
BIN := .venv/bin
CHECKS ?= ../shared/conformance
export PATH := $(CURDIR)/$(BIN):$(PATH)
CPP := $(wildcard native/*/*.cpp native/*/*.h tests/native/*.cpp tests/native/*.h)
NATIVE_TESTS := cmake -S . -G Ninja -DCMAKE_BUILD_TYPE=Debug -DOCTAVO_PYTHON=OFF -DOCTAVO_NATIVE_TESTS=ON

.PHONY: setup format check docs test bench native-test soak soak-short invariance fuzz fuzz-short clients api-check conformance conformance-short clean

setup: ## virtual environment with octavo (editable) and all tools
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -e '.[dev]'

format: ## rewrite sources in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

check: ## format, lint, types, the import rule and generated pages, without changing anything
	@! git ls-files --cached --ignored --exclude-standard | grep . # committed, though it is ignored
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/reference.py --check

docs: ## generated pages of docs/reference
	$(BIN)/python scripts/reference.py

test: ## all Python tests
	$(BIN)/pytest

bench: ## kernels and offline throughput into benchmarks/results, then the report
	$(BIN)/octavo bench kernels
	$(BIN)/octavo bench throughput
	$(BIN)/octavo bench report

native-test: ## C++ tests under ASan + UBSan, and the threads under TSan
	$(NATIVE_TESTS) -B build/asan -DOCTAVO_SANITIZE=address,undefined
	cmake --build build/asan
	ctest --test-dir build/asan --output-on-failure -j 2
	$(NATIVE_TESTS) -B build/tsan -DOCTAVO_SANITIZE=thread
	cmake --build build/tsan --target pool_test program_test
	ctest --test-dir build/tsan --output-on-failure -R 'pool_test|program_test'

soak: ## long run against a real server; writes benchmarks/results
	$(BIN)/python scripts/soak.py --minutes 20

soak-short: ## the same in a minute, for CI
	$(BIN)/python scripts/soak.py --minutes 0.7 --no-result

invariance: ## random requests and settings on a real model, each answer against that of the request alone; writes benchmarks/results
	$(BIN)/python scripts/invariance.py --minutes 20

fuzz: ## random right and wrong requests to all endpoints of a real server; writes benchmarks/results
	$(BIN)/python scripts/fuzz.py --minutes 10

fuzz-short: ## the same in a third of a minute, for CI
	$(BIN)/python scripts/fuzz.py --minutes 0.35 --no-result

clients: ## LangChain and LlamaIndex against a real server, in an environment of their own
	$(BIN)/python scripts/clients.py

api-check: ## schemathesis against a server, by its own OpenAPI document
	$(BIN)/python scripts/schemathesis_check.py

conformance: ## black-box checks against servers with and without a key; CHECKS names their folder
	$(BIN)/python scripts/conformance.py $(CHECKS)

conformance-short: ## the same in half the time, for CI
	$(BIN)/python scripts/conformance.py $(CHECKS) --short

clean:
	rm -rf build dist .venv .venv-clients src/octavo/backends/cpu/_native*.so
