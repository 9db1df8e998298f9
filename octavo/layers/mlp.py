"""The feed-forward block, gated or plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from octavo.kernels.base import Gate, Ops
from octavo.layers.linear import Linear
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext

ActivatedLinear = Callable[[Linear, Tensor, Tensor | None], Tensor]
"""A linear layer and what follows it: the layer and its input [T, K] to [T, I], which goes where
`Ops.linear` would put it."""


@dataclass(slots=True)
class MLP:
    """down(act(up(x))), or down(act(gate(x)) * up(x))."""

    up: Linear
    """To the inner size; gated: gate and up, stacked."""
    activation: ActivatedLinear
    """Runs `up` and what follows it."""
    down: Linear
    """Back to the hidden size."""
    columns: Columns | None = None
    """Which of the inner columns `up` computes, where other ranks compute the others."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Compute [T, hidden_size] from [T, hidden_size]."""
        if self.columns is None:
            return self.down(self.activation(self.up, x, None))
        whole, own = self.columns.empty(x.shape[0], x.dtype)
        self.activation(self.up, x, own)
        self.columns.join()
        return self.down(whole)


def get_activation(ops: Ops, name: str, gated: bool) -> ActivatedLinear:
    """The activation called "silu", "gelu", "gelu_tanh" or "relu" in an `MLPSpec`."""
    if gated:
        gates: dict[str, Gate] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
        gate = gates[name]
        return lambda up, x, out: up.act_and_mul(x, gate, out)
    activations: dict[str, Callable[..., Tensor]] = {
        "relu": ops.relu,
        "gelu": partial(ops.gelu, approximate="none"),
        "gelu_tanh": partial(ops.gelu, approximate="tanh"),
    }
    activation = activations[name]
    return lambda up, x, out: activation(up(x), out=out)
