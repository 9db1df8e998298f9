"""First part of Phi-4's encoder of sounds: three convolutions over a spectrogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.norm import Standard
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class Separable:
    """Live `SeparableConv`."""

    ops: Ops
    weight: Tensor
    """Weights of each channel in turn: [9 * channels]."""
    bias: Tensor
    """Bias [channels]."""
    mix: Linear
    taps: Tensor
    """int64 [9 * results]: rows of a chunk that each result sees."""
    places: Tensor
    """int32 [results, 9]: the same of the gathered rows."""

    def __call__(self, x: Tensor, by_tap: Tensor) -> Tensor:
        """Map the rows of a chunk [rows, channels] to the results [results, channels].

        Args:
            x: the rows.
            by_tap: int64 [9 * channels]: order of the weights in which those of a tap are together.
        """
        ops, channels = self.ops, x.shape[1]
        weight = ops.embedding(self.weight.view(-1, 1), by_tap).view(-1)
        seen = ops.embedding(x, self.taps).view(-1, 9 * channels)
        products = ops.multiply(seen, weight).view(-1, channels)
        sums = ops.add(ops.sum_experts(products, self.places, None), self.bias)
        return self.mix.act(sums, "relu")


@dataclass(slots=True)
class NemoInput:
    """Live `NemoInputSpec`.

    `StepContext.arrays` has `frames` [rows, bands], `frame_mask` [rows, 1], `first_mask` and
    `second_mask` [results, 1], all chunk by chunk, and `token_mask` [T, 1]. A mask is 1 for what
    lies in the sound, else 0. `StepContext.item_sizes` are the numbers of tokens of the items.
    """

    ops: Ops
    standard: Standard
    first: Linear
    others: Sequence[Separable]
    project: Linear
    taps: Tensor
    """int64 [9 * results]: numbers of a chunk's frames that the first convolution sees."""
    by_tap: Tensor
    """See `Separable`."""
    num_frames: int
    """Rows of a chunk in `frames`."""
    num_tokens: int
    """Tokens of a chunk."""
    hidden_size: int

    def __call__(self, step: StepContext) -> Tensor:
        """Return the first hidden states [T, hidden_size]."""
        ops, mask = self.ops, step.arrays["token_mask"]
        out = ops.empty(mask.shape[0], self.hidden_size, like=mask)
        begin = chunk = 0
        for size in step.item_sizes:
            for done in range(0, size, self.num_tokens):
                end = begin + min(size - done, self.num_tokens)
                x = self._convolve(step, chunk).view(self.num_tokens, -1)
                ops.multiply(self.project(x[: end - begin]), mask[begin:end], out=out[begin:end])
                begin, chunk = end, chunk + 1
        return out

    def _convolve(self, step: StepContext, chunk: int) -> Tensor:
        """Return the results of the last convolution for the tokens of a chunk, band by band."""
        ops, arrays = self.ops, step.arrays
        rows = slice(chunk * self.num_frames, (chunk + 1) * self.num_frames)
        x = ops.multiply(self.standard(arrays["frames"][rows]), arrays["frame_mask"][rows])
        x = ops.embedding(x.view(-1, 1), self.taps).view(-1, 9)
        x = self.first.act(x, "relu")
        for mask, convolution in zip(("first_mask", "second_mask"), self.others, strict=True):
            count = x.shape[0]
            x = ops.multiply(x, arrays[mask][chunk * count : (chunk + 1) * count])
            x = convolution(x, self.by_tap)
        return x
