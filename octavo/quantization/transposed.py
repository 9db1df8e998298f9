"""Weights of which each head's rows are transposed, as numbers in the model's type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.base import PackedShape, Part
from octavo.quantization.dequantized import Dequantized, StoredOtherwise
from octavo.quantization.plain import Plain, floats

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import PackedWeight
    from octavo.system.tensor import HostTensor


@dataclass(frozen=True)
class TransposedHeads(StoredOtherwise):
    """Plain weight [H * K, N] of a stored one [H * N, K]: the transposed rows of each head."""

    stored: Plain | Dequantized
    num_heads: int

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return f"{self.num_heads} transposed heads, {self.stored.name}"

    @property
    def max_inputs(self) -> int | None:
        """Implement `WeightForm`: the stored inputs are outputs, whose number has no limit."""
        return None

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> PackedWeight:
        """Implement `WeightForm`."""
        from octavo.system.tensor import dense, from_numpy

        heads, inputs = self.num_heads, shape.n // self.num_heads
        if isinstance(self.stored, Plain):
            arrays = [tensor.numpy() for tensor in floats(parts, shape.dtype)]
            stored: NDArray[Any] = np.concatenate(arrays)
        else:
            whole = PackedShape(heads * shape.k, inputs, shape.dtype)
            stored = self.stored.numbers(parts, whole).numpy()
        turned = stored.reshape(heads, shape.k, inputs).swapaxes(1, 2).reshape(shape.n, shape.k)
        return ops.pack_weight([dense(from_numpy(turned))], shape.dtype, out)
