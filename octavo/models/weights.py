"""Weights of a model: names, shapes in memory, and their sources in a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from octavo.checkpoints.base import Source
from octavo.quantization.base import PackedShape, WeightForm
from octavo.quantization.plain import PLAIN
from octavo.system.dtypes import DTYPE_NBYTES


@dataclass(frozen=True)
class ExpertOf:
    """Expert that a weight belongs to."""

    block: str
    """Prefix of the names of the block's weights, e.g. layers.0.mlp."""
    index: int
    """Number of the expert in its block."""
    count: int
    """Number of the block's experts, of all ranks."""
    active: int
    """Number of the block's experts that a token uses."""


@dataclass(frozen=True)
class Weight:
    """One tensor of the loaded model."""

    name: str
    """Name in the loaded model, e.g. layers.0.qkv_proj.weight."""
    kind: Literal["linear", "embedding", "vector"]
    """Kind. linear: packed for the matrix product; the others are plain tensors."""
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    """Tensors of the checkpoint, stacked along the first dimension."""
    whole: int | None = None
    """Number of rows of the whole weight, if this is a rank's part; else None."""
    form: WeightForm = PLAIN
    """Form of a linear weight; the others are plain."""
    dtype: str | None = None
    """Type in memory of a weight that is not linear; None: the model's."""

    expert: ExpertOf | None = None
    """Expert that the weight belongs to; None: no expert. An expert's weights are successive."""

    @property
    def whole_rows(self) -> int:
        """Number of rows of the whole weight."""
        return self.shape[0] if self.whole is None else self.whole

    def nbytes(self, dtype: str) -> int:
        """Return the bytes in memory, for a model in `dtype`."""
        if self.kind == "linear":
            return self.form.nbytes(self.packed(dtype))
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype or dtype]

    def packed(self, dtype: str) -> PackedShape:
        """Return the shape of a linear weight in memory, for a model in `dtype`."""
        n, k = self.shape
        return PackedShape(n, k, dtype, self.whole_rows)


@dataclass(frozen=True)
class Names:
    """Prefixes of the names of a block's weights."""

    own: str = ""
    """Prefix in the loaded model, e.g. layers.0.qkv_proj."""
    checkpoint: str = ""
    """Prefix in the checkpoint, e.g. model.layers.0."""

    def of(self, part: str) -> Names:
        """Return the prefixes of a part of the block; specs add its name in the checkpoint."""
        return Names(f"{self.own}{part}.", self.checkpoint)
