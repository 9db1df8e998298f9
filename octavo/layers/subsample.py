"""First part of Gemma 4's encoder of sounds: two convolutions over a spectrogram."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor

Convolution = tuple[Linear, LayerNorm]
"""Convolution with the norm of its results."""


@dataclass(slots=True)
class SubsampleInput:
    """Live `SubsampleInputSpec`.

    `StepContext.arrays` has `spectrogram` [rows, 9], the inputs of the first convolution, and
    `no_slots` [T]. `StepContext.item_sizes` are the numbers of tokens of the items.
    """

    ops: Ops
    first: Convolution
    second: Convolution
    project: Linear
    taps: Tensor
    """int64 [9 * results], rows of a chunk that the second convolution sees."""
    num_rows: int
    """Rows of a chunk in `spectrogram`; the last one is 0."""
    num_tokens: int
    """Tokens of a chunk."""
    width: int
    """Numbers of a token before the projection."""

    def __call__(self, step: StepContext) -> Tensor:
        """Return the first hidden states [T, hidden_size]."""
        ops, inputs = self.ops, step.arrays["spectrogram"]
        whole = ops.empty(step.arrays["no_slots"].shape[0], self.width, like=inputs)
        begin = row = 0
        for size in step.item_sizes:
            for done in range(0, size, self.num_tokens):
                x = self._convolve(inputs[row : row + self.num_rows], self.first)
                x = ops.relu(x, x)
                x = ops.embedding(x, self.taps).view(self.taps.shape[0] // 9, -1)
                x = self._convolve(x, self.second).view(self.num_tokens, -1)
                end = begin + min(size - done, self.num_tokens)
                ops.relu(x[: end - begin], whole[begin:end])
                begin, row = end, row + self.num_rows
        return self.project(whole)

    def _convolve(self, x: Tensor, convolution: Convolution) -> Tensor:
        """Return the normed results of a convolution."""
        linear, norm = convolution
        return norm(linear(x))
