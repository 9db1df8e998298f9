"""Decoder layers: a mixer and a feed-forward part around the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.kernels.base import Ops
from octavo.layers.norm import Norm
from octavo.layers.step import StepContext


class Mixer(Protocol):
    """Part of a layer in which a token attends to others."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to a new tensor [T, hidden_size]."""
        ...


class FeedForward(Protocol):
    """Part of a layer that processes each token separately."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, hidden_size] to a new tensor [T, hidden_size]."""
        ...


class Layer(Protocol):
    """Interface of a decoder layer."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Map (x, residual) before the layer to the same pair after it.

        Their sum is the residual stream; if the residual is None, x alone is. All are [T,
        hidden_size].
        """
        ...


@dataclass(slots=True)
class SequentialLayer:
    """Layer that runs the mixer, then the feed-forward part, with norms before and after each."""

    ops: Ops
    input_norm: Norm
    mixer: Mixer
    mixer_out_norm: Norm
    feed_forward_norm: Norm
    feed_forward: FeedForward
    feed_forward_out_norm: Norm
    multiplier: float | None
    """Factor of the results that are added to the residual stream."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Layer`."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.mixer_out_norm(self.mixer(x, step))
        if self.multiplier is not None:
            x = self.ops.scale(x, self.multiplier)  # other ranks may share x
        x, residual = self.feed_forward_norm.add(x, residual)
        x = self.feed_forward_out_norm(self.feed_forward(x))
        if self.multiplier is not None:
            x = self.ops.scale(x, self.multiplier)
        return x, residual


@dataclass(slots=True)
class ParallelLayer:
    """Layer with both parts in parallel: x + mixer(norm(x)) + feed_forward(norm(x))."""

    ops: Ops
    input_norm: Norm
    mixer: Mixer
    feed_forward_norm: Norm | None
    """Norm of the feed-forward part; None: it reads the mixer's input."""
    feed_forward: FeedForward

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Layer`."""
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
    """Layer that norms the sum of each part's input and result (OPT-350m)."""

    mixer: Mixer
    mixer_norm: Norm
    feed_forward: FeedForward
    feed_forward_norm: Norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Layer`; the residual is always None."""
        assert residual is None
        x, _ = self.mixer_norm.add(self.mixer(x, step), x)
        x, _ = self.feed_forward_norm.add(self.feed_forward(x), x)
        return x, None
