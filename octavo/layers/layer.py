"""Layers: blocks around the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.kernels.base import Ops
from octavo.layers.attention import Attention
from octavo.layers.norm import Norm
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


class Block(Protocol):
    """Live block."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Compute [T, hidden_size] from [T, hidden_size]; the result is a new tensor."""
        ...


@dataclass(slots=True)
class LiveSublayer:
    """Live block with the norms around it."""

    block: Block
    norm: Norm
    """Norm of the block's input; in a post layer, of the sum of input and output."""
    out_norm: Norm
    """Norm of the block's output."""
    has_norm: bool
    """True if the block has a norm; otherwise `norm` changes nothing."""
    reads_input: bool = False
    """True if the block reads the layer's input, in a post layer."""


class Layer(Protocol):
    """Layer of a decoder."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer.

        Args:
            x: [T, hidden_size].
            residual: [T, hidden_size]; x + residual is the residual stream. None: x is the stream.
            step: the step.

        Returns:
            (x, residual) after the layer.
        """
        ...


@dataclass(slots=True)
class SequentialLayer:
    """Layer in which each block reads the residual stream with all earlier blocks' outputs."""

    ops: Ops
    sublayers: Sequence[LiveSublayer]
    multiplier: float | None
    """Factor on each block's output before it is added to the residual stream."""
    scalar: Tensor | None = None
    """Factor [1] on the residual stream after the layer."""
    final_norm: Norm | None = None
    """Norm of the residual stream after the layer, in place of the factor."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Layer`."""
        for part in self.sublayers:
            if residual is None:
                x, residual = part.norm(x), x
            else:
                x, residual = part.norm.add(x, residual)
            x = part.out_norm(part.block(x, step))
            if self.multiplier is not None:
                x = self.ops.scale(x, self.multiplier)  # x may be shared with other ranks
        if self.final_norm is not None:
            assert residual is not None
            return self.final_norm.add(x, residual)[0], None
        if self.scalar is None:
            return x, residual
        assert residual is not None
        total = self.ops.add(x, residual)
        return self.ops.multiply(total, self.scalar, out=total), None

    def store(self, x: Tensor, residual: Tensor | None, step: StepContext) -> None:
        """Store the keys and values of the first block, which is attention; compute no more."""
        first = self.sublayers[0]
        assert isinstance(first.block, Attention)
        normed = first.norm(x) if residual is None else first.norm.add(x, residual)[0]
        first.block.store(normed, step)


@dataclass(slots=True)
class ParallelLayer:
    """Layer in which all blocks read the layer's input: x + a(norm(x)) + b(norm(x))."""

    ops: Ops
    sublayers: Sequence[LiveSublayer]
    """Sublayers; one without a norm reads the same input as the first one."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Layer`."""
        first, *others = self.sublayers
        if residual is None:
            x, residual = first.norm(x), x
        else:
            x, residual = first.norm.add(x, residual)
        total = first.block(x, step)
        for part in others:
            normed = part.norm(residual) if part.has_norm else x
            total = self.ops.add(total, part.block(normed, step))
        return total, residual


@dataclass(slots=True)
class PostNormLayer:
    """Layer that norms the sum of each block's input and output (OPT-350m)."""

    sublayers: Sequence[LiveSublayer]

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Layer`; the residual stream is x alone."""
        assert residual is None
        given = x
        for part in self.sublayers:
            x, _ = part.norm.add(part.block(given if part.reads_input else x, step), x)
        return x, None
