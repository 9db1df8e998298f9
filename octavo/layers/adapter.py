"""The layers of a model that adapters change, and the adapters in their slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.kernels.base import Ops
from octavo.kernels.lora import LINE, LoraTable, LoraWeight
from octavo.kernels.sizes import lora_scratch_nbytes, packed_nbytes
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.system.tensor import Tensor

if TYPE_CHECKING:
    from octavo.layers.linear import Linear


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


@dataclass(slots=True)
class ReplacedLinear:
    """Linear layer in whose place adapters may have their own (PEFT: modules_to_save)."""

    outputs: int
    inputs: int
    has_bias: bool
    linears: list[Linear | None]
    """The layer of each slot; None: the adapter has none."""

    def nbytes(self, dtype: str) -> int:
        """Return the bytes of the weight and the bias of an adapter's layer, in whole lines."""
        weight, bias = self.sizes(dtype)
        return weight + bias

    def sizes(self, dtype: str) -> tuple[int, int]:
        """Return the bytes of an adapter's packed weight and of its bias, in whole lines."""
        bias = self.outputs * DTYPE_NBYTES[dtype] if self.has_bias else 0
        weight = packed_nbytes(self.outputs, self.inputs, dtype)
        return -(-weight // LINE) * LINE, -(-bias // LINE) * LINE


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
        self.replaced: dict[str, ReplacedLinear] = {}
        """Layers that adapters may replace, by their names, such as "poolers.classify.0."."""
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

    def replace(self, name: str, outputs: int, inputs: int, *, has_bias: bool) -> ReplacedLinear:
        """Return the layers of adapters in place of a linear layer; there are none yet.

        Args:
            name: name of the layer.
            outputs: number of its outputs.
            inputs: number of its inputs.
            has_bias: True if it has a bias.
        """
        linears: list[Linear | None] = [None] * self._num_slots
        self.replaced[name] = ReplacedLinear(outputs, inputs, has_bias, linears)
        return self.replaced[name]

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
        """Return the bytes of an adapter of the largest rank that changes and replaces all."""
        changes = sum(
            table.weight_nbytes(module, table.max_rank, dtype)
            for table in self.layers.values()
            for module in range(len(table.bounds) - 1)
        )
        return changes + sum(layer.nbytes(dtype) for layer in self.replaced.values())

    def scratch_nbytes(self, threads: int) -> int:
        """Return an upper bound of the bytes that `Ops.add_lora` uses."""
        return max(
            lora_scratch_nbytes(table.max_rank, len(table.bounds) - 1, table.inputs, threads)
            for table in self._linear
        )

    def set(
        self,
        slot: int,
        weights: Mapping[str, Sequence[LoraWeight | None]],
        linears: Mapping[str, Linear],
    ) -> None:
        """Put an adapter in a slot, between two steps; it takes effect at once.

        Args:
            slot: index of the slot.
            weights: weights for each module of each layer that the adapter changes; they must stay
                in memory until the slot has another adapter.
            linears: the layers that replace those of the model.
        """
        for name, layer in self.replaced.items():
            layer.linears[slot] = linears.get(name)
        for name, table in self.layers.items():
            if name in weights:
                table.set(slot, weights[name])
            else:
                table.clear(slot)

    def clear(self, slot: int) -> None:
        """Remove the adapter from a slot."""
        self.set(slot, {}, {})
