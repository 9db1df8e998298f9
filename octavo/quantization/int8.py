"""int8: one scale for each output, symmetric; 8-bit activations, one scale for each token.

For encoders: with a scale for each group of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from octavo.quantization.base import PackedShape, Part
from octavo.quantization.packed import Packed
from octavo.quantization.plain import FromFloats
from octavo.quantization.quantized import FromFloatsQuantized

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import Codes, QuantizedWeight
    from octavo.system.tensor import HostTensor

GROUP_SIZE = 64
_ROWS = 256  # rows quantized at a time, so that temporaries stay small
_TINY = 1e-35  # smaller scales count as zero


@dataclass(frozen=True)
class Int8(FromFloatsQuantized):
    """Weights of 8 bits: the largest magnitude of each output becomes 127."""

    name: ClassVar[str] = "int8"

    def format(self, n: int, k: int) -> tuple[Literal["int8"], int]:
        """Return int8, without groups."""
        return "int8", 0


@dataclass(frozen=True)
class GroupedInt8(Packed, FromFloats):
    """Weights of 8 bits with a scale for each output and 64 inputs; activations alike.

    For encoders: a few of their activations are many times as large as the others, and one scale
    for a whole token would round the others coarsely (docs/performance.md#encoders).
    """

    name: ClassVar[str] = "int8_groups"
    max_inputs: ClassVar[int | None] = None

    def kernel_format(self, shape: PackedShape) -> tuple[Literal["int8_groups"], int]:
        """Implement `Packed`."""
        return "int8_groups", GROUP_SIZE

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> QuantizedWeight:
        """Implement `WeightForm`."""
        codes = (
            _quantize(ops, tensor[begin : begin + _ROWS])
            for (tensor,) in parts
            for begin in range(0, tensor.shape[0], _ROWS)
        )
        return ops.pack_quantized(shape.n, shape.k, *self.kernel_format(shape), codes, out)


def _quantize(ops: Ops, weight: HostTensor) -> Codes:
    """Return the codes of rows [N, K], in which the largest magnitude of each group becomes 127."""
    from octavo.kernels.weights import Codes
    from octavo.system.tensor import dense, from_numpy

    rows = dense(weight, "float32").numpy()
    n, k = rows.shape
    padded = np.zeros((n, -(-k // GROUP_SIZE), GROUP_SIZE), np.float32)
    padded.reshape(n, -1)[:, :k] = rows
    scales = np.abs(padded).max(2) / np.float32(127)
    units = np.where(scales < _TINY, np.float32(np.inf), scales)
    with np.errstate(invalid="ignore"):  # a scale that is NaN keeps its group NaN
        codes = (np.rint(padded / units[:, :, None]) + 128).astype(np.uint8)
    codes = np.ascontiguousarray(codes.reshape(n, -1)[:, :k])
    zeros = np.full(scales.shape, 128, np.uint8)
    return Codes(*(ops.to_device(from_numpy(array)) for array in (codes, scales, zeros)))
