"""Gated DeltaNet and Kimi Delta Attention.

The blocks are projections, causal convolution, gated delta rule, gated norm, and output projection.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.routing import Gate
from octavo.layers.linear import Linear
from octavo.layers.low_rank import LowRank
from octavo.layers.norm import RMSNorm
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True, kw_only=True)
class GatedDelta:
    """Linear attention with a matrix as the state of each head."""

    ops: Ops
    cache: int
    """Index of the layer's states in `StepContext.caches`."""
    in_proj: Linear
    """Projection to queries, keys, values and, if `gate` is None, gates, stacked."""
    rates_proj: Linear
    """Projection to a beta and, if `decay` is None, a decay for each head, stacked."""
    decay: LowRank | None
    """Projection to a decay for each channel of each head's key: [T, num_heads * key_size]."""
    gate: LowRank | None
    """Projection to gates, whose sigmoids are factors. For the gates of `in_proj` SiLU is used."""
    out_proj: Linear
    """Projection from the heads' results to the hidden size."""
    conv_weight: Tensor
    """Weights [channels, taps] of the convolution of queries, keys and values."""
    a_log: Tensor
    """Logarithm of the decay's rate of each head: float32 [num_heads]."""
    dt_bias: Tensor
    """Bias of each decay: float32 [num_heads], or [num_heads * key_size]."""
    norm: RMSNorm
    """Norm of the result of each head."""
    num_key_heads: int
    """Number of heads of queries and keys; divides `num_heads`."""
    num_heads: int
    """Number of heads of values."""
    key_size: int
    """Size of a head of queries or keys."""
    value_size: int
    """Size of a head of values."""
    beta_scale: float
    """Factor of the betas."""
    columns: Columns | None = None
    """Columns of these heads in the result of all heads, if other ranks have the others."""
    tiled_from: int | None = None
    """Index of this rank's first head of keys among those of all ranks, if the result is tiled: it
    has the first head of values of each head of keys, then the second ones, and so on. None: the
    result has all heads of values of each head of keys in turn."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]; store the states of this step."""
        ops, tokens = self.ops, x.shape[0]
        conv_state, state = step.caches[self.cache]
        slots = step.metadata[self.cache]
        keys, values = self.num_key_heads * self.key_size, self.num_heads * self.value_size
        mixed = self.in_proj(x)
        if self.gate is None:
            gate_name: Gate = "silu"
            mixed, gate = mixed.split_with_sizes((2 * keys + values, values), dim=1)
        else:
            gate_name, gate = "sigmoid", self.gate(x)
        mixed = ops.causal_conv(mixed, self.conv_weight, None, conv_state, slots, "silu", out=mixed)
        query, key, value = mixed.split_with_sizes((keys, keys, values), dim=1)
        beta = self.rates_proj(x)
        if self.decay is None:
            beta, decay = beta.split_with_sizes((self.num_heads,) * 2, dim=1)
        else:
            decay = self.decay(x)
        if self.columns is None:
            whole = own = ops.empty(tokens, values, like=x)
        else:
            whole, own = self.columns.empty(tokens, x.dtype)
        if self.tiled_from is not None:
            own = ops.empty(tokens, values, like=x)
        out = own.view(tokens, self.num_heads, self.value_size)
        ops.gated_delta_rule(
            query.view(tokens, self.num_key_heads, self.key_size),
            key.view(tokens, self.num_key_heads, self.key_size),
            value.view(tokens, self.num_heads, self.value_size),
            decay,
            beta,
            self.a_log,
            self.dt_bias,
            state,
            slots,
            self.beta_scale,
            out,
        )
        if step.progress is not None:
            step.progress.reach(self.cache + 1)
        self.norm.heads_(out)
        gate = gate.view(tokens, self.num_heads, self.value_size)
        if self.tiled_from is None:
            ops.multiply(out, gate, gate_name, out)
        else:
            self._multiply_tiled(out, gate, whole, self.tiled_from)
        if self.columns is not None:
            self.columns.join()
        return self.out_proj(whole)

    def _multiply_tiled(self, out: Tensor, gate: Tensor, whole: Tensor, first: int) -> None:
        """Write the gated results of heads [T, num_heads, value_size] to their places in `whole`.

        Args:
            out: the results.
            gate: the gates.
            whole: results of all ranks, [T, heads * value_size].
            first: see `tiled_from`.
        """
        tokens, keys, size = whole.shape[0], self.num_key_heads, self.value_size
        group = self.num_heads // keys
        tiles = whole.view(tokens, group, -1, size)[:, :, first : first + keys].unbind(1)
        each = (x.view(tokens, keys, group, size).unbind(2) for x in (out, gate))
        for x, factor, tile in zip(*each, tiles, strict=True):
            self.ops.multiply(x, factor, "silu", tile)
