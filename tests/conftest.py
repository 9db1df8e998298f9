"""Fixtures for all tests."""

import atexit
import functools
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from tests.triton import prepare_interpreter

# Before any test imports torch: threads that wait for the reference's operations sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before any test imports Triton: its kernels run in the interpreter.
os.environ["TRITON_INTERPRET"] = "1"
prepare_interpreter()

# Weights that engines keep for their next start, including the processes of tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="octavo-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# A background job, or one under nohup, ignores signals, and its children inherit that: tests send
# signals to their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The imports of all tests create permanent objects only.
gc.disable()

SEED = int(os.environ.get("OCTAVO_TEST_SEED", "0"))
"""Seed of all random numbers of tests."""

# A busy machine makes no example wrong, and all runs of a test have the same examples.
hypothesis.settings.register_profile(
    "octavo",
    deadline=None,
    database=None,
    derandomize=SEED == 0,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("octavo")
hypothesis.core.global_force_seed = SEED


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_search() -> Iterator[None]:
    """Keep the objects of imported modules out of collections of garbage.

    Each engine starts with a collection, which would take half a second next to transformers. The
    objects that a module leaves are collected while its filters of warnings apply.
    """
    gc.freeze()
    yield
    gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the last long file first: at the end, all processes of pytest have work."""
    items.sort(key=lambda item: item.path.name != "test_without_torch.py")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the random numbers of a test and its fixtures, whatever has run before."""
    random.seed(f"{SEED} {item.nodeid}")  # libraries draw ports, also in other processes of pytest
    np.random.seed(SEED % 2**32)
    if torch := sys.modules.get("torch"):  # some environments have none
        torch.manual_seed(SEED)


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture
def isa() -> Iterator[str]:
    """Run a test on each instruction set of this processor, down to portable code.

    The test is one item, which loops: tests for each would be many thousands. A parameter `isa`
    receives the name; an error has a note with it.
    """
    from octavo.kernels import native

    before = native.isa()
    yield before
    native.set_isa(before)


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and "isa" in item.fixturenames:
        callspec = getattr(item, "callspec", None)
        if callspec is None or "isa" not in callspec.params:
            item.obj = _on_each_isa(item.obj)


def _on_each_isa(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**given: object) -> None:
        from octavo.kernels import native

        for name in native.available_isas():
            native.set_isa(name)
            try:
                test(**given | ({"isa": name} if "isa" in given else {}))
            except BaseException as error:
                error.add_note(f"instruction set: {name}")
                raise

    return run


SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real models and texts; skip tests that need it if it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared test data are not on this machine")
    return SHARED_DATA
