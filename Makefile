# Builds, checks and runs gpipe_fast in a virtual environment; `make help` lists the targets.

PYTHON ?= python3
TORCH ?= 2.14.1
# torchvision 0.26 belongs to torch 2.11, 0.27 to torch 2.12, and so on.
TORCHVISION = 0.$(shell expr 15 + $(word 2,$(subst ., ,$(TORCH)))).*
VENV ?= .venv
ARGS ?=

# The second environment: the Python and torch of the reference GPU machine.
REFERENCE_PYTHON ?= 3.12
REFERENCE_TORCH ?= 2.11.0
# A torch version between the reference and the newest; or 2.12.0.
INTERMEDIATE_TORCH ?= 2.13.0
# The releases for `make smoke-newest`; or, of the day, NEWEST='--upgrade transformers diffusers peft trl accelerate timm'.
NEWEST ?= -r requirements-newest.txt
INSTALL_NEWEST = $(PY) -m pip install --quiet --no-deps --target build/newest --upgrade $(NEWEST)
SMOKE_NEWEST := tests/models/test_library_census.py tests/models/test_training_loops.py \
  tests/models/test_quantized_models.py tests/unit/layers/test_quantized.py tests/unit/weights/test_quantize.py \
  tests/unit/weights/test_conversion.py $(wildcard tests/contracts/*/test_quantized*.py)
# The size limit of `make wheelhouse`: 64 MiB.
WHEELHOUSE_BYTES := 67108864

export MAX_JOBS ?= $(shell nproc)
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := build
# Prerequisites run in order, so that the summary of the tests is printed last; ninja and pytest run in parallel
# themselves.
.NOTPARALLEL:

PY := $(VENV)/bin/python
# One worker per core; idle OpenMP threads sleep instead of spinning, so that they do not slow down other workers.
PYTEST := OMP_WAIT_POLICY=passive $(PY) -m pytest -q -n $(MAX_JOBS) --dist loadgroup
INSTALLED_STAMP := $(VENV)/.installed-torch-$(TORCH)
# The file name contains the Python version, so environments of different Python versions can share the tree.
EXT_SUFFIX := $(shell $(firstword $(wildcard $(PY)) $(PYTHON)) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
EXTENSION := gpipe_fast/_C$(EXT_SUFFIX)
# Includes directories, whose modification time changes when a file is deleted.
SOURCES := setup.py csrc $(wildcard csrc/* csrc/*/*)
CXX_FILES = $(shell find csrc tests bench -name '*.cpp' -o -name '*.h' -o -name '*.cu')

.PHONY: help build import check test test-all lint format docs demo bench bench-all results soak smoke smoke-reference \
  smoke-between smoke-newest census-newest wheelhouse gpu-kernels gpu dist clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

build: $(EXTENSION)  ## create .venv, install pinned dependencies, build the extension (TORCH=2.11.0 to 2.14.1)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"gpipe_fast needs Python 3.10 or later, but PYTHON is {sys.version}")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED_STAMP): requirements.txt | $(PY)
	$(PY) -m pip install --quiet torch==$(TORCH) -r requirements.txt
	@# --no-deps, because torchvision requires one patch release of torch.
	$(PY) -m pip install --quiet --no-deps 'torchvision==$(TORCHVISION)'
	@rm -f $(VENV)/.installed-torch-*
	@# From any directory, this environment imports gpipe_fast from the tree, and nothing else: the root of the tree
	@# would hide packages of other libraries, such as Hugging Face's kernels.
	@mkdir -p $(VENV)/tree && ln -sfn '$(CURDIR)/gpipe_fast' $(VENV)/tree/gpipe_fast
	@echo '$(abspath $(VENV)/tree)' > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpipe_fast.pth"
	@printf '#!%s\nimport sys\nfrom gpipe_fast.command import main\nsys.exit(main())\n' '$(abspath $(PY))' > $(VENV)/bin/gpipe-fast
	@chmod +x $(VENV)/bin/gpipe-fast
	@touch $@

# One directory of object files per environment and torch version, because their headers differ.
OBJECTS := build/$(notdir $(VENV))-torch-$(TORCH)
$(EXTENSION): $(INSTALLED_STAMP) $(SOURCES)
	$(PY) setup.py --quiet build_ext --inplace --build-temp $(OBJECTS)
	@echo 'gpipe_fast is built: $(PY) imports it from any folder, and $(VENV)/bin/gpipe-fast is its command'

import: build
	cd / && $(abspath $(PY)) -c 'import gpipe_fast, gpipe_fast.kernels; print(gpipe_fast.build_info())'
	cd / && ! $(abspath $(PY)) -c 'import tools' 2>/dev/null
	$(VENV)/bin/gpipe-fast simulate --stages 2 --micro-batches 8 >/dev/null

check: lint build  ## before every commit: lint, types, unit tests but those in tests/slow.txt
	$(PYTEST) --tier=check tests/unit $(ARGS)

test: lint build import  ## install, lint, build, import, test but what tests/slow.txt lists
	$(PYTEST) $(ARGS)

test-all: test  ## in CI: `make test`, the slow tests, and smoke tests with newer libraries and the oldest torch
	$(PYTEST) --tier=slow
	$(MAKE) smoke-newest
	$(MAKE) smoke-reference

lint: $(INSTALLED_STAMP)  ## check ruff, mypy --strict, import and include directions, clang-format; change no file
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --strict gpipe_fast bench tools
	@$(VENV)/bin/lint-imports --no-cache >/dev/null || $(VENV)/bin/lint-imports --no-cache
	$(PY) .ci/check_includes.py
	@$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(INSTALLED_STAMP)  ## reformat the sources for `make lint`
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/clang-format -i $(CXX_FILES)

# NO_MKDOCS_2_WARNING suppresses a page about MkDocs 2.0. With --quiet, --strict would have no effect.
docs: $(INSTALLED_STAMP)  ## build the site of the documentation: open build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo 'docs: build/site/index.html'

demo: build  ## train a small GPT, 1 to 2 minutes on two idle cores after the build (ARGS=--full: the whole training; ARGS=--help)
	OMP_WAIT_POLICY=passive $(PY) -m examples.gpt $(ARGS)

# Durations are kept in .benchmarks; `pytest-benchmark compare` compares those of two commits.
BENCH := OMP_NUM_THREADS=1 $(PY) -m pytest -q -p no:cacheprovider bench --benchmark-autosave

bench: build  ## compare with other libraries, a sample in 3 to 10 minutes (ARGS="overhead step" writes these tables instead)
	@$(if $(ARGS),$(PY) -m bench $(ARGS),$(BENCH))

bench-all: build  ## run every comparison of `make bench` in full
	@$(BENCH) --all

results: build  ## write every table of bench/results that needs no GPU; needs a tree without changes
	@$(PY) -m bench.write_results

soak: build smoke-between  ## run every test, including the long ones, and smoke tests with torch 2.13
	$(PYTEST) --tier=soak $(ARGS)

smoke: build
	$(PYTEST) --tier=ci -m smoke

smoke-reference:  ## build and smoke test with Python 3.12 and torch 2.11.0 in .venv-reference
	@for python in python$(REFERENCE_PYTHON) ~/.pyenv/versions/$(REFERENCE_PYTHON)*/bin/python$(REFERENCE_PYTHON); do \
	  if "$$python" -c 'import ensurepip' 2>/dev/null; then \
	    exec $(MAKE) smoke PYTHON="$$python" VENV=.venv-reference TORCH=$(REFERENCE_TORCH); \
	  fi; \
	done; \
	echo 'SKIPPED smoke-reference: no Python $(REFERENCE_PYTHON) with ensurepip on PATH or in ~/.pyenv/versions'; \
	[ "$${GPIPE_FAST_REQUIRE_REFERENCE:-0}" != 1 ]

smoke-newest: build  ## models of newer transformers, timm and diffusers: native, and equal to the plain loop
	@set -e; if ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo 'SKIPPED smoke-newest: these releases need Python 3.11'; exit; \
	fi; \
	$(INSTALL_NEWEST); \
	$(PY) -m pip list --path build/newest; \
	PYTHONPATH=$(CURDIR)/build/newest $(PYTEST) --tier=ci $(SMOKE_NEWEST); \
	PYTHONPATH=$(CURDIR)/build/newest $(PYTEST) 'tests/examples/test_examples.py::test_an_example_equals_the_plain_model[qlora]'

census-newest: build  ## write the census of libraries for the releases of smoke-newest, in about 20 minutes
	$(INSTALL_NEWEST)
	PYTHONPATH=$(CURDIR)/build/newest $(PY) -m tools census

# Builds in a copy of the tree, because the extension's file name contains the Python version, but not torch's.
smoke-between:  ## build and smoke test with torch 2.12 or 2.13 (INTERMEDIATE_TORCH=2.13.0)
	@rm -rf build/between && mkdir -p build/between
	@git ls-files -z | xargs -0 cp --parents --no-dereference --target-directory=build/between
	@$(MAKE) -C build/between smoke TORCH=$(INTERMEDIATE_TORCH) VENV=$(CURDIR)/.venv-between

# The wheels go to the GPU machine together with the tree. pip matches each platform name exactly.
wheelhouse:  ## download peer libraries for a GPU machine without network into ./wheelhouse
	rm -rf wheelhouse
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest wheelhouse \
	  --python-version $(REFERENCE_PYTHON) --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  -r bench/wheelhouse.txt -c requirements.txt
	@bytes=$$(cat wheelhouse/*.whl | wc -c); echo "wheelhouse: $$(ls wheelhouse | wc -l) wheels, $$bytes bytes"; \
	if [ $$bytes -gt $(WHEELHOUSE_BYTES) ]; then \
	  echo 'wheelhouse: larger than the limit of $(WHEELHOUSE_BYTES) bytes'; exit 1; \
	fi

# The kernels go to the GPU machine together with the tree, whose Triton must be the one of VENV.
gpu-kernels: build  ## compile the kernels of the models of `make gpu` for an H100 or H200 into build/gpu/triton
	@$(PY) -m tools.on_gpu.precompile $(ARGS)

# For a GPU machine whose PYTHON already has torch: needs no network, installs nothing into that PYTHON, and takes
# ten minutes. An extension that was already built against the same torch is used. tools/on_gpu/phases.py lists
# the phases and their output files; ARGS=correct and ARGS=levers are the second and the third command.
gpu: export PYTHONPATH := $(CURDIR):$(CURDIR)/build/wheelhouse
gpu:  ## on a GPU machine: build, compare and measure with PYTHON in phases; write bench/results (ARGS=correct, ARGS=levers)
	@mkdir -p bench/results
	@rm -rf build/wheelhouse
	@if compgen -G 'wheelhouse/*.whl' >/dev/null; then \
	  $(PYTHON) -m pip install --quiet --no-index --no-deps --target build/wheelhouse wheelhouse/*.whl \
	    || echo 'gpu: could not install the wheelhouse'; \
	fi
	@$(PYTHON) -m tools.on_gpu $(ARGS)

dist: build  ## build the source distribution, and the wheel for this machine, Python and torch, in ./dist
	@rm -rf gpipe_fast.egg-info build/lib.*  # setuptools would add the files that an old one lists
	$(PY) setup.py --quiet sdist
	@# Two commands, because the second build's compiler options would differ within one.
	$(PY) setup.py --quiet build --build-temp $(OBJECTS)
	$(PY) setup.py --quiet bdist_wheel --skip-build
	@ls dist/gpipe_fast-*.tar.gz dist/gpipe_fast-*.whl

clean:  ## remove build outputs; keep the environments
	rm -rf build dist wheelhouse *.egg-info gpipe_fast/_C*.so .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
