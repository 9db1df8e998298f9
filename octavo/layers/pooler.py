"""Pooler: from the hidden states of a text to a vector or to scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.layers.adapter import Adapters
from octavo.layers.linear import Linear
from octavo.layers.norm import Norm
from octavo.system.tensor import Tensor, dense, from_numpy

Floats = NDArray[np.float32]


@dataclass(slots=True)
class Dense:
    """Layer of a pooler: norm(activation(linear(x)))."""

    linear: Linear | None
    activation: str
    norm: Norm | None


@dataclass(slots=True, eq=False)
class Pooler:
    """Pooling of hidden states, and the layers after it."""

    ops: Ops
    dtype: str
    """Type of the model."""
    pooling: Sequence[str]
    """Ways of pooling, as in `PoolerSpec`."""
    layers: Sequence[Dense]
    token_layers: Sequence[Dense] = ()
    """Layers of each token before the pooling."""
    adapters: Adapters | None = None
    """Adapters, which may change the layers; None: they are off."""

    def of_tokens(self, hidden: Floats, slot: int = -1) -> Floats:
        """Map the hidden states float32 [tokens, n] to what is pooled, float32 [tokens, m].

        Args:
            hidden: the hidden states of one text.
            slot: slot of the text's adapter; -1: none.
        """
        return self._compute(self.token_layers, hidden, [slot] * len(hidden))

    def head(self, pooled: Floats, slots: Sequence[int] = ()) -> Floats:
        """Map pooled vectors float32 [R, n] to the results, float32 [R, size].

        A row of the result depends on its row of the input only.

        Args:
            pooled: the vectors.
            slots: slot of each row's adapter; -1: none. Empty: no row has one.
        """
        return self._compute(self.layers, pooled, slots)

    def _compute(self, layers: Sequence[Dense], pooled: Floats, slots: Sequence[int]) -> Floats:
        if max(slots, default=-1) < 0:
            return self._compute_rows(layers, pooled)
        assert self.adapters is not None
        with self.adapters.use(self.ops.to_device(from_numpy(np.array(slots, np.int32)))):
            return self._compute_rows(layers, pooled)

    def _compute_rows(self, layers: Sequence[Dense], pooled: Floats) -> Floats:
        for layer in layers:
            if layer.linear is not None:
                y: Tensor = layer.linear(self._as_model(pooled), "float32")
                pooled = _activate(layer.activation, self.ops, y)
            if layer.norm is not None:
                normed = layer.norm(self._as_model(pooled))
                pooled = self.ops.to_host(normed).astype(np.float32)
        return pooled

    def _as_model(self, x: Floats) -> Tensor:
        """Return numbers in the model's type on the device."""
        return self.ops.to_device(dense(from_numpy(np.ascontiguousarray(x)), self.dtype))


def _activate(name: str, ops: Ops, y: Tensor) -> Floats:
    x: Floats = np.asarray(ops.to_host(ops.gelu(y, "none") if name == "gelu" else y))
    return _ACTIVATIONS[name](x)


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "none": lambda x: x,
    "gelu": lambda x: x,  # `Ops.gelu` has computed it
    "margin": lambda x: x[:, 1:] - x[:, :1],
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "log1p_relu": lambda x: np.log1p(np.maximum(x, np.float32(0))),
    "log1p_log1p_relu": lambda x: np.log1p(np.log1p(np.maximum(x, np.float32(0)))),
    "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
    "silu": lambda x: (x / (np.float32(1) + np.exp(-x))).astype(np.float32),
}


class PooledRow:
    """Pooling of one text, whose tokens arrive in chunks of any size.

    The sums are made token by token in float32, so that they are the same for any chunks.

    Args:
        pooling: ways of pooling, as in `PoolerSpec`.
    """

    def __init__(self, pooling: Sequence[str]) -> None:
        self._pooling = pooling
        self._parts: dict[str, Floats] = {}

    def add(self, hidden: Floats, first: int) -> None:
        """Add the hidden states float32 [tokens, n] of a chunk, from position `first` on."""
        for name in self._pooling:
            if name == "cls":
                if first == 0:
                    self._parts[name] = hidden[0].copy()
            elif name == "last":
                self._parts[name] = hidden[-1].copy()
            elif name == "max":
                self._fold(name, np.maximum, hidden)
            elif name == "weighted_mean":
                weights = np.arange(first + 1, first + len(hidden) + 1, dtype=np.float32)
                self._fold(name, np.add, hidden * weights[:, None])
            else:
                self._fold("sum", np.add, hidden)

    def _fold(self, name: str, function: np.ufunc, rows: Floats) -> None:
        """Fold the rows into the result so far, one after the other."""
        if name in self._parts:
            rows = np.concatenate([self._parts[name][None], rows])
        self._parts[name] = function.reduce(rows, axis=0)

    def result(self, num_tokens: int) -> Floats:
        """Return the joined vectors of a text with this number of tokens: float32 [n]."""
        found = []
        for name in self._pooling:
            if name == "mean":
                found.append(self._parts["sum"] / np.float32(num_tokens))
            elif name == "mean_sqrt_len":
                found.append(self._parts["sum"] / np.sqrt(np.float32(num_tokens)))
            elif name == "weighted_mean":
                total = np.float32(num_tokens * (num_tokens + 1) // 2)
                found.append(self._parts[name] / total)
            else:
                found.append(self._parts[name])
        return found[0] if len(found) == 1 else np.concatenate(found)
