# Everything runs in an environment of its own, .venv, made from constraints.txt. It needs Python >= 3.10 (with venv) and,
# for make itself, nothing else that a bare machine with a C compiler lacks. A second call installs nothing.
#
#   make test PYTHON=python3.12        another interpreter (then also VENV=.venv-3.12)
#   make test PYTEST_ARGS="-k wire"    a part of the tests
#   make demo DEMO_ARGS="--help"       arguments for the demo
#   make test TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
#                                      torch without CUDA, several gigabytes less (x86 Linux)

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
TORCH_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Exactly the tested one, installed first: a bare `torch` takes the newest there is.
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help test check pytest demo bench-kernels clean

help:
	@echo "make test           install, then ruff, mypy, import-linter and pytest: what CI runs"
	@echo "make check          the same without pytest"
	@echo "make pytest         the tests alone"
	@echo "make demo           train with and without compression; results in demo-output/"
	@echo "make bench-kernels  time the kernels of each backend that this machine has"
	@echo "make clean          remove $(VENV), caches and build products"
	@echo "Variables: PYTHON, VENV, PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS, TORCH_ARGS (see the head of Makefile)"

test: check pytest

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

pytest: $(VENV)/.stamp-dev
	$(BIN)/pytest $(PYTEST_ARGS)

demo: $(VENV)/.stamp-demo
	$(BIN)/gradcomp demo --out demo-output $(DEMO_ARGS)

bench-kernels: $(VENV)/.stamp-demo
	$(BIN)/python benchmarks/kernels.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find gradcomp kernels integrations benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "gradcomp needs Python 3.10 or newer: $(PYTHON) is older, or absent; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: python3-venv), or set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-torch: $(VENV)/.stamp-venv constraints.txt
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) $(TORCH_ARGS) -c constraints.txt "$(TORCH)" "setuptools>=77"
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch pyproject.toml
	@echo "installing gradcomp[dev] into $(VENV)"
	@DS_BUILD_OPS=0 $(PIP) -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-torch pyproject.toml
	@echo "installing gradcomp[cpu,cli,bench] into $(VENV)"
	@$(PIP) -c constraints.txt --no-build-isolation -e ".[cpu,cli,bench]"
	@touch $@
