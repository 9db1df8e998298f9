"""A matrix product with a packed weight."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels.base import Ops, PackedWeight, QuantizedWeight


class Linear:
    """y = x W^T + b.

    Args:
        ops: table of operations.
        weight: packed [out_features, in_features]; for fused projections (q, k and v, or gate and
            up) the rows of all, stacked.
        bias: [out_features] in the model's dtype, or None.
    """

    __slots__ = ("bias", "linear", "weight")

    def __init__(
        self, ops: Ops, weight: PackedWeight | QuantizedWeight, bias: Tensor | None = None
    ) -> None:
        self.linear = ops.linear
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features], in the model's dtype."""
        return self.linear(x, self.weight, self.bias)
