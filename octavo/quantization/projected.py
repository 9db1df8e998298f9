"""Projection of a table, as a weight of heads: a product that is computed once, while loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.quantization.base import IntArray, PackedShape, Part, select_rows
from octavo.quantization.dequantized import Dequantized, StoredOtherwise
from octavo.quantization.plain import Plain, floats

if TYPE_CHECKING:
    from octavo.kernels.base import Ops, PackedWeight
    from octavo.system.tensor import HostTensor, Tensor


@dataclass(frozen=True)
class ProjectedTable(StoredOtherwise):
    """Plain weight [H * R, D]: for each head, the R rows of a table times the head's projection.

    The tensors of a module are those of the projection [H * D, K], its bias if it has one, the
    table [R, K], and weight and bias of the table's layer norm if there is one. The product is
    computed in float32 and rounded once.
    """

    stored: Plain | Dequantized
    head_size: int
    bias: bool
    eps: float | None
    """Term of the table's norm; None: it has none."""

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        norm = "" if self.eps is None else f" normed with {self.eps}"
        bias = " with bias" if self.bias else ""
        return f"table{norm} projected{bias} to heads of {self.head_size}, {self.stored.name}"

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
        return self.bias + (1 if self.eps is None else 3)

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

        native, others = NativeOps(), self._others
        tensors = [dense(x, "float32") for x in parts[0][self.bias - others :]]
        rows, inputs = tensors[0].shape
        x: Tensor = tensors[0]
        if self.eps is not None:
            x = native.layer_norm(x, tensors[1], tensors[2], self.eps)
        outputs = shape.n // rows * self.head_size
        projections = [part[:-others] for part in parts]
        if isinstance(self.stored, Plain):
            weights = floats(projections, "float32")
        else:
            whole = PackedShape(outputs, inputs, "float32")
            weights = [self.stored.numbers(projections, whole)]
        bias = None
        if self.bias:
            biases = [dense(part[-others], "float32").numpy() for part in parts]
            bias = from_numpy(np.concatenate(biases))
        product = native.linear(x, native.pack_weight(weights, "float32"), bias)
        heads = native.to_host(product).reshape(rows, -1, self.head_size).swapaxes(0, 1)
        return ops.pack_weight(
            [dense(from_numpy(heads.reshape(shape.n, shape.k)))], shape.dtype, out
        )
