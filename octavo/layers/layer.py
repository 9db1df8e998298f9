"""Layers: a mixer and a feed-forward part around the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(slots=True)
class SequentialLayer:
    """The mixer, then the feed-forward part; norms before and behind each."""

    ops: Ops
    input_norm: Norm
    mixer: Mixer
    mixer_out_norm: Norm
    feed_forward_norm: Norm
    feed_forward: FeedForward
    feed_forward_out_norm: Norm
    multiplier: float | None
    """Factor on what is added to the residual stream."""

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
            x = self.ops.scale(x, self.multiplier)  # other ranks may have x, too
        x, residual = self.feed_forward_norm.add(x, residual)
        x = self.feed_forward_out_norm(self.feed_forward(x))
        if self.multiplier is not None:
            x = self.ops.scale(x, self.multiplier)
        return x, residual


@dataclass(slots=True)
class ParallelLayer:
    """Both parts beside each other: x + mixer(norm(x)) + feed_forward(norm(x))."""

    ops: Ops
    input_norm: Norm
    mixer: Mixer
    feed_forward_norm: Norm | None
    """None: the feed-forward part reads what the mixer does."""
    feed_forward: FeedForward

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
        return self.ops.add(mixed, self.feed_forward(x)), residual


@dataclass(slots=True)
class PostNormLayer:
    """A layer that norms the sum of each part's input and result (OPT-350m)."""

    mixer: Mixer
    mixer_norm: Norm
    feed_forward: FeedForward
    feed_forward_norm: Norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """See `Layer`; there is never a residual apart from x."""
        assert residual is None
        x, _ = self.mixer_norm.add(self.mixer(x, step), x)
        x, _ = self.feed_forward_norm.add(self.feed_forward(x), x)
        return x, None
