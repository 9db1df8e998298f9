"""Layers: a mixer and a feed-forward part around the residual stream."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from octavo.kernels.base import Ops
from octavo.layers.norm import Norm
from octavo.layers.step import StepContext


class Mixer(Protocol):
    """The part of a layer that lets a token see others."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size], a new one."""
        ...


class FeedForward(Protocol):
    """The part of a layer in which each token is by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size], a new one."""
        ...


class Layer(Protocol):
    """One of a decoder's layers."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """(x, residual), whose sum is the residual stream, to the same behind the layer.

        All are [T, hidden_size]. With None for a residual x alone is the stream.
        """
        ...


class SequentialLayer:
    """The mixer, then the feed-forward part; norms before and behind each.

    Args:
        ops: table of operations.
        input_norm: of what the mixer reads.
        mixer: the first part.
        mixer_out_norm: of what it returns.
        feed_forward_norm: of what the second part reads.
        feed_forward: the second part.
        feed_forward_out_norm: of what it returns.
        multiplier: factor on what is added to the residual stream, or None.
    """

    __slots__ = (
        "feed_forward",
        "feed_forward_norm",
        "feed_forward_out_norm",
        "input_norm",
        "mixer",
        "mixer_out_norm",
        "multiplier",
        "scale_",
    )

    def __init__(
        self,
        ops: Ops,
        input_norm: Norm,
        mixer: Mixer,
        mixer_out_norm: Norm,
        feed_forward_norm: Norm,
        feed_forward: FeedForward,
        feed_forward_out_norm: Norm,
        multiplier: float | None,
    ) -> None:
        self.scale_ = ops.scale_
        self.input_norm = input_norm
        self.mixer = mixer
        self.mixer_out_norm = mixer_out_norm
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.feed_forward_out_norm = feed_forward_out_norm
        self.multiplier = multiplier

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """See `Layer`."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.mixer_out_norm(self.mixer(x, step))
        if self.multiplier is not None:
            self.scale_(x, self.multiplier)
        x, residual = self.feed_forward_norm.add(x, residual)
        x = self.feed_forward_out_norm(self.feed_forward(x))
        if self.multiplier is not None:
            self.scale_(x, self.multiplier)
        return x, residual


class ParallelLayer:
    """Mixer and feed-forward part beside each other: x + mixer(norm(x)) + feed_forward(norm(x)).

    Args:
        ops: table of operations.
        input_norm: of what the mixer reads.
        mixer: one part.
        feed_forward_norm: of what the other part reads; None: what the mixer does.
        feed_forward: the other part.
    """

    __slots__ = ("add", "feed_forward", "feed_forward_norm", "input_norm", "mixer")

    def __init__(
        self,
        ops: Ops,
        input_norm: Norm,
        mixer: Mixer,
        feed_forward_norm: Norm | None,
        feed_forward: FeedForward,
    ) -> None:
        self.add = ops.add
        self.input_norm = input_norm
        self.mixer = mixer
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """See `Layer`."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        mixed = self.mixer(x, step)
        if self.feed_forward_norm is not None:
            x = self.feed_forward_norm(residual)
        return self.add(mixed, self.feed_forward(x)), residual


class PostNormLayer:
    """A layer that norms the sum of each part's input and result (OPT-350m).

    Args:
        mixer: the first part.
        mixer_norm: of its sum.
        feed_forward: the second part.
        feed_forward_norm: of its sum.
    """

    __slots__ = ("feed_forward", "feed_forward_norm", "mixer", "mixer_norm")

    def __init__(
        self, mixer: Mixer, mixer_norm: Norm, feed_forward: FeedForward, feed_forward_norm: Norm
    ) -> None:
        self.mixer = mixer
        self.mixer_norm = mixer_norm
        self.feed_forward = feed_forward
        self.feed_forward_norm = feed_forward_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """See `Layer`; there is never a residual apart from x."""
        assert residual is None
        x, _ = self.mixer_norm.add(self.mixer(x, step), x)
        x, _ = self.feed_forward_norm.add(self.feed_forward(x), x)
        return x, None
