"""Mixer of Mamba-2: projection, causal convolution, recurrence, gated norm, output."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.ops_states import StateRates
from octavo.layers.conv import Conv
from octavo.layers.linear import Linear
from octavo.layers.norm import GroupNorm
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True, kw_only=True)
class Mamba2:
    """State space with a matrix as the state of each head."""

    ops: Ops
    cache: int
    """Index of the layer's states in `StepContext.caches`."""
    in_proj: Linear
    """Projection to gates, x, B, C and step sizes, stacked."""
    conv: Conv
    """Convolution of x, B and C."""
    out_proj: Linear
    """Projection from the heads' results to the hidden size."""
    rates: StateRates
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    norm: GroupNorm | None
    """Norm of the results of all heads, also those of other ranks."""
    norm_before_gate: bool
    """True if the gate is applied after the norm."""
    factors: Tensor | None
    """Factor of each column of the result of `in_proj`."""
    columns: Columns | None = None
    """Columns of these heads in the result of all heads, if other ranks have the others."""
    own_inputs: slice | None = None
    """Columns of all heads that `out_proj` reads, if it does not read all."""
    gated: Columns | None = None
    """Columns of these heads in the gated result of all, if that differs from `columns`."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]; store the states of this step."""
        ops, tokens, heads, groups = self.ops, x.shape[0], self.num_heads, self.num_groups
        (inputs, states), slots = step.caches[self.cache], step.metadata[self.cache]
        inner, keys = heads * self.head_size, groups * self.state_size
        projected = self.in_proj(x)
        if self.factors is not None:
            ops.multiply(projected, self.factors, out=projected)
        gate, mixed, dt = projected.split_with_sizes((inner, inner + 2 * keys, heads), dim=1)
        self.conv.apply_(mixed, inputs, slots)
        values, b, c = mixed.split_with_sizes((inner, keys, keys), dim=1)
        if self.columns is None:
            whole = own = ops.empty(tokens, inner, like=x)
        else:
            whole, own = self.columns.empty(tokens, x.dtype)
        ops.ssd(
            values.view(tokens, heads, self.head_size),
            dt,
            b.view(tokens, groups, self.state_size),
            c.view(tokens, groups, self.state_size),
            self.rates,
            states,
            slots,
            own.view(tokens, heads, self.head_size),
        )
        if step.progress is not None:
            step.progress.reach(self.cache + 1)
        if not self.norm_before_gate:
            ops.multiply(own, gate, "silu", own)
        if self.columns is not None:
            self.columns.join()
        if self.norm is not None:
            whole = self.norm(whole)
            if self.own_inputs is not None:
                whole = whole[:, self.own_inputs]
        if self.gated is not None:
            normed = whole[:, self.gated.begin : self.gated.end]
            whole, own = self.gated.empty(tokens, x.dtype)
            ops.multiply(normed, gate, "silu", own)
            self.gated.join()
        elif self.norm_before_gate:
            ops.multiply(whole, gate, "silu", whole)
        return self.out_proj(whole)
