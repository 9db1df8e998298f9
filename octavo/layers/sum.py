"""Blocks that read the same input, and whose results are added."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.layer import Block
from octavo.layers.norm import Norm
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class LiveTerm:
    """Live block with factors and norms of its input and its result."""

    block: Block
    input_factor: float
    result_factor: float
    norm: Norm
    out_norm: Norm


@dataclass(slots=True)
class Sum:
    """Sum of blocks of the same input."""

    ops: Ops
    terms: tuple[LiveTerm, ...]

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]."""
        total = None
        for term in self.terms:
            result = term.block(term.norm(self._scaled(x, term.input_factor)), step)
            result = self._scaled(term.out_norm(result), term.result_factor)
            total = result if total is None else self.ops.add(total, result)
        assert total is not None
        return total

    def _scaled(self, x: Tensor, factor: float) -> Tensor:
        return x if factor == 1.0 else self.ops.scale(x, factor)
