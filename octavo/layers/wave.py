"""First part of an encoder of sound: three convolutions over samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class WaveInput:
    """Live `WaveInputSpec`.

    `StepContext.arrays` has `frames` [F, taps], the samples that each frame of the first
    convolution sees; `StepContext.item_sizes` are the numbers of frames of the items.
    """

    ops: Ops
    first: Linear
    second: Linear
    third: Linear
    ones: Tensor
    """Ones [numbers of the frames of the longest item]."""
    weight: Tensor
    """Weight of the norm [hidden_size]."""
    bias: Tensor
    eps: float
    shapes: tuple[tuple[int, int], ...]
    """Taps and stride of each convolution."""

    def __call__(self, step: StepContext) -> Tensor:
        """Return the first hidden states [T, hidden_size]."""
        ops = self.ops
        frames = self.first(step.arrays["frames"])
        ops.soft_cap_(frames, 1.0)  # tanh
        out = ops.empty(step.positions.shape[0], frames.shape[1], like=frames)
        begin = end = 0
        for count in step.item_sizes:
            x = self._norm(frames[begin : begin + count])
            x = self.second.act(self._windows(x, 1), "gelu")
            x = self._windows(x, 2)
            self.third.act(x, "gelu", out[end : end + x.shape[0]])
            begin, end = begin + count, end + x.shape[0]
        return out

    def _norm(self, x: Tensor) -> Tensor:
        """Return the norm of all numbers of an item's frames [F, hidden_size]."""
        ops = self.ops
        row = x.view(1, -1)
        normed = ops.layer_norm(row, self.ones[: row.shape[1]], None, self.eps).view(*x.shape)
        return ops.add(ops.multiply(normed, self.weight), self.bias)

    def _windows(self, x: Tensor, number: int) -> Tensor:
        """Return the rows that each result of a convolution sees: [results, taps * size]."""
        taps, stride = self.shapes[number]
        count = (x.shape[0] - taps) // stride + 1
        rows = np.arange(count)[:, None] * stride + np.arange(taps)
        found: Tensor = self.ops.embedding(x, self.ops.to_device(rows.ravel())).view(count, -1)
        return found
