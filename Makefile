# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# --no-compile: pip would compile 15,000 files, of which we import 2,400; one process compiles those (COMPILED).
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
HASHED := $(PIP) --no-deps --require-hashes
COMPILED := torch.distributed.fsdp, torch.distributed.pipelining, torch._inductor, scipy.optimize, pandas, networkx

.PHONY: help venv demo test docs wheel types tests tests-with-ranks test-long test-cuda check bench clean

help:
	@echo "make demo   set up .venv, tune real collectives on this machine, say where the report is"
	@echo "make test   set up .venv, run every check (all of CI)"
	@echo "make test-long  the long sweeps, statistics and tables, of which make test runs small cases"
	@echo "make test-cuda  a second environment with PyTorch's CUDA build (some GB, once): jobs on emulated GPUs, no GPU needed"
	@echo "make check  the same without the slow tests"
	@echo "make docs   the documentation as a site, in build/site; an environment of its own, once"
	@echo "make wheel  the wheel with the platform tag that its symbols allow, in dist"
	@echo "make bench  the benchmarks, figures to stdout"

venv: $(STAMP)

BUILT_FROM := pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/*/* emulate/pyproject.toml emulate/CMakeLists.txt emulate/csrc/*)

$(STAMP): $(BUILT_FROM) $(wildcard constraints*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lagom-overlap needs Python 3.11 or newer; set PYTHON=..."; exit 2; }
	@echo "Setting up $(VENV): a few minutes once; up to 6 GB where pip brings PyTorch with CUDA, 2 GB with its CPU build"
	$(PYTHON) -m venv $(VENV)
	$(HASHED) --requirement constraints.txt
	@$(HASHED) --requirement constraints-torch-cpu.txt || { \
		echo "the CPU build that is pinned for this Python and machine was not installed (pip's reason above): pip's own torch, with CUDA on Linux"; \
		$(HASHED) --requirement constraints-torch.txt; }
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --editable '.[torch,plan,models,dev]' --editable ./emulate
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -c 'import $(COMPILED)'
	@touch $@

demo: venv
	$(BIN)/lagom tune examples/gpt_fsdp_gloo.toml

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -m "not slow and not long"

DOCS_VENV := .venv-docs

# Types take one core, the tests with ranks wait for each other's processes, the other tests fill the cores meanwhile.
# Together they are also more processes than others on the machine, and so get more of it than one after another.
test:
	$(MAKE) --no-print-directory --jobs 2 venv $(DOCS_VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory --jobs 3 types tests-with-ranks tests docs

# Strict: a link to what is not there, an anchor that no page has, a page that no menu shows end the build.
$(DOCS_VENV)/.installed: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes --requirement $<
	@touch $@

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/mkdocs build --strict
	@echo "the documentation: $(CURDIR)/build/site/index.html; its search needs a server: python3 -m http.server -b 127.0.0.1 -d build/site"

# The tag is what auditwheel finds the symbols to allow: the glibc of this machine or an older one. For older systems, build
# in an image of theirs (manylinux).
WHEEL_VENV := .venv-wheel

$(WHEEL_VENV)/.installed: constraints-wheel.txt
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes --requirement $<
	@touch $@

wheel: venv $(WHEEL_VENV)/.installed
	rm -rf build/untagged
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --wheel --no-isolation --outdir build/untagged
	PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" $(WHEEL_VENV)/bin/auditwheel repair --wheel-dir dist build/untagged/*.whl
	$(WHEEL_VENV)/bin/auditwheel show dist/*.whl

types: venv
	$(BIN)/mypy
	$(BIN)/lint-imports

# Kept bytecode: hundreds of processes that the tests start import the package, each compiling it anew without.
tests tests-with-ranks test-long: export PYTHONDONTWRITEBYTECODE =

tests: venv
	$(BIN)/pytest -n 2 -m "not gloo and not long"

tests-with-ranks: venv
	$(BIN)/pytest -n 3 --dist loadgroup -m "gloo and not long"

# What make test has a small case of: sweeps, statistics, whole published tables.
test-long: venv
	$(BIN)/pytest -n 2 --dist loadgroup -m long

# PyTorch from the package index is the CUDA build on Linux. Nothing here is pinned: any release of the range will do.
CUDA_VENV := .venv-cuda
CUDA_TORCH := torch>=2.13,<2.16

$(CUDA_VENV)/.installed: $(BUILT_FROM)
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check scikit-build-core cmake ninja '$(CUDA_TORCH)'
	PATH="$(CURDIR)/$(CUDA_VENV)/bin:$$PATH" $(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation --editable '.[dev]' --editable ./emulate
	@touch $@

test-cuda: $(CUDA_VENV)/.installed
	LAGOM_CUDA_PYTHON=$(CURDIR)/$(CUDA_VENV)/bin/python $(CUDA_VENV)/bin/pytest -m cuda_torch tests/emulation tests/emulated_gpu

bench: venv
	$(BIN)/python benchmarks/simulation_speed.py
	$(BIN)/python benchmarks/search_quality.py --groups 40 --seed 1 --noise 0,0.02 --num-comms 1,2,4
	$(BIN)/python benchmarks/paired_tuners.py examples/overlaps/gloo_fsdp.toml

clean:
	rm -rf $(VENV) $(CUDA_VENV) $(DOCS_VENV) $(WHEEL_VENV) dist build emulate/build .mypy_cache .ruff_cache .import_linter_cache
