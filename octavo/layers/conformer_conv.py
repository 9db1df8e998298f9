"""Convolution of a conformer's layer (Phi-4's sounds)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.conv import Conv
from octavo.layers.light_conv import WholeItems
from octavo.layers.linear import Linear
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class ConformerConv:
    """Live `ConformerConvSpec`."""

    ops: Ops
    in_proj: Linear
    """Projection to a and b, stacked."""
    vectors: Tensor
    """Vectors c and d, one after the other: [2 * size]."""
    conv: Conv
    mix: Linear
    out_proj: Linear
    no_state: Tensor
    """Memory that the convolution neither reads nor writes: float32 [1, state]."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]."""
        both = self.ops.add(self.in_proj(x), self.vectors)
        half = both.shape[1] // 2
        inner = self.ops.multiply(both[:, :half], both[:, half:], "silu")
        none = step.arrays["no_slots"]
        items = WholeItems(step.metadata[0].query_start_loc, step.arrays["no_source"], none, none)
        self.conv.apply_(inner, self.no_state, items)
        return self.out_proj(self.mix.act(inner, "silu"))
