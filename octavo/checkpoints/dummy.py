"""Random weights for a model folder without weight files."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from octavo.checkpoints.base import Expected, Source, Tensors
from octavo.checkpoints.folder import Folder
from octavo.system.tensor import HostTensor, empty, from_numpy, full, numpy_dtype

_BOUND = 0.02 * 3**0.5
"""Bound of uniform numbers with standard deviation 0.02, as in the initialisation of models."""


class Dummy(Folder):
    """`Checkpoint` with random weights.

    Args:
        path: the folder of the config and the tokenizer.
        seed: seed of the weights.
    """

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path, "dummy")
        self._seed = seed

    @property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        return []

    def open(self, expected: Expected) -> DummyTensors:
        """Implement `Checkpoint`."""
        return DummyTensors(self._seed)


class DummyTensors(Tensors):
    """Random tensors, which depend on the seed and the tensor's name, so tied tensors are equal."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def read(self, source: Source) -> HostTensor:
        """Return the source's `dummy` value, or uniform numbers with standard deviation 0.02.

        An optional tensor is absent. Other types than floats receive the bits of the numbers.
        """
        if source.optional:
            return empty(0, dtype=source.dtypes[0])
        name, shape = source.name, source.shape
        if source.index is not None:
            name, shape = f"{name}.{source.index}", shape[1:]
        if source.dummy is not None:
            return full(shape, source.dummy, "float32")
        seed = zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF)
        numbers = np.random.Generator(np.random.PCG64(seed)).random(shape, np.float32)
        numbers -= np.float32(0.5)
        numbers *= np.float32(2 * _BOUND)
        if source.dtypes[0].startswith("float8"):
            rounded: HostTensor = from_numpy(numbers.astype(numpy_dtype(source.dtypes[0])))
            return rounded
        tensor: HostTensor = from_numpy(numbers)
        return tensor if "float32" in source.dtypes else tensor.view(source.dtypes[0])
