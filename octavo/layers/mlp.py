"""Feed-forward block, gated or plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from octavo.kernels.base import Activation, Ops
from octavo.kernels.routing import Gate
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.shared import Columns
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor

_ACTIVATIONS: dict[str, Activation] = {name: name for name in get_args(Activation)}

ActivatedLinear = Callable[[Linear, Tensor, Tensor | None], Tensor]
"""Linear layer with an activation: maps the layer and its input [T, K] to [T, I]; the third
argument is `out` of `Ops.linear`."""

GATES: dict[str, Gate] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""Activations of gates by their names in an `MLPSpec`."""


@dataclass(slots=True)
class MLP:
    """Feed-forward block down(act(up(x))), or down(act(gate(x)) * up(x))."""

    up: Linear
    """Projection to the inner size; gated: gate and up, stacked."""
    activation: ActivatedLinear
    """Function that runs `up` and the activation."""
    down: Linear
    """Projection back to the hidden size."""
    columns: Columns | None = None
    """Inner columns that `up` computes, if other ranks compute the others."""
    inner_norm: RMSNorm | None = None
    """Norm of the inner numbers of all ranks."""
    layer_input: tuple[int, slice] | None = None
    """Factor of the inner values in `StepContext.layer_inputs`: its layer, and the columns that
    `up` computes. None: no factor."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]."""
        if self.columns is None:
            inner = self.activation(self.up, x, None)
            self._multiply(inner, step)
        else:
            inner, own = self.columns.empty(x.shape[0], x.dtype)
            self.activation(self.up, x, own)
            self._multiply(own, step)
            self.columns.join()
        return self.down(inner if self.inner_norm is None else self.inner_norm(inner))

    def _multiply(self, inner: Tensor, step: StepContext) -> None:
        """Multiply the inner values [T, I] by the layer's input, if they have a factor."""
        if self.layer_input is not None:
            assert step.layer_inputs is not None
            layer, columns = self.layer_input
            factor = step.layer_inputs[:, layer, columns]
            self.up.ops.multiply(inner, factor, out=inner)


def get_activation(
    ops: Ops, name: str, gated: bool, alphas: Tensor | None = None
) -> ActivatedLinear:
    """Return the activation of a name in an `MLPSpec`.

    relu2 is the square of relu, and quick_gelu is x * sigmoid(1.702 x) (CLIP). `alphas` are the
    parameters of xielu.
    """
    if gated:
        gate = GATES[name]
        return lambda up, x, out: up.act_and_mul(x, gate, out)

    def relu2(x: Tensor, out: Tensor | None) -> Tensor:
        positive = ops.relu(x, out)
        return ops.multiply(positive, positive, out=positive)

    def quick_gelu(x: Tensor, out: Tensor | None) -> Tensor:
        return ops.multiply(x, ops.scale(x, 1.702), "sigmoid", x if out is None else out)

    if name == "quick_gelu":
        return lambda up, x, out: quick_gelu(up(x), out)
    if name == "xielu":
        assert alphas is not None
        parameters = alphas
        return lambda up, x, out: ops.xielu(up(x), parameters, out)
    if name == "relu2":
        return lambda up, x, out: relu2(up(x), out)
    activation = _ACTIVATIONS[name]
    return lambda up, x, out: up.act(x, activation, out)
