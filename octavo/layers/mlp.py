"""The feed-forward block, gated or plain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear


class MLP:
    """down(act(up(x))), or down(act(gate(x)) * up(x)).

    Args:
        up: to the inner size; gated: gate and up, stacked.
        activation: on the result of `up`; gated: from [T, 2 I] to [T, I].
        down: back to the hidden size.
    """

    __slots__ = ("activation", "down", "up")

    def __init__(self, up: Linear, activation: Callable[[Tensor], Tensor], down: Linear) -> None:
        self.up = up
        self.activation = activation
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        return self.down(self.activation(self.up(x)))


def get_activation(ops: Ops, name: str, gated: bool) -> Callable[[Tensor], Tensor]:
    """The activation called "silu", "gelu", "gelu_tanh" or "relu" in a `ModelSpec`."""
    activations: dict[str, Callable[[Tensor], Tensor]]
    if gated:
        activations = {
            "silu": ops.silu_and_mul,
            "gelu": partial(ops.gelu_and_mul, approximate="none"),
            "gelu_tanh": partial(ops.gelu_and_mul, approximate="tanh"),
        }
    else:
        activations = {
            "relu": ops.relu,
            "gelu": partial(ops.gelu, approximate="none"),
            "gelu_tanh": partial(ops.gelu, approximate="tanh"),
        }
    return activations[name]
