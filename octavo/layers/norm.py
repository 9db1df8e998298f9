"""RMS norm and layer norm, each also fused with the addition of a residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.kernels.base import Ops


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of x [T, D]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum) with sum = x + residual; both [T, D]."""
        ...


@dataclass(slots=True)
class NoNorm:
    """Changes nothing, where others have a norm."""

    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, sum), the same tensor, with sum = x + residual; both [T, D]."""
        total = self.ops.add(x, residual)
        return total, total


@dataclass(slots=True)
class RMSNorm:
    """Root-mean-square norm."""

    ops: Ops
    weight: Tensor
    """[D] in the model's dtype."""
    eps: float
    """Added to the mean square."""
    weight_offset: float
    """Added to the weight (Gemma: 1)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of x [T, D]."""
        return self.ops.rms_norm(x, self.weight, self.eps, self.weight_offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum) with sum = x + residual; both [T, D]."""
        return self.ops.fused_add_rms_norm(x, residual, self.weight, self.eps, self.weight_offset)

    def heads_(self, x: Tensor) -> None:
        """Norms each head of x [T, H, D] in place, whatever its strides.

        If the weight is of that size, it norms the H * D elements of a token as one.
        """
        if self.weight.shape[0] != x.shape[2]:
            x = x.view(x.shape[0], -1)
        self.ops.rms_norm(x, self.weight, self.eps, self.weight_offset, out=x)


@dataclass(slots=True)
class LayerNorm:
    """Layer norm."""

    ops: Ops
    weight: Tensor
    """[D] in the model's dtype."""
    bias: Tensor | None
    """Likewise."""
    eps: float
    """Added to the variance."""

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of x [T, D]."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum) with sum = x + residual; both [T, D]."""
        total = self.ops.add(x, residual)
        return self.ops.layer_norm(total, self.weight, self.bias, self.eps), total
