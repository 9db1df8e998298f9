"""RMS norm and layer norm, each also fused with the addition of a residual."""

from __future__ import annotations

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


class NoNorm:
    """Changes nothing, where others have a norm."""

    __slots__ = ("add_tensors",)

    def __init__(self, ops: Ops) -> None:
        self.add_tensors = ops.add

    def __call__(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, sum), the same tensor, with sum = x + residual; both [T, D]."""
        total = self.add_tensors(x, residual)
        return total, total


class RMSNorm:
    """Root-mean-square norm.

    Args:
        ops: table of operations.
        weight: [D] in the model's dtype.
        eps: added to the mean square.
        weight_offset: added to the weight (Gemma: 1).
    """

    __slots__ = ("eps", "fused_add", "rms_norm", "weight", "weight_offset")

    def __init__(self, ops: Ops, weight: Tensor, eps: float, weight_offset: float) -> None:
        self.rms_norm = ops.rms_norm
        self.fused_add = ops.fused_add_rms_norm
        self.weight = weight
        self.eps = eps
        self.weight_offset = weight_offset

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of x [T, D]."""
        return self.rms_norm(x, self.weight, self.eps, self.weight_offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum) with sum = x + residual; both [T, D]."""
        return self.fused_add(x, residual, self.weight, self.eps, self.weight_offset)

    def heads_(self, x: Tensor) -> None:
        """Norms each head of x [T, H, D] in place, whatever its strides.

        If the weight is of that size, it norms the H * D elements of a token as one.
        """
        if self.weight.shape[0] != x.shape[2]:
            x = x.flatten(1)
        self.rms_norm(x, self.weight, self.eps, self.weight_offset, out=x)


class LayerNorm:
    """Layer norm.

    Args:
        ops: table of operations.
        weight: [D] in the model's dtype.
        bias: likewise, or None.
        eps: added to the variance.
    """

    __slots__ = ("add_tensors", "bias", "eps", "layer_norm", "weight")

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.layer_norm = ops.layer_norm
        self.add_tensors = ops.add
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of x [T, D]."""
        return self.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum) with sum = x + residual; both [T, D]."""
        total = self.add_tensors(x, residual)
        return self.layer_norm(total, self.weight, self.bias, self.eps), total
