"""The layers of a model that adapters change, and the adapters in their slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.lora import LoraTable, LoraWeight
from octavo.kernels.sizes import lora_scratch_nbytes
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class AdaptedLinear:
    """Changes of adapters to one linear layer."""

    adapters: Adapters
    table: LoraTable

    @property
    def in_step(self) -> bool:
        """True if a token of the step has an adapter."""
        return self.adapters.slots is not None

    def add(self, out: Tensor, x: Tensor) -> None:
        """Add the changes to the layer's results for inputs x, if the step has an adapter.

        Args:
            out: results [T, out_features], of the type of x or float32.
            x: inputs [T, in_features].
        """
        slots = self.adapters.slots
        if slots is not None:
            self.adapters.ops.add_lora(out, x, slots, self.table)


@dataclass(slots=True)
class AdaptedEmbedding:
    """Changes of adapters to the embedding."""

    adapters: Adapters
    table: LoraTable

    def add(self, out: Tensor, ids: Tensor) -> None:
        """Add the changes to rows of the table, if the step has an adapter.

        Args:
            out: rows [T, size], of the model's type.
            ids: their tokens, int64 [T].
        """
        slots = self.adapters.slots
        if slots is not None:
            self.adapters.ops.add_lora_embedding(out, ids, slots, self.table)


class Adapters:
    """All layers of a model that adapters may change.

    Args:
        ops: table of operations.
        num_slots: number of adapters that a step may use.
        max_rank: largest rank of an adapter.
    """

    def __init__(self, ops: Ops, num_slots: int, max_rank: int) -> None:
        self.ops = ops
        self.layers: dict[str, LoraTable] = {}
        """Adapters of each layer, by the layer's name, such as "layers.0.0.qkv."."""
        self.slots: Tensor | None = None
        """Slot of each row that layers compute now, int32 [T], -1 for none; None: no row has an
        adapter, and no kernel is called."""
        self._linear: list[LoraTable] = []
        self._num_slots = num_slots
        self._max_rank = max_rank

    def layer(self, name: str, outputs: Sequence[int], inputs: int) -> AdaptedLinear:
        """Return the changes to a layer, which has none yet.

        Args:
            name: name of the layer.
            outputs: number of outputs of each stacked module that the rank computes.
            inputs: number of inputs that the rank uses.
        """
        table = self._add(name, outputs, inputs)
        self._linear.append(table)
        return AdaptedLinear(self, table)

    def embedding(self, name: str, size: int, vocab_size: int) -> AdaptedEmbedding:
        """Return the changes to the embedding of tokens, which has none yet.

        Args:
            name: name of the layer.
            size: numbers of an embedding.
            vocab_size: number of tokens.
        """
        return AdaptedEmbedding(self, self._add(name, [size], vocab_size))

    def _add(self, name: str, outputs: Sequence[int], inputs: int) -> LoraTable:
        table = self.layers[name] = LoraTable(self._num_slots, outputs, inputs, self._max_rank)
        return table

    @contextmanager
    def use(self, slots: Tensor | None) -> Iterator[None]:
        """Compute rows with these `slots` within the context."""
        before, self.slots = self.slots, slots
        try:
            yield
        finally:
            self.slots = before

    def slots_of(self, rows: Tensor) -> Tensor | None:
        """Return the slots of some of the rows: int32 [M] for indices int64 [M].

        A recorded step gathers them when it runs.
        """
        if self.slots is None:
            return None
        numbers = self.slots.view("float32").view(len(self.slots), 1)  # the bits are only copied
        slots: Tensor = self.ops.embedding(numbers, rows).view("int32").view(len(rows))
        return slots

    def slot_nbytes(self, dtype: str) -> int:
        """Return the bytes of an adapter of the largest rank that changes all layers."""
        return sum(
            table.weight_nbytes(module, table.max_rank, dtype)
            for table in self.layers.values()
            for module in range(len(table.bounds) - 1)
        )

    def scratch_nbytes(self, threads: int) -> int:
        """Return an upper bound of the bytes that `Ops.add_lora` uses."""
        return max(
            lora_scratch_nbytes(table.max_rank, len(table.bounds) - 1, table.inputs, threads)
            for table in self._linear
        )

    def set(self, slot: int, weights: Mapping[str, Sequence[LoraWeight | None]]) -> None:
        """Put an adapter in a slot, between two steps; it takes effect at once.

        Args:
            slot: index of the slot.
            weights: weights for each module of each layer that the adapter changes; they must stay
                in memory until the slot has another adapter.
        """
        for name, table in self.layers.items():
            if name in weights:
                table.set(slot, weights[name])
            else:
                table.clear(slot)

    def clear(self, slot: int) -> None:
        """Remove the adapter from a slot."""
        self.set(slot, {})
