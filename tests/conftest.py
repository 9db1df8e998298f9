"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest

# Before any test imports torch: threads that wait for the reference's operations sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real models and texts; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared test data are not on this machine")
    return SHARED_DATA
