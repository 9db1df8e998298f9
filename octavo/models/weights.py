"""Weights of a model: names, shapes in memory, and their sources in a checkpoint. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.checkpoints.base import Source
from octavo.quantization.base import PackedShape, WeightForm
from octavo.quantization.plain import PLAIN


@dataclass(frozen=True)
class Weight:
    """One tensor of the loaded model."""

    name: str
    """The model's own name, e.g. layers.0.qkv_proj.weight."""
    kind: Literal["linear", "embedding", "vector"]
    """linear: packed for the matrix product; the others are plain tensors."""
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    """To be stacked along the first dimension."""
    whole: int | None = None
    """Rows of the weight that this is a rank's part of; None: it is no part."""
    form: WeightForm = PLAIN
    """Form of a linear weight; the others are plain."""

    @property
    def whole_rows(self) -> int:
        """Rows of the weight, or of the one that it is a part of."""
        return self.shape[0] if self.whole is None else self.whole

    def packed(self, dtype: str) -> PackedShape:
        """Return the shape of a linear weight in memory, for a model in `dtype`."""
        n, k = self.shape
        return PackedShape(n, k, dtype, self.whole_rows)


@dataclass(frozen=True)
class Names:
    """Where a block stands in a model: how the names of its weights begin."""

    own: str = ""
    """In the loaded model, e.g. layers.0.qkv_proj."""
    checkpoint: str = ""
    """In the checkpoint, e.g. model.layers.0."""

    def of(self, part: str) -> Names:
        """Of a part of the block; checkpoints have names of their own for these."""
        return Names(f"{self.own}{part}.", self.checkpoint)
