"""The sampler on the CPU's operations."""

import pytest
import torch

from octavo.kernels.base import Ops
from octavo.kernels.ops import get_ops
from octavo.sampling.sampler import Sampler


@pytest.fixture(scope="session")
def ops() -> Ops:
    return get_ops(torch.device("cpu"))


@pytest.fixture(scope="session")
def sampler(ops: Ops) -> Sampler:
    return Sampler(ops)
