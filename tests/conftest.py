"""Fixtures for all tests."""

from pathlib import Path

import pytest

from octavo.device import limit_spinning

limit_spinning()  # before any test imports torch

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real models and texts; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared test data are not on this machine")
    return SHARED_DATA
