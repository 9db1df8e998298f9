"""Sampler on the CPU's operations."""

import pytest

from octavo.kernels.base import Ops
from octavo.kernels.native import NativeOps
from octavo.sampling.sampler import Sampler


@pytest.fixture(scope="session")
def ops() -> Ops:
    return NativeOps()


@pytest.fixture(scope="session")
def sampler(ops: Ops) -> Sampler:
    return Sampler(ops)
