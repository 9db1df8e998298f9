"""A matrix product with a packed weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.base import Gate, Ops, PackedWeight, QuantizedWeight


@dataclass(slots=True)
class Linear:
    """y = x W^T + b."""

    ops: Ops
    weight: PackedWeight | QuantizedWeight
    """[out_features, in_features]; for fused projections (q, k and v, or gate and up) the rows of
    all, stacked."""
    bias: Tensor | None = None
    """[out_features] in the model's dtype."""

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """[T, in_features] -> [T, out_features], in `out_dtype` or else the model's dtype."""
        return self.ops.linear(x, self.weight, self.bias, out_dtype)

    def act_and_mul(self, x: Tensor, activation: Gate) -> Tensor:
        """[T, in_features] -> [T, out_features / 2]: act(gate) * up of gate and up, stacked."""
        return self.ops.linear_act_and_mul(x, self.weight, self.bias, activation)
