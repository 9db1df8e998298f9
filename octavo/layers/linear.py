"""Matrix product with a packed weight."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Activation, Ops, activate
from octavo.kernels.routing import Gate
from octavo.kernels.weights import PackedWeight, QuantizedWeight
from octavo.layers.adapter import AdaptedLinear
from octavo.layers.shared import Columns
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class Linear:
    """Linear layer y = x W^T + b."""

    ops: Ops
    weight: PackedWeight | QuantizedWeight
    """Weight [out_features, in_features]; in fused projections (q, k and v, or gate and up) the
    rows of all, stacked."""
    bias: Tensor | None = None
    """Bias [out_features] in the model's dtype."""
    columns: Columns | None = None
    """This rank's columns of the result; None: there are no other columns."""
    adapted: AdaptedLinear | None = None
    """Changes of adapters; None: adapters are off."""

    def __call__(self, x: Tensor, out_dtype: str | None = None) -> Tensor:
        """Map [T, in_features] to [T, out_features], in `out_dtype` or else the model's dtype.

        With `columns`, return the columns of all ranks, in memory that must not be changed.
        """
        if self.columns is None:
            return self._multiply(x, out_dtype)
        whole, own = self.columns.empty(x.shape[0], out_dtype or x.dtype)
        self._multiply(x, out_dtype, own)
        self.columns.join()
        return whole

    def act_and_mul(self, x: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor:
        """Map [T, in_features] to [T, out_features / 2]: act(gate) * up of gate and up, stacked.

        `out` as in `Ops.linear`.
        """
        if self.adapted is not None and self.adapted.in_step:
            return self.ops.act_and_mul(self._multiply(x, None), activation, out)
        return self.ops.linear_act_and_mul(x, self.weight, self.bias, activation, out)

    def act(self, x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        """Map [T, in_features] to act(result) [T, out_features]; `out` as in `Ops.linear`."""
        if self.columns is not None or (self.adapted is not None and self.adapted.in_step):
            return activate(self.ops, self(x), activation, out)
        return self.ops.linear_act(x, self.weight, self.bias, activation, out)

    def _multiply(self, x: Tensor, out_dtype: str | None, out: Tensor | None = None) -> Tensor:
        """Return this rank's columns; `out` as in `Ops.linear`."""
        out = self.ops.linear(x, self.weight, self.bias, out_dtype, out)
        if self.adapted is not None:
            self.adapted.add(out, x)
        return out


@dataclass(slots=True)
class StackedLinear(Linear):
    """Linear layer whose weight is several weights of different forms."""

    weights: tuple[PackedWeight | QuantizedWeight, ...] = ()
    """Weights [out_features_i, in_features], from the first output on."""

    def act_and_mul(self, x: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor:
        """Map [T, in_features] to [T, out_features / 2]; see `Linear`."""
        return self.ops.act_and_mul(self._multiply(x, None), activation, out)

    def act(self, x: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        """Map [T, in_features] to act(result) [T, out_features]; see `Linear`."""
        return activate(self.ops, self(x), activation, out)

    def _multiply(self, x: Tensor, out_dtype: str | None, out: Tensor | None = None) -> Tensor:
        """Return the products with all weights: out [T, out_features]."""
        assert out_dtype in (None, x.dtype)
        if out is None:
            width = sum(weight.n for weight in self.weights)
            out = self.ops.empty(x.shape[0], width, like=x)
        begin = 0
        for weight in self.weights:
            end = begin + weight.n
            bias = None if self.bias is None else self.bias[begin:end]
            self.ops.linear(x, weight, bias, None, out[:, begin:end])
            begin = end
        if self.adapted is not None:
            self.adapted.add(out, x)
        return out


@dataclass(slots=True)
class SummedLinear(Linear):
    """Linear layer that sums the results of the ranks' inputs, in order."""

    num_summands: int = 1

    def __call__(self, x: Tensor, out_dtype: str | None = None) -> Tensor:
        """Map the rank's inputs [T, in_features] to [T, out_features].

        If ranks split rows, only the rank's own rows of the result are defined.
        """
        assert self.columns is not None
        whole, own = self.columns.empty(x.shape[0], "float32")
        self.ops.linear(x, self.weight, None, "float32", own)
        if self.adapted is not None:
            self.adapted.add(own, x)
        self.columns.join()
        dtype = out_dtype or x.dtype
        if not self.columns.splits_rows:
            return self.ops.sum_parts(whole, self.num_summands, self.bias, dtype)
        assert dtype == x.dtype
        out = self.ops.empty(x.shape[0], whole.shape[1] // self.num_summands, like=x)
        with self.columns.own_rows() as rows:
            self.ops.sum_parts(whole[rows], self.num_summands, self.bias, dtype, out[rows])
        return out
