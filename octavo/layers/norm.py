"""RMS norm and layer norm, each also fused with the addition of a residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.kernels.base import Ops
from octavo.layers.shared import Columns
from octavo.system.tensor import Tensor

Pair = tuple[Tensor, Tensor]


class Norm(Protocol):
    """Norm over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, D]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Pair:
        """Return (norm(sum), sum) with sum = x + residual; both [T, D]."""
        ...


@dataclass(slots=True)
class NoNorm:
    """Identity in place of a norm."""

    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        """Return x itself."""
        return x

    def add(self, x: Tensor, residual: Tensor) -> Pair:
        """Return (sum, sum), the same tensor, with sum = x + residual; both [T, D]."""
        total = self.ops.add(x, residual)
        return total, total


@dataclass(slots=True)
class LayerScale:
    """Product with learned factors, in place of a norm."""

    ops: Ops
    weight: Tensor
    """Factors [D]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, D] times the factors."""
        return self.ops.multiply(x, self.weight)

    def add(self, x: Tensor, residual: Tensor) -> Pair:
        """Return (sum times the factors, sum) with sum = x + residual; both [T, D]."""
        total = self.ops.add(x, residual)
        return self.ops.multiply(total, self.weight), total


@dataclass(slots=True)
class Standard:
    """Difference from a bias, times factors, in place of a norm."""

    ops: Ops
    bias: Tensor
    """Bias [D] of numbers that are `scale` times as large."""
    weight: Tensor
    """Factors [D]."""
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return (x - bias / scale) * factors for x [T, D]."""
        bias = self.ops.scale(self.bias.view(1, -1), -1 / self.scale).view(-1)
        return self.ops.multiply(self.ops.add(x, bias), self.weight)

    def add(self, x: Tensor, residual: Tensor) -> Pair:
        """Return (result for the sum, sum) with sum = x + residual; both [T, D]."""
        total = self.ops.add(x, residual)
        return self(total), total


@dataclass(slots=True)
class RMSNorm:
    """Root-mean-square norm."""

    ops: Ops
    weight: Tensor
    """Weight [D] in the model's dtype."""
    eps: float
    """Term added to the mean square."""
    weight_offset: float
    """Term added to the weight (Gemma: 1)."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the norm of x [T, D]; `out` as in `Ops.linear`."""
        return self.ops.rms_norm(x, self.weight, self.eps, self.weight_offset, out)

    def add(self, x: Tensor, residual: Tensor, out: Pair | None = None) -> Pair:
        """Return (norm(sum), sum) with sum = x + residual; both [T, D]; `out` as in `Ops`."""
        return self.ops.fused_add_rms_norm(
            x, residual, self.weight, self.eps, self.weight_offset, out
        )

    def heads_(self, x: Tensor) -> None:
        """Norm each head of x [T, H, D] in place, with any strides.

        If the weight has H * D elements, norm all elements of a token as one.
        """
        if self.weight.shape[0] != x.shape[2]:
            x = x.view(x.shape[0], -1)
        self.ops.rms_norm(x, self.weight, self.eps, self.weight_offset, out=x)


@dataclass(slots=True)
class ScaledNorm:
    """Norm whose results have a factor."""

    ops: Ops
    norm: RMSNorm | NoNorm
    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, D], times the factor."""
        return self.ops.scale(self.norm(x), self.factor)

    def add(self, x: Tensor, residual: Tensor) -> Pair:
        """Return (result for the sum, sum) with sum = x + residual; both [T, D]."""
        normed, total = self.norm.add(x, residual)
        return self.ops.scale(normed, self.factor), total


@dataclass(slots=True)
class HeadFactors:
    """Factors of the numbers of each head, in place of a norm."""

    ops: Ops
    weight: Tensor
    """Factors [D]."""

    def heads_(self, x: Tensor) -> None:
        """Multiply each head of x [T, H, D] in place, with any strides of tokens and heads."""
        self.ops.multiply(x, self.weight, out=x)


@dataclass(slots=True)
class GroupNorm:
    """Root-mean-square norm of each group of a row's numbers."""

    ops: Ops
    weight: Tensor
    """Weight [D] in the model's dtype."""
    ones: Tensor | None
    """Ones [D / groups] if there are several groups."""
    groups: int
    eps: float
    """Term added to the mean square."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, D]."""
        if self.ones is None:
            return self.ops.rms_norm(x, self.weight, self.eps)
        groups = x.view(x.shape[0], self.groups, -1)
        out = self.ops.rms_norm(groups, self.ones, self.eps).view(*x.shape)
        return self.ops.multiply(out, self.weight, out=out)


@dataclass(slots=True)
class LayerNorm:
    """Layer norm."""

    ops: Ops
    weight: Tensor
    """Weight [D] in the model's dtype."""
    bias: Tensor | None
    """Bias [D] in the model's dtype."""
    eps: float
    """Term added to the variance."""
    weight_offset: float = 0.0
    """Term added to the weight (Nemotron: 1)."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the norm of x [T, D]; `out` as in `Ops.linear`."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, self.weight_offset, out)

    def add(self, x: Tensor, residual: Tensor, out: Pair | None = None) -> Pair:
        """Return (norm(sum), sum) with sum = x + residual; both [T, D]; `out` as in `Ops`."""
        return self.ops.fused_add_layer_norm(
            x, residual, self.weight, self.bias, self.eps, self.weight_offset, out
        )


@dataclass(slots=True)
class HeadNorms:
    """Layer norm with separate weights for each head, without a bias."""

    ops: Ops
    weights: tuple[Tensor, ...]
    """Weight [D] of each head in the model's dtype."""
    eps: float
    """Term added to the variance."""

    def heads_(self, x: Tensor) -> None:
        """Norm each head of x [T, H, D] in place, with any strides."""
        for head, weight in zip(x.unbind(1), self.weights, strict=True):
            self.ops.layer_norm(head, weight, None, self.eps, out=head)


@dataclass(slots=True)
class RowsNorm:
    """Norm with rows split between the ranks (sequence parallelism).

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 4.2.2,
    except that a rank has every n-th row of n ranks, so that each has a share of every step. The
    addends need only be defined in a rank's own rows; so is the sum.
    """

    norm: RMSNorm | LayerNorm | None
    """Norm of each row; None: only the sum is computed."""
    ops: Ops
    columns: Columns
    """Columns of the buffer that collects all rows."""
    joins: bool = True
    """False if nobody reads the rows of other ranks, so that the rows need not be collected."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, D]."""
        if self.norm is None:
            return x
        out = self._empty(x)
        with self.columns.own_rows() as rows:
            self.norm(x[rows], out[rows])
        return self._join(out)

    def add(self, x: Tensor, residual: Tensor) -> Pair:
        """Return (norm(sum), sum) with sum = x + residual; both [T, D]."""
        out, total = self._empty(x), self.ops.empty(*x.shape, like=x)
        with self.columns.own_rows() as rows:
            if self.norm is None:
                self.ops.add(x[rows], residual[rows], out[rows])
                self.ops.add(x[rows], residual[rows], total[rows])
            else:
                self.norm.add(x[rows], residual[rows], (out[rows], total[rows]))
        return self._join(out), total

    def _empty(self, x: Tensor) -> Tensor:
        if self.joins:
            return self.columns.empty(x.shape[0], x.dtype)[0]
        return self.ops.empty(*x.shape, like=x)

    def _join(self, out: Tensor) -> Tensor:
        if self.joins:
            self.columns.join()
        return out
