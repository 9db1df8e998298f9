"""First part of an encoder that reads spectrograms: convolutions over chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class SpectrogramInput:
    """Live `SpectrogramInputSpec`.

    `StepContext.arrays` has `spectrogram` [results of the first convolution, 9], its inputs;
    `times` [T, hidden_size], which are added to the tokens; and `zeros` [items, channels].
    `StepContext.item_sizes` are the numbers of tokens of the items.
    """

    ops: Ops
    convolutions: Sequence[Linear]
    project: Linear
    counts: tuple[int, int, int]
    """Results of each convolution of a chunk."""
    taps: Sequence[Tensor]
    """int64 [9 * results], inputs of the second and of the third convolution; the number of inputs
    stands for a zero."""
    num_tokens: int
    """Tokens of a chunk."""

    def __call__(self, step: StepContext) -> Tensor:
        """Return the first hidden states [T, hidden_size]."""
        ops, times, inputs = self.ops, step.arrays["times"], step.arrays["spectrogram"]
        out = ops.empty(*times.shape, like=times)
        begin = chunk = 0
        for size in step.item_sizes:
            for first in range(0, size, self.num_tokens):
                rows = inputs[chunk * self.counts[0] : (chunk + 1) * self.counts[0]]
                x = self._chunk(rows, step.arrays["zeros"][:1])
                end = begin + min(size - first, self.num_tokens)
                ops.add(x[: end - begin], times[begin:end], out[begin:end])
                begin, chunk = end, chunk + 1
        return out

    def _chunk(self, x: Tensor, zero: Tensor) -> Tensor:
        """Return the tokens of a chunk [num_tokens, hidden_size]."""
        ops, channels = self.ops, zero.shape[1]
        for i, convolution in enumerate(self.convolutions):
            if i:
                x = ops.embedding(x, self.taps[i - 1]).view(self.counts[i], -1)
            padded = ops.empty(self.counts[i] + 1, channels, like=x)
            convolution.act(x, "gelu", padded[: self.counts[i]])
            ops.multiply(zero, zero, out=padded[self.counts[i] :])
            x = padded
        return self.project(x[: self.counts[2]].view(self.num_tokens, -1))
