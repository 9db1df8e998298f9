"""Mixers of RWKV 7: token shift, recurrence, and the feed-forward block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.ops_states import Wkv7Inputs, Wkv7Parameters
from octavo.layers.linear import Linear
from octavo.layers.low_rank import LowRank
from octavo.layers.mlp import MLP
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class TokenShift:
    """Mixes of each token with the previous one of its request."""

    ops: Ops
    cache: int
    """Index of the block's states in `StepContext.caches`; the first array has the last token."""
    mix: Tensor
    """Shares of the previous token in each mix: float32 [M, hidden_size]."""

    def __call__(self, x: Tensor, step: StepContext) -> Sequence[Tensor]:
        """Return M mixes [T, hidden_size] of x [T, hidden_size]; store the last tokens."""
        state, slots = step.caches[self.cache][0], step.metadata[self.cache]
        mixes: Sequence[Tensor] = self.ops.token_shift(x, self.mix, state, slots).unbind(1)
        return mixes


@dataclass(slots=True, kw_only=True)
class TimeMix:
    """Linear attention with a matrix as the state of each head."""

    ops: Ops
    shift: TokenShift
    """Mixes for receptance, decay, key, value, learning rate and gate."""
    receptance: Linear
    key: Linear
    value: Linear
    decay: LowRank
    rate: LowRank
    gate: LowRank
    value_rate: LowRank | None
    """Projection to the share of the first layer's value; None: this is the first layer."""
    out_proj: Linear
    parameters: Wkv7Parameters
    num_heads: int
    columns: Columns | None
    """Columns of these heads in the result of all heads, if other ranks have the others."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]; store the states of this step."""
        tokens, cache = x.shape[0], self.shift.cache

        def heads(rows: Tensor) -> Tensor:
            of_heads: Tensor = rows.view(tokens, self.num_heads, -1)
            return of_heads

        of_receptance, of_decay, of_key, of_value, of_rate, of_gate = self.shift(x, step)
        value, first = self.value(of_value), None
        if self.value_rate is None:
            step.layer_inputs = value.view(tokens, 1, -1)
        else:
            assert step.layer_inputs is not None
            first = heads(step.layer_inputs), heads(self.value_rate(of_value))
        inputs = Wkv7Inputs(
            receptance=heads(self.receptance(of_receptance)),
            decay=heads(self.decay(of_decay)),
            key=heads(self.key(of_key)),
            value=heads(value),
            rate=heads(self.rate(of_rate)),
            gate=heads(self.gate(of_gate)),
            first=first,
        )
        if self.columns is None:
            whole = own = self.ops.empty(*value.shape, like=x)
        else:
            whole, own = self.columns.empty(tokens, x.dtype)
        self.ops.wkv7(
            inputs, self.parameters, step.caches[cache][1], step.metadata[cache], heads(own)
        )
        if step.progress is not None:
            step.progress.reach(cache + 1)
        if self.columns is not None:
            self.columns.join()
        return self.out_proj(whole)


@dataclass(slots=True)
class ChannelMix:
    """Feed-forward block whose input is mixed with the previous token."""

    shift: TokenShift
    mlp: MLP

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]; store the states of this step."""
        (mixed,) = self.shift(x, step)
        if step.progress is not None:
            step.progress.reach(self.shift.cache + 1)
        return self.mlp(mixed, step)
