"""First part of an encoder of sound: two convolutions over frames."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class FramesInput:
    """Two convolutions with GELU, the second with a stride of 2, and vectors of positions.

    `StepContext.arrays` has `frames` [2 T, 3 F], each frame between those before and after it;
    `before` int64 [T], the token before each one in its item, or itself; `inside` [T, 1], 0 for the
    first token of an item, 1 for others; and `ones` [T, 1].
    """

    ops: Ops
    first: Linear
    """Convolution of three frames, one after the other: to [hidden_size]."""
    second: Linear
    """The same of the results of the first."""
    positions: Tensor
    """Vectors of positions [positions, hidden_size]."""

    def __call__(self, step: StepContext) -> Tensor:
        """Return the first hidden states [T, hidden_size]."""
        ops, arrays = self.ops, step.arrays
        x = self.first.act(arrays["frames"], "gelu")
        size = x.shape[1]
        pairs = x.view(-1, 2 * size)
        around = ops.empty(pairs.shape[0], 3 * size, like=x)
        before = ops.embedding(pairs, arrays["before"])
        ops.multiply(before[:, size:], arrays["inside"], out=around[:, :size])
        ops.multiply(pairs, arrays["ones"], out=around[:, size:])  # a copy
        x = self.second.act(around, "gelu")
        return ops.add(x, ops.embedding(self.positions, step.positions))
