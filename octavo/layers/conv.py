"""Causal convolution of each channel with its own weights."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.ops_states import ConvActivation, StateSlots
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class Conv:
    """Convolution of each channel over the last inputs of a request."""

    ops: Ops
    weight: Tensor
    """Weight [channels, taps]."""
    bias: Tensor | None
    """Bias [channels]."""
    activation: ConvActivation

    def apply_(
        self, x: Tensor, state: Tensor, slots: StateSlots, out: Tensor | None = None
    ) -> None:
        """Convolve x [T, channels] into `out`, or in place; read and write states in `slots`."""
        out = x if out is None else out
        self.ops.causal_conv(x, self.weight, self.bias, state, slots, self.activation, out)
