"""Light convolution of a conformer's layer (Gemma 4's sounds)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.conv import Conv
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(frozen=True, slots=True)
class WholeItems:
    """`StateSlots` of items without a state before or after them."""

    query_start_loc: Tensor
    sources: Tensor
    slots: Tensor
    snapshots: Tensor


@dataclass(slots=True)
class LightConv:
    """Live `LightConvSpec`."""

    ops: Ops
    in_proj: Linear
    """Projection to a and b, stacked."""
    conv: Conv
    norm: RMSNorm
    out_proj: Linear
    no_state: Tensor
    """Memory that the convolution neither reads nor writes: float32 [1, state]."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]."""
        both = self.in_proj(x)
        half = both.shape[1] // 2
        inner = self.ops.multiply(both[:, :half], both[:, half:], "sigmoid")
        none = step.arrays["no_slots"]
        items = WholeItems(step.metadata[0].query_start_loc, step.arrays["no_source"], none, none)
        self.conv.apply_(inner, self.no_state, items)
        inner = self.norm(inner)
        return self.out_proj(self.ops.silu(inner, inner))
