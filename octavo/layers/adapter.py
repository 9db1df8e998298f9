"""The linear layers of a model that adapters change, and the adapters in their slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.lora import ExpertPart, LoraTable, LoraWeight
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


class Adapters:
    """All linear layers of a model that adapters may change.

    Args:
        ops: table of operations.
        num_slots: number of adapters that a step may use.
        max_rank: largest rank of an adapter.
        adapts_experts: True if adapters may change experts.
    """

    def __init__(
        self, ops: Ops, num_slots: int, max_rank: int, *, adapts_experts: bool = True
    ) -> None:
        self.ops = ops
        self.adapts_experts = adapts_experts
        self.layers: dict[str, LoraTable | ExpertPart] = {}
        """Adapters of each layer, by the layer's name, such as "layers.0.0.qkv."."""
        self.slots: Tensor | None = None
        """Slot of each token of the step that runs or is recorded, int32 [T], -1 for none; None: no
        token has an adapter, and no kernel is called."""
        self._num_slots = num_slots
        self._changed: dict[int, list[str]] = {}  # layers that the adapter in a slot changes
        self._max_rank = max_rank

    def layer(self, name: str, outputs: Sequence[int], inputs: int) -> AdaptedLinear:
        """Return the changes to a layer, which has none yet.

        Args:
            name: name of the layer.
            outputs: number of outputs of each stacked module that the rank computes.
            inputs: number of inputs that the rank uses.
        """
        table = self.layers[name] = LoraTable(self._num_slots, outputs, inputs, self._max_rank)
        return AdaptedLinear(self, table)

    def experts(
        self, names: Mapping[int, str], experts: int, outputs: Sequence[int], inputs: int
    ) -> LoraTable:
        """Return the changes to one product of all experts of a mixture, which have none yet.

        Args:
            names: name of the layer of each expert that the rank computes, by the expert's number.
            experts: number of experts, also of other ranks.
            outputs: as in `layer`, of one expert.
            inputs: likewise.
        """
        table = LoraTable(self._num_slots, outputs, inputs, self._max_rank, experts)
        self.layers |= {name: ExpertPart(table, expert) for expert, name in names.items()}
        return table

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
            for table in self.layers.values()
        )

    def set(self, slot: int, weights: Mapping[str, Sequence[LoraWeight | None]]) -> None:
        """Put an adapter in a slot, between two steps; it takes effect at once.

        Args:
            slot: index of the slot.
            weights: weights for each module of each layer that the adapter changes; they must stay
                in memory until the slot has another adapter.
        """
        for name in self._changed.pop(slot, ()):
            self.layers[name].clear(slot)
        for name, each in weights.items():
            self.layers[name].set(slot, each)
        self._changed[slot] = list(weights)
        self.put_tables()

    def put_tables(self) -> None:
        """Copy the tables of all layers to the device; needed before the first step."""
        tables = [it for it in self.layers.values() if isinstance(it, LoraTable)]
        self.ops.put_lora_tables(tables)

    def clear(self, slot: int) -> None:
        """Remove the adapter from a slot."""
        self.set(slot, {})
