"""Random weights for a model folder that needs no files of weights."""

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
"""Of uniform numbers with standard deviation 0.02, as models are initialised."""


class Dummy(Folder):
    """A `Checkpoint` with random weights.

    Args:
        path: the folder of the config and the tokenizer.
        seed: seed of the weights.
    """

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path, "dummy")
        self._seed = seed

    @property
    def weight_files(self) -> list[Path]:
        """See `Checkpoint`."""
        return []

    def open(self, expected: Expected, device: torch.device) -> DummyTensors:
        """See `Checkpoint`."""
        return DummyTensors(self._seed, device)


class DummyTensors(Tensors):
    """Random tensors, made from the seed and a tensor's name, so that ties stay tied."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device

    def read(self, source: Source) -> Tensor:
        """See `Tensors`: the source's own value, or uniform numbers with deviation 0.02."""
        import torch

        if source.dummy is not None:
            return torch.full(source.shape, source.dummy)
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(source.name.encode(), self._seed & 0xFFFFFFFF))
        tensor = torch.empty(source.shape, device=self._device)
        return tensor.uniform_(-_BOUND, _BOUND, generator=generator)
