"""Mixer of Mamba-1: projection, causal convolution, gated recurrence, output."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.ops_states import StateRates
from octavo.layers.conv import Conv
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True, kw_only=True)
class Mamba:
    """State space with a vector as the state of each channel."""

    ops: Ops
    cache: int
    """Index of the layer's states in `StepContext.caches`."""
    in_proj: Linear
    """Projection to x and gates, stacked."""
    conv: Conv
    """Convolution of x."""
    x_proj: Linear
    """Projection of the x of all channels to a token's step, B and C, stacked."""
    norms: tuple[RMSNorm, ...]
    """Norms of a token's step, B and C; empty: they are not normed."""
    dt_proj: Linear
    """Projection of a token's step to the step sizes of the channels."""
    out_proj: Linear
    """Projection from the channels' results to the hidden size."""
    rates: StateRates
    state_size: int
    inputs: Columns | None = None
    """Columns of these channels in the x of all channels, if other ranks have the others."""
    results: Columns | None = None
    """Columns of these channels in the results of all channels, if `out_proj` reads all."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]; store the states of this step."""
        ops, tokens, size = self.ops, x.shape[0], self.state_size
        (windows, states), slots = step.caches[self.cache], step.metadata[self.cache]
        projected = self.in_proj(x)
        inner = projected.shape[1] // 2
        values, gate = projected.split_with_sizes((inner, inner), dim=1)
        if self.inputs is None:
            every = values
            self.conv.apply_(values, windows, slots)
        else:
            every, convolved = self.inputs.empty(tokens, x.dtype)
            self.conv.apply_(values, windows, slots, convolved)
            self.inputs.join()
            values = convolved
        selected = self.x_proj(every)
        parts = selected.split_with_sizes((selected.shape[1] - 2 * size, size, size), dim=1)
        for norm, part in zip(self.norms, parts, strict=False):
            norm(part, part)
        time, b, c = parts
        whole = own = None
        if self.results is not None:
            whole, own = self.results.empty(tokens, x.dtype)
        out = ops.selective_scan(
            values, self.dt_proj(time), b, c, gate, self.rates, states, slots, own
        )
        if step.progress is not None:
            step.progress.reach(self.cache + 1)
        if self.results is not None:
            self.results.join()
        return self.out_proj(out if whole is None else whole)
