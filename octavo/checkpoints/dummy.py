"""Random weights for a model folder without weight files."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Expected, Source, Tensors
from octavo.checkpoints.folder import Folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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

    def open(self, expected: Expected, device: torch.device) -> DummyTensors:
        """Implement `Checkpoint`."""
        return DummyTensors(self._seed, device)


class DummyTensors(Tensors):
    """Random tensors, which depend on the seed and the tensor's name, so tied tensors are equal."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device

    def read(self, source: Source) -> Tensor:
        """Return the source's `dummy` value, or uniform numbers with standard deviation 0.02."""
        import torch

        if source.dummy is not None:
            return torch.full(source.shape, source.dummy)
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(source.name.encode(), self._seed & 0xFFFFFFFF))
        tensor = torch.empty(source.shape, device=self._device)
        return tensor.uniform_(-_BOUND, _BOUND, generator=generator)
