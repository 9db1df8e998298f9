"""A matrix product with a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.base import Gate, Ops, PackedWeight, QuantizedWeight


class Linear:
    """y = x W^T + b.

    Args:
        ops: table of operations.
        weight: packed [out_features, in_features]; for fused projections (q, k and v, or gate and
            up) the rows of all, stacked.
        bias: [out_features] in the model's dtype, or None.
    """

    __slots__ = ("bias", "linear", "linear_act_and_mul", "weight")

    def __init__(
        self, ops: Ops, weight: PackedWeight | QuantizedWeight, bias: Tensor | None = None
    ) -> None:
        self.linear = ops.linear
        self.linear_act_and_mul = ops.linear_act_and_mul
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """[T, in_features] -> [T, out_features], in `out_dtype` or else the model's dtype."""
        return self.linear(x, self.weight, self.bias, out_dtype)

    def act_and_mul(self, x: Tensor, activation: Gate) -> Tensor:
        """[T, in_features] -> [T, out_features / 2]: act(gate) * up of gate and up, stacked."""
        return self.linear_act_and_mul(x, self.weight, self.bias, activation)
