"""Projection of a table, as a weight of heads: a product that is computed once, while loading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.quantization.base import IntArray, PackedShape, Part, select_rows
from octavo.quantization.dequantized import Dequantized, StoredOtherwise
from octavo.quantization.plain import Plain, floats

if TYPE_CHECKING:
    from octavo.kernels.base import Ops
    from octavo.kernels.weights import PackedWeight
    from octavo.system.tensor import HostTensor, Tensor


@dataclass(frozen=True)
class Sinusoids:
    """Table of sines and cosines of distances from -`longest` to `longest` - 1.

    The wavelengths grow from 2 pi to 20,000 pi (arXiv:1706.03762, section 3.5). The sines
    precede the cosines.
    """

    longest: int
    size: int
    """Numbers of a row; even, and at least 4."""
    factor: float
    """Factor of all numbers."""

    def compute(self) -> HostTensor:
        """Return the table: float32 [2 * longest, size]."""
        from octavo.system.tensor import from_numpy

        half = self.size // 2
        step = np.float32(-math.log(10_000.0) / (half - 1))
        rates = np.exp(step * np.arange(half, dtype=np.float32))
        angles = np.arange(-self.longest, self.longest, dtype=np.float32)[:, None] * rates
        table = np.concatenate([np.sin(angles), np.cos(angles)], 1)
        return from_numpy((table * np.float32(self.factor)).astype(np.float32))


@dataclass(frozen=True)
class ProjectedTable(StoredOtherwise):
    """Plain weight [H * R, D]: for each head, the R rows of a table times the head's projection.

    The tensors of a module are those of the projection [H * D, K], its bias if it has one, the
    table [R, K] if the checkpoint has it, and weight and bias of the table's layer norm if there is
    one. The product is computed in float32 and rounded once.
    """

    stored: Plain | Dequantized
    head_size: int
    bias: bool
    eps: float | None
    """Term of the table's norm; None: it has none."""
    table: Sinusoids | None = None
    """Table that is computed; None: it is the checkpoint's."""

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        norm = "" if self.eps is None else f" normed with {self.eps}"
        bias = " with bias" if self.bias else ""
        table = "table" if self.table is None else str(self.table)
        return f"{table}{norm} projected{bias} to heads of {self.head_size}, {self.stored.name}"

    @property
    def max_inputs(self) -> int | None:
        """Implement `WeightForm`: the inputs are those of a head."""
        return None

    @property
    def num_tensors(self) -> int:
        """Implement `WeightForm`."""
        return self.stored.num_tensors + self._others

    @property
    def _others(self) -> int:
        """Number of tensors besides those of the projection's weight; they are the last ones."""
        return self.bias + (self.table is None) + (0 if self.eps is None else 2)

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`; each part has the whole table."""
        count = self.stored.num_tensors
        parts = self.stored.cut(tensors[:count], rows, columns)
        if self.bias:
            biases = select_rows(tensors[count], rows)
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        return [(*part, *tensors[count + self.bias :]) for part in parts]

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> PackedWeight:
        """Implement `WeightForm`."""
        from octavo.kernels.native import NativeOps
        from octavo.system.tensor import dense, from_numpy

        native = NativeOps()
        # The stored weight's part may have another number of tensors than the checkpoint.
        first = len(parts[0]) - self._others
        tensors = [dense(x, "float32") for x in parts[0][first + self.bias :]]
        if self.table is not None:
            tensors.insert(0, self.table.compute())
        rows, inputs = tensors[0].shape
        x: Tensor = tensors[0]
        if self.eps is not None:
            x = native.layer_norm(x, tensors[1], tensors[2], self.eps)
        outputs = shape.n // rows * self.head_size
        projections = [part[:first] for part in parts]
        if isinstance(self.stored, Plain):
            weights = floats(projections, "float32")
        else:
            whole = PackedShape(outputs, inputs, "float32")
            weights = [self.stored.numbers(projections, whole)]
        bias = None
        if self.bias:
            biases = [dense(part[first], "float32").numpy() for part in parts]
            bias = from_numpy(np.concatenate(biases))
        product = native.linear(x, native.pack_weight(weights, "float32"), bias)
        heads = native.to_host(product).reshape(rows, -1, self.head_size).swapaxes(0, 1)
        return ops.pack_weight(
            [dense(from_numpy(heads.reshape(shape.n, shape.k)))], shape.dtype, out
        )
