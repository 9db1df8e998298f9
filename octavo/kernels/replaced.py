"""Layers that adapters have in place of one of the model's, and the table for kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.kernels.lora import LINE
from octavo.kernels.sizes import lora_panels
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.system.tensor import Tensor


@dataclass(frozen=True, slots=True)
class ReplacedWeight:
    """Weight of an adapter in place of the model's, made by `Ops.pack_replaced`."""

    weight: Tensor
    """A linear layer's, packed; an embedding's, [tokens, size]."""
    bias: Tensor | None
    """Bias [outputs], in the type of the weight."""


class ReplacedTable:
    """The layers of the adapters in all slots, in place of one layer.

    A change takes effect at the next call of an operation after `Ops.put_adapter_tables`, in a
    recorded step, too.

    Args:
        num_slots: number of adapters.
        shape: shape of the weight: [outputs, inputs], or [tokens, size].
        has_bias: True if the layer has a bias.
        is_embedding: True for an embedding.
    """

    def __init__(
        self, num_slots: int, shape: tuple[int, int], *, has_bias: bool, is_embedding: bool
    ) -> None:
        self.shape, self.has_bias, self.is_embedding = shape, has_bias, is_embedding
        self.addresses = np.zeros((num_slots, 2), np.uint64)
        """Addresses of weight and bias, for kernels: WholeLayer in csrc/lora_args.h."""
        self.weights: list[ReplacedWeight | None] = [None] * num_slots
        """Weights of each slot; None: the adapter has none."""
        self.on_device: object | None = None
        """As in `LoraTable`."""

    def sizes(self, dtype: str) -> tuple[int, int]:
        """Return the bytes of an adapter's weight and of its bias."""
        rows, columns = self.shape
        weight = rows * columns * DTYPE_NBYTES[dtype]
        if not self.is_embedding:
            _, weight = lora_panels(columns, rows, 0, dtype)
        return weight, rows * DTYPE_NBYTES[dtype] if self.has_bias else 0

    def nbytes(self, dtype: str) -> int:
        """Return the bytes of both, each in whole cache lines."""
        return sum(-(-nbytes // LINE) * LINE for nbytes in self.sizes(dtype))

    def set(self, slot: int, own: ReplacedWeight | None) -> None:
        """Put an adapter's layer in a slot; None: it has none."""
        self.weights[slot] = own
        self.addresses[slot] = 0
        if own is not None:
            bias = 0 if own.bias is None else own.bias.data_ptr()
            self.addresses[slot] = own.weight.data_ptr(), bias
