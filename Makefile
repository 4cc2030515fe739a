# The project's commands. `make` lists them. All of them work in a fresh clone.

PYTHON ?= python3
# The requirement for torch, which is installed first. Empty: torch is not installed.
TORCH ?= torch==2.13.0
VENV ?= .venv
# The version of DeepSpeed for the tests, and one that is a year older.
DEEPSPEED ?= 0.19.8
DEEPSPEED_OLD ?= 0.18.2
# Libraries for torch. Tests use their optimizers, hooks, models and trainers with tensorferry.
LIBRARIES ?= accelerate diffusers lightning lion-pytorch peft muon-optimizer pytorch-lightning pytorch-optimizer schedulefree torchmetrics transformers
# For `make test-gpu`: an interpreter with tensorferry, torch for CUDA and the test packages. Empty: that of VENV.
GPU_PYTHON ?=
# The interpreters for `make wheel`. Empty: all on PATH.
PYTHONS ?=
PYTEST_ARGS ?=
# The number of tests that run concurrently, except those marked `alone`. Tests wait half of the time, mostly for the
# drive, so the number exceeds the number of cores on small machines.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 5 ? n + 2 : 6)))
# The sanitizers for the C++ tests of `make test`: "address;undefined", or empty.
CPP_SANITIZE ?=
# For `make mutants`: names of mutants in tests/project/mutants.py. Empty: all.
MUTANTS ?=

BIN := $(VENV)/bin
# The C++ targets do not need Python: they use CMake from PATH if VENV does not have it.
CMAKE = $(or $(wildcard $(BIN)/cmake),cmake)
CTEST = $(or $(wildcard $(BIN)/ctest),ctest)
NINJA = $(or $(wildcard $(abspath $(BIN)/ninja)),$(shell command -v ninja))
CMAKE_GENERATOR_ARGS = $(if $(NINJA),-G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA))

CORE_SOURCES := $(shell find csrc cmake third_party -type f 2>/dev/null) CMakeLists.txt pyproject.toml \
	$(wildcard src/*.pth src/*.py)
CXX_FILES = $(shell find csrc tests/cpp tests/support cmake -name '*.cpp' -o -name '*.h')
PYTHON_DIRS := $(wildcard src tests benchmarks examples tools)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup build demo docs test test-cpp test-python test-torch test-gpu test-deepspeed test-vllm test-sglang mutants lint format stub sanitize sanitize-address sanitize-thread bench wheel clean

help: ## List these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' \
		| while IFS="$$(printf '\t')" read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done

setup: $(VENV)/.core.stamp ## Create .venv with all development packages and tensorferry itself

build: $(VENV)/.deps.stamp ## Rebuild the native core (Python files need no rebuild)
	@$(install_core)

demo: $(VENV)/.core.stamp ## Run the demonstration
	$(BIN)/python examples/demo.py

docs: $(VENV)/.deps.stamp ## Build the documentation site in build/site, and check all links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: test-cpp test-python ## Run all tests that do not need a GPU

test-python: $(VENV)/.core.stamp deepspeed ## Run the Python tests of these
	$(BIN)/python -m pytest -m "not gpu" -n $(JOBS) --maxschedchunk 1 $(PYTEST_ARGS)

test-cpp: $(VENV)/.deps.stamp ## Build and run the C++ tests
	$(call cpp_tests,$(if $(CPP_SANITIZE),asan-ubsan,cpp-tests),$(CPP_SANITIZE))

test-torch: ## Run the checkpoint tests with another version of torch: TORCH_VERSION=2.6.0
	@test -n "$(TORCH_VERSION)" || { echo "make $@ TORCH_VERSION=2.6.0"; exit 2; }
	PYTHON="$(PYTHON)" tools/test_torch.sh "$(TORCH_VERSION)" $(PYTEST_ARGS)

test-gpu: $(if $(GPU_PYTHON),,$(VENV)/.core.stamp) ## Run the tests that need a GPU (TORCH=torch installs torch with CUDA)
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu --ignore tests/standin $(PYTEST_ARGS)

test-deepspeed: $(VENV)/.core.stamp deepspeed ## Run DeepSpeed's own I/O tests with tensorferry: DEEPSPEED_SOURCE=checkout
	@test -d "$(DEEPSPEED_SOURCE)" || { echo "make $@ DEEPSPEED_SOURCE=path of a DeepSpeed checkout"; exit 2; }
	$(BIN)/python tools/deepspeed_tests.py "$(DEEPSPEED_SOURCE)"

test-vllm: $(VENV)/.core.stamp ## Load a model with the real vLLM from PyPI, without a GPU
	$(call test_serving,vllm)

test-sglang: $(VENV)/.core.stamp ## Load a model with the real SGLang from PyPI, without a GPU
	$(call test_serving,sglang)

mutants: $(VENV)/.core.stamp ## Check that tests detect known defects (MUTANTS=name for one of them)
	$(BIN)/python -m tools.mutants $(MUTANTS)

lint: $(VENV)/.core.stamp ## Check commit subjects, style, types, and whether the stub is up to date
	$(BIN)/python -m tools.commit_subjects
	$(BIN)/ruff check $(PYTHON_DIRS)
	$(BIN)/ruff format --check $(PYTHON_DIRS)
	$(BIN)/mypy --strict src
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@mkdir -p build
	$(call write_stub,build/_core.pyi)
	diff -u src/tensorferry/_core.pyi build/_core.pyi || { echo "stale stub: run 'make stub'"; exit 1; }

format: $(VENV)/.deps.stamp ## Format all sources
	$(BIN)/ruff check --fix-only $(PYTHON_DIRS)
	$(BIN)/ruff format $(PYTHON_DIRS)
	$(BIN)/clang-format -i $(CXX_FILES)

stub: $(VENV)/.core.stamp ## Generate the type stub of the native module
	$(call write_stub,src/tensorferry/_core.pyi)

sanitize: sanitize-address sanitize-thread ## Run the C++ tests under ASan + UBSan, then under TSan

sanitize-address:
	$(call cpp_tests,asan-ubsan,address;undefined)

sanitize-thread:
	$(call cpp_tests,tsan,thread)

bench: $(VENV)/.core.stamp ## Run the benchmarks
	$(BIN)/python -m benchmarks

wheel: $(VENV)/.deps.stamp ## Build the sdist and manylinux wheels into dist/, and test each wheel
	$(BIN)/python tools/build_wheels.py --sdist --test --out dist $(PYTHONS)

clean: ## Remove all build outputs (.venv stays)
	rm -rf build dist $(VENV)/.core.stamp
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# --- implementation ---

# Tests start hundreds of programs. Without bytecode files, each of them would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

# A sanitizer report ends the process, which makes ctest fail.
export ASAN_OPTIONS ?= detect_leaks=1:strict_string_checks=1:check_initialization_order=1
export UBSAN_OPTIONS ?= print_stacktrace=1
export TSAN_OPTIONS ?= halt_on_error=1:second_deadlock_stack=1:suppressions=$(abspath tests/cpp/tsan.supp)

# cpp_tests: (build folder, sanitizers)
define cpp_tests
$(CMAKE) -S . -B build/$(1) $(CMAKE_GENERATOR_ARGS) -DCMAKE_BUILD_TYPE=Debug \
	-DTENSORFERRY_BUILD_PYTHON=OFF -DTENSORFERRY_BUILD_TESTS=ON -DTENSORFERRY_WERROR=ON \
	"-DTENSORFERRY_SANITIZE=$(2)" --log-level=WARNING
$(CMAKE) --build build/$(1) --parallel
$(CTEST) --test-dir build/$(1) --output-on-failure --no-tests=error --timeout 600
endef

PIP_CORE = --quiet --no-build-isolation --no-deps \
	--config-settings=build-dir=build/core-{cache_tag} --config-settings=cmake.define.TENSORFERRY_WERROR=ON

define install_core
$(BIN)/python -m pip install $(PIP_CORE) --editable .
touch $(VENV)/.core.stamp
endef

# test_serving: (program). The program finds tensorferry by the entry points of the wheel.
define test_serving
rm -rf build/serving
$(BIN)/python -m pip wheel $(PIP_CORE) --wheel-dir build/serving .
PYTHON=$(BIN)/python tools/test_serving.sh $(1) build/serving/*.whl "$(TORCH)" $(PYTEST_ARGS)
endef

# write_stub: (file)
define write_stub
$(BIN)/python -m nanobind.stubgen --quiet --include-private --module tensorferry._core --output-file $(1)
$(BIN)/ruff check --quiet --fix-only $(1)
$(BIN)/ruff format --quiet $(1)
endef

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is not Python 3.10 or later: make $(MAKECMDGOALS) PYTHON=..."; exit 1; }
	tools/system_packages.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.system.stamp: tools/system_packages.sh | $(VENV)/bin/pip
	tools/system_packages.sh $(BIN)/python
	touch $@

# torch is installed first and separately, because other packages could select a different build of it.
$(VENV)/.deps.stamp: pyproject.toml $(VENV)/.system.stamp
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet --group build --group test --group dev $(if $(strip $(TORCH)),--group libraries)
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install --quiet --no-deps $(LIBRARIES))
	touch $@

# DeepSpeed's setup imports torch, so its build is not isolated. Its dependencies would select another build of torch, so
# they are not installed. Without torch, DeepSpeed is not installed, and its tests are skipped.
define pip_deepspeed
@if $(BIN)/python -c 'import torch' 2> /dev/null; then \
	echo "Installing deepspeed $(1)" \
	&& DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation $(2) deepspeed==$(1); \
else echo "DeepSpeed is not installed, because torch is not"; fi
@mkdir -p $(@D) && touch $@
endef

.PHONY: deepspeed
deepspeed: $(VENV)/.deepspeed-$(DEEPSPEED).stamp build/deepspeed-$(DEEPSPEED_OLD)/.stamp

$(VENV)/.deepspeed-$(DEEPSPEED).stamp: $(VENV)/.deps.stamp
	$(BIN)/python -m pip install --quiet --group deepspeed
	$(call pip_deepspeed,$(DEEPSPEED))

build/deepspeed-$(DEEPSPEED_OLD)/.stamp: | $(VENV)/.deepspeed-$(DEEPSPEED).stamp
	$(call pip_deepspeed,$(DEEPSPEED_OLD),--upgrade --target $(@D))

$(VENV)/.core.stamp: $(CORE_SOURCES) $(VENV)/.deps.stamp
	$(install_core)
