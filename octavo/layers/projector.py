"""Last part of an encoder: from the tokens of a run's items to rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kernels.base import Activation, Ops
from octavo.layers.linear import Linear
from octavo.layers.norm import Norm
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class Projector:
    """Live `ProjectorSpec`, which describes the fields."""

    ops: Ops
    layers: Sequence[tuple[Linear, Activation | None]]
    beside: Sequence[tuple[Linear, Activation | None]]
    token_linear: Linear | None
    token_norm: Norm
    norm: Norm
    gathers: bool
    group: int
    averages: bool
    separators: Tensor | None
    """Learned vectors [N, size of a token]; None: there are none."""
    newline: Tensor | None
    """Learned vector [1, size]; None: rows are not mixed."""

    def __call__(self, x: Tensor, step: StepContext, rows: tuple[int, int] | None = None) -> Tensor:
        """Map the tokens [T, hidden_size] to rows [R, size].

        Args:
            x: the tokens.
            step: the context of the run.
            rows: (begin, end) of the rows to compute, if `ProjectorSpec.is_by_rows`; None: all.
        """
        tokens = slice(None)
        if rows is not None:
            tokens = slice(rows[0] * self.group, rows[1] * self.group)
        if self.gathers:
            x = self.ops.embedding(x, step.arrays["output_tokens"][tokens])
        else:
            x = x[tokens]
        if self.token_linear is not None:
            x = self.token_linear(x)
        x = self.token_norm(x)
        if self.averages:
            x = self.ops.sum_experts(x, step.arrays["averaged_tokens"], step.arrays["shares"])
        if self.separators is not None:
            places, shares = step.arrays["separator_places"], step.arrays["separator_shares"]
            x = self.ops.add(x, self.ops.sum_experts(self.separators, places, shares))
        given = x = self.norm(x.view(x.shape[0] // self.group, -1))
        for linear, activation in self.layers:
            x = linear(x) if activation is None else linear.act(x, activation)
        if self.beside:
            x = self._choose(x, given, step, slice(None) if rows is None else slice(*rows))
        if self.newline is None:
            return x
        arrays, ops = step.arrays, self.ops
        x = ops.sum_experts(x, arrays["mixed_tokens"], arrays["mix_shares"])
        ends = ops.sum_experts(self.newline, arrays["newline_places"], arrays["newlines"])
        return ops.add(x, ends)

    def _choose(self, alone: Tensor, x: Tensor, step: StepContext, rows: slice) -> Tensor:
        """Return the rows of items alone, and those of items beside others.

        Args:
            alone: the results of `layers`.
            x: their inputs.
            step: the context of the run.
            rows: the rows of the run.
        """
        for linear, activation in self.beside:
            x = linear(x) if activation is None else linear.act(x, activation)
        ops, arrays = self.ops, step.arrays
        return ops.add(
            ops.multiply(alone, arrays["alone"][rows]), ops.multiply(x, arrays["beside"][rows])
        )
