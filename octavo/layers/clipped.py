"""Matrix products whose inputs and results are clamped."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Activation, activate
from octavo.kernels.routing import Gate
from octavo.kernels.weights import PackedWeight, QuantizedWeight
from octavo.layers.linear import Linear
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class ClippedLinear(Linear):
    """Live `ClippedLinearSpec`."""

    weights: tuple[PackedWeight | QuantizedWeight, ...] = ()
    """Weight [out_features_i, in_features] of each module, from the first output on."""
    bounds: tuple[Tensor, ...] = ()
    """float32 [4] of each module: least and largest input, least and largest result."""

    def act_and_mul(self, x: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor:
        """Map [T, in_features] to [T, out_features / 2]; see `Linear`."""
        return self.ops.act_and_mul(self._multiply(x, None), activation, out)

    def act(self, x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        """Map [T, in_features] to act(result) [T, out_features]; see `Linear`."""
        return activate(self.ops, self(x), activation, out)

    def _multiply(self, x: Tensor, out_dtype: str | None, out: Tensor | None = None) -> Tensor:
        """Return the products with all weights: out [T, out_features]."""
        assert out_dtype in (None, x.dtype)
        if out is None:
            out = self.ops.empty(x.shape[0], sum(weight.n for weight in self.weights), like=x)
        begin = 0
        for weight, bounds in zip(self.weights, self.bounds, strict=True):
            part = out[:, begin : begin + weight.n]
            self.ops.linear(self.ops.clip(x, bounds[:2]), weight, None, None, part)
            self.ops.clip(part, bounds[2:], part)
            begin += weight.n
        return out
