"""Gated short convolution (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.conv import Conv
from octavo.layers.linear import Linear
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class ShortConv:
    """Block out(c * conv(b * x)) with b, c and x of one projection."""

    ops: Ops
    cache: int
    """Index of the layer's states in `StepContext.caches`."""
    in_proj: Linear
    """Projection to b, c and x, stacked."""
    conv: Conv
    out_proj: Linear
    """Projection to the hidden size."""
    columns: Columns | None = None
    """Columns of these channels among those of all ranks."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]; store the states of this step."""
        (state,), slots = step.caches[self.cache], step.metadata[self.cache]
        b, c, inner = self.in_proj(x).view(x.shape[0], 3, -1).unbind(1)
        self.ops.multiply(inner, b, out=inner)
        self.conv.apply_(inner, state, slots)
        if step.progress is not None:
            step.progress.reach(self.cache + 1)
        if self.columns is None:
            return self.out_proj(self.ops.multiply(inner, c))
        whole, own = self.columns.empty(x.shape[0], x.dtype)
        self.ops.multiply(inner, c, out=own)
        self.columns.join()
        return self.out_proj(whole)
