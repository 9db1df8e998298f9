"""Adapters of one linear layer: packed weights, and the table in which kernels find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.sizes import lora_nbytes
from octavo.system.tensor import Tensor

LANES, PANEL = 16, 64
"""Rows of a panel of A and of B: kLoraLanes and kLoraPanel in csrc/lora_args.h."""

LINE = 64
"""Bytes of a cache line; each weight takes up whole lines."""

_SLICE = np.dtype(
    [("a", "u8"), ("b", "u8"), ("affine", "u8"), ("rank", "i8"), ("scale", "f4")], align=True
)
"""LoraSlice in csrc/lora_args.h."""
SLICE_WORDS = _SLICE.itemsize // 8
"""Words of 64 bits of a slice."""


@dataclass(frozen=True, slots=True)
class LoraWeight:
    """Packed weights of an adapter for some outputs of a linear layer, made by `Ops.pack_lora`.

    Attributes:
        a: [rank, K], packed.
        b: [N, rank], packed.
        rank: rank.
        n: N, the number of outputs.
        k: K, the number of inputs of the layer.
        scale: factor of the product.
        affine: gain and offset of each output, float32 [panels, 2, PANEL]: the changed result y
            becomes gain * y + offset. None: it stays.
    """

    a: Tensor
    b: Tensor
    rank: int
    n: int
    k: int
    scale: float
    affine: Tensor | None = None


def affine_panels(affine: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return gains and offsets [2, N] in the order of `LoraWeight.affine`."""
    n = affine.shape[1]
    padded = np.zeros((2, -(-n // PANEL) * PANEL), np.float32)
    padded[:, :n] = affine
    return np.ascontiguousarray(padded.reshape(2, -1, PANEL).swapaxes(0, 1))


class LoraTable:
    """The adapters in the slots of one linear layer.

    A change takes effect at the next call of `Ops.add_lora` after `Ops.put_adapter_tables`, in a
    recorded step, too.

    Args:
        num_slots: number of adapters.
        outputs: number of outputs of each stacked module of the layer, which one adapter changes
            separately.
        inputs: number of inputs of the layer.
        max_rank: largest rank of an adapter.
        bias: bias [N] that the results contain when they are changed; None: they contain none.
        experts: number of experts of a mixture, each of which has such a layer: row `slot * experts
            + expert` of the table has an adapter's changes of an expert.
    """

    def __init__(
        self,
        num_slots: int,
        outputs: Sequence[int],
        inputs: int,
        max_rank: int,
        bias: Tensor | None = None,
        experts: int = 1,
    ) -> None:
        self.inputs = inputs
        self.experts = experts
        num_slots *= experts
        self.max_rank = max_rank
        self.bias = bias
        self.bounds = np.cumsum([0, *outputs])
        """Bounds of the outputs of each module: int64 [modules + 1]."""
        self.slices = np.zeros((num_slots, len(outputs)), _SLICE)
        """Addresses, for kernels."""
        self.weights: list[list[LoraWeight | None]] = [
            [None] * len(outputs) for _ in range(num_slots)
        ]
        """Weights of each slot for each module; None: no change."""
        self.on_device: object | None = None
        """Copy on the device, from `Ops.put_adapter_tables`; None: there is no copy."""

    def weight_nbytes(self, module: int, rank: int, dtype: str, *, affine: bool) -> int:
        """Return the bytes of a packed weight for a module, up to the next cache line.

        Args:
            module: index of the module.
            rank: rank of the adapter.
            dtype: type of the packed weight.
            affine: True for a weight with gains and offsets.
        """
        outputs = int(self.bounds[module + 1] - self.bounds[module])
        nbytes = lora_nbytes(rank, outputs, self.inputs, dtype, affine=affine)
        return -(-nbytes // LINE) * LINE

    def module_of(self, begin: int, end: int) -> int:
        """Return the index of the module with these outputs."""
        module: int = self.bounds.tolist().index(begin)
        assert self.bounds[module + 1] == end
        return module

    def set(self, slot: int, weights: Sequence[LoraWeight | None]) -> None:
        """Put an adapter in a slot: its weights for each module."""
        for i, weight in enumerate(weights):
            self.slices[slot, i] = (0, 0, 0, 0, 0)
            if weight is not None:
                assert weight.rank <= self.max_rank
                assert weight.k == self.inputs
                assert weight.n == self.bounds[i + 1] - self.bounds[i]
                affine = 0 if weight.affine is None else weight.affine.data_ptr()
                address = weight.a.data_ptr(), weight.b.data_ptr(), affine
                self.slices[slot, i] = (*address, weight.rank, weight.scale)
        self.weights[slot] = list(weights)

    def clear(self, slot: int) -> None:
        """Remove the adapter from a slot."""
        self.set(slot, [None] * len(self.weights[slot]))


class ExpertPart:
    """The part of a table that one expert has, as a table of its own.

    Args:
        table: the table of all experts.
        expert: number of the expert.
    """

    def __init__(self, table: LoraTable, expert: int) -> None:
        self.inputs, self.max_rank, self.bounds = table.inputs, table.max_rank, table.bounds
        self.weight_nbytes, self.module_of = table.weight_nbytes, table.module_of
        self.bias: Tensor | None = None
        self._table, self._expert = table, expert

    def set(self, slot: int, weights: Sequence[LoraWeight | None]) -> None:
        """Put an adapter in a slot; see `LoraTable.set`."""
        self._table.set(slot * self._table.experts + self._expert, weights)

    def clear(self, slot: int) -> None:
        """Remove the adapter from a slot."""
        self._table.clear(slot * self._table.experts + self._expert)
