# Builds gpipe_fast in an environment of its own, checks it and runs it; `make help` lists the targets.

PYTHON ?= python3
TORCH ?= 2.14.1
# torchvision 0.26 goes with torch 2.11, 0.27 with 2.12, and so on.
TORCHVISION = 0.$(shell expr 15 + $(word 2,$(subst ., ,$(TORCH)))).*
VENV ?= .venv
ARGS ?=

# The second environment: the Python and torch of the reference GPU machine.
REFERENCE_PYTHON ?= 3.12
REFERENCE_TORCH ?= 2.11.0
# The versions between that one and the newest: each commit is tried with one of them, by turns.
BETWEEN ?= $(word $(shell expr 1 + $$(git rev-list --count HEAD 2>/dev/null || echo 0) % 2),2.12.0 2.13.0)
# What `make wheelhouse` may gather: 64 MiB.
WHEELHOUSE_BYTES := 67108864

export MAX_JOBS ?= $(shell nproc)
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := build
# The tests come last, so that their summary is the last thing to read; ninja and pytest are parallel by themselves.
.NOTPARALLEL:

PY := $(VENV)/bin/python
# One worker for each core; idle OpenMP threads sleep, so that workers do not keep each other from computing.
PYTEST := OMP_WAIT_POLICY=passive $(PY) -m pytest -q -n $(MAX_JOBS) --dist loadgroup
INSTALLED := $(VENV)/.installed-torch-$(TORCH)
# The file's name carries the Python version, so environments of different Pythons share the tree.
EXT_SUFFIX := $(shell $(firstword $(wildcard $(PY)) $(PYTHON)) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
EXTENSION := gpipe_fast/_C$(EXT_SUFFIX)
# Directories change when a file comes or goes, so a deleted source is noticed too.
SOURCES := setup.py csrc $(wildcard csrc/* csrc/*/*)
CXX_FILES = $(shell find csrc tests bench -name '*.cpp' -o -name '*.h' -o -name '*.cu')

.PHONY: help build import check test test-all lint format demo bench bench-ours soak smoke smoke-reference \
  smoke-between wheelhouse gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

build: $(EXTENSION)  ## create .venv, install pinned dependencies, build the extension (TORCH=2.11.0 to 2.14.1)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"Python 3.10 or later is needed, not {sys.version}")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): requirements.txt | $(PY)
	$(PY) -m pip install --quiet torch==$(TORCH) -r requirements.txt
	@# Without its dependencies, which name one patch release of torch.
	$(PY) -m pip install --quiet --no-deps 'torchvision==$(TORCHVISION)'
	@rm -f $(VENV)/.installed-torch-*
	@# The tree itself is what this environment imports, from any directory.
	@echo '$(CURDIR)' > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpipe_fast.pth"
	@touch $@

# One directory of object files for each environment and torch: they are built against different headers.
$(EXTENSION): $(INSTALLED) $(SOURCES)
	$(PY) setup.py --quiet build_ext --inplace --build-temp build/$(notdir $(VENV))-torch-$(TORCH)

import: build
	cd / && $(abspath $(PY)) -c 'import gpipe_fast, gpipe_fast.kernels; print(gpipe_fast.build_info())'

check: lint build  ## before every commit: lint, types, unit tests (under 3 minutes)
	$(PYTEST) tests/unit $(ARGS)

test: lint build import  ## install, lint, build, import, test (16 minutes on two cores); says what it left out
	$(PYTEST) $(ARGS)

test-all: test smoke-reference smoke-between  ## `make test`, then the rest, and other versions of torch
	$(PYTEST) --tier=rest $(ARGS)

lint: $(INSTALLED)  ## ruff, mypy --strict, directions of imports and includes, clang-format; changes nothing
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --strict gpipe_fast bench
	@$(VENV)/bin/lint-imports --no-cache >/dev/null || $(VENV)/bin/lint-imports --no-cache
	$(PY) .ci/check_includes.py
	@$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(INSTALLED)  ## rewrite the sources as lint wants them
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/clang-format -i $(CXX_FILES)

demo: build  ## train the demo; pass it ARGS="..."
	$(PY) -m examples.gpt $(ARGS)

bench: build  ## run the benchmarks; pass them ARGS="..."
	$(PY) -m bench $(ARGS)

bench-ours: build  ## headline steps of ours alone under pytest-benchmark; pass it ARGS="--benchmark-..."
	$(PY) -m pytest -q bench --benchmark-only $(ARGS)

soak: build  ## every test, the long ones too
	$(PYTEST) --tier=soak $(ARGS)

smoke: build
	$(PY) -m pytest -q -m smoke

smoke-reference:  ## build and smoke test with Python 3.12 and torch 2.11.0 in .venv-reference
	@for python in python$(REFERENCE_PYTHON) ~/.pyenv/versions/$(REFERENCE_PYTHON)*/bin/python$(REFERENCE_PYTHON); do \
	  if "$$python" -c 'import ensurepip' 2>/dev/null; then \
	    exec $(MAKE) smoke PYTHON="$$python" VENV=.venv-reference TORCH=$(REFERENCE_TORCH); \
	  fi; \
	done; \
	echo 'SKIPPED smoke-reference: no Python $(REFERENCE_PYTHON) that can make environments, on PATH or in ~/.pyenv/versions'; \
	[ "$${GPIPE_FAST_REQUIRE_REFERENCE:-0}" != 1 ]

# In a copy of the tree, since the file of an extension is named after the version of Python, not of torch.
smoke-between:  ## build and smoke test with torch 2.12 or 2.13, by turns (BETWEEN=2.13.0)
	@rm -rf build/between && mkdir -p build/between
	@git ls-files -z | xargs -0 cp --parents --no-dereference --target-directory=build/between
	@$(MAKE) -C build/between smoke TORCH=$(BETWEEN) VENV=$(CURDIR)/.venv-between

# What travels to the GPU machine with the tree; its platform names are pip's, each matched exactly.
wheelhouse:  ## download wheels of peers for a GPU machine without network into ./wheelhouse
	rm -rf wheelhouse
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest wheelhouse \
	  --python-version $(REFERENCE_PYTHON) --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  -r bench/wheelhouse.txt -c requirements.txt
	@bytes=$$(cat wheelhouse/*.whl | wc -c); echo "wheelhouse: $$(ls wheelhouse | wc -l) wheels, $$bytes bytes"; \
	if [ $$bytes -gt $(WHEELHOUSE_BYTES) ]; then \
	  echo 'wheelhouse: above $(WHEELHOUSE_BYTES) bytes, more than travels'; exit 1; \
	fi

# For a GPU machine whose PYTHON already has torch: needs no network, installs nothing into that PYTHON, and is
# done in ten minutes. What was built beforehand against the same torch is taken as it is. bench/on_gpu.py lists the
# phases and their files; ARGS="models plans" runs some.
gpu: export PYTHONPATH := $(CURDIR):$(CURDIR)/build/wheelhouse
gpu:  ## on a GPU machine: build, compare, measure and test with PYTHON in phases, write bench/results
	@mkdir -p bench/results
	@rm -rf build/wheelhouse
	@if compgen -G 'wheelhouse/*.whl' >/dev/null; then \
	  $(PYTHON) -m pip install --quiet --no-index --no-deps --target build/wheelhouse wheelhouse/*.whl \
	    || echo 'gpu: the wheelhouse could not be installed'; \
	fi
	@$(PYTHON) -m bench.on_gpu $(ARGS)

clean:  ## remove what was built; the environments stay
	rm -rf build dist wheelhouse *.egg-info gpipe_fast/_C*.so .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
