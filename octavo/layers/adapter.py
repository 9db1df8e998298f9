"""The layers of a model that adapters change, and the adapters in their slots."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.kernels.lora import ExpertPart, LoraTable, LoraWeight
from octavo.kernels.replaced import ReplacedTable, ReplacedWeight
from octavo.kernels.sizes import lora_scratch_nbytes
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class AdaptedLinear:
    """Changes of adapters to one linear layer."""

    adapters: Adapters
    table: LoraTable
    replaced: ReplacedTable | None = None
    """Layers in place of it; None: adapters cannot replace it."""

    @property
    def in_step(self) -> bool:
        """True if a token of the step has an adapter."""
        return self.adapters.slots is not None

    def add(self, out: Tensor, x: Tensor) -> None:
        """Change the layer's results for inputs x, if the step has an adapter.

        Args:
            out: results [T, out_features], of the type of x or float32.
            x: inputs [T, in_features].
        """
        slots = self.adapters.slots
        if slots is not None:
            if self.replaced is not None:
                self.adapters.ops.replace_linear(out, x, slots, self.replaced)
            self.adapters.ops.add_lora(out, x, slots, self.table)


@dataclass(slots=True)
class AdaptedEmbedding:
    """Changes of adapters to the embedding."""

    adapters: Adapters
    table: LoraTable
    replaced: ReplacedTable | None
    """Tables in place of it; None: adapters cannot replace it."""

    def add(self, out: Tensor, ids: Tensor) -> None:
        """Change rows of the table, if the step has an adapter.

        Args:
            out: rows [T, size], of the model's type.
            ids: their tokens, int64 [T].
        """
        slots = self.adapters.slots
        if slots is not None:
            if self.replaced is not None:
                self.adapters.ops.replace_embedding(out, ids, slots, self.replaced)
            self.adapters.ops.add_lora_embedding(out, ids, slots, self.table)


def is_replaceable(name: str, modules_to_save: Collection[str]) -> bool:
    """Return True if adapters may have their own layer in place of a linear one, by its name.

    Args:
        name: the name.
        modules_to_save: `lora_modules_to_save`.
    """
    if name == "lm_head.":
        return "lm_head" in modules_to_save
    return name.startswith("poolers.") and "classify" in name


class Adapters:
    """All layers of a model that adapters may change.

    Args:
        ops: table of operations.
        num_slots: number of adapters that a step may use.
        max_rank: largest rank of an adapter.
        modules_to_save: `lora_modules_to_save`.
        adapts_experts: True if adapters may change experts.
        targets: layers that adapters may change or replace, by their names; None: all.
        moves_experts: True if experts move between processes.
    """

    def __init__(
        self,
        ops: Ops,
        num_slots: int,
        max_rank: int,
        modules_to_save: Collection[str] = (),
        *,
        adapts_experts: bool = True,
        targets: Collection[str] | None = None,
        moves_experts: bool = False,
    ) -> None:
        self.ops, self.targets = ops, targets
        self.moves_experts = moves_experts
        self.in_group = False
        """True if a token of the step has an adapter in any engine that divides the experts."""
        self.adapts_experts = adapts_experts
        self.layers: dict[str, LoraTable | ExpertPart] = {}
        """Adapters of each layer, by the layer's name, such as "layers.0.0.qkv."."""
        self.replaced: dict[str, ReplacedTable] = {}
        """Layers that adapters may replace, by their names, such as "poolers.classify.0."."""
        self.slots: Tensor | None = None
        """Slot of each row that layers compute now, int32 [T], -1 for none; None: no row has an
        adapter, and no kernel is called."""
        self._tables: list[LoraTable] = []
        """Tables of all layers; that of a mixture has those of all experts."""
        self._linear: list[LoraTable] = []
        self._modules_to_save = modules_to_save
        self._num_slots = num_slots
        self._changed: dict[int, list[str]] = {}  # layers that the adapter in a slot changes
        self._max_rank = max_rank

    def layer(
        self,
        name: str,
        outputs: Sequence[int],
        inputs: int,
        bias: Tensor | None = None,
        *,
        has_bias: bool = False,
    ) -> AdaptedLinear:
        """Return the changes to a layer, which has none yet.

        Args:
            name: name of the layer.
            outputs: number of outputs of each stacked module that the rank computes.
            inputs: number of inputs that the rank uses.
            bias: bias of all outputs that the results contain before `AdaptedLinear.add`.
            has_bias: True if the layer has a bias.
        """
        table, replaced = self._add(name, outputs, inputs, bias), None
        self._linear.append(table)
        if is_replaceable(name, self._modules_to_save):
            shape = sum(outputs), inputs
            replaced = ReplacedTable(self._num_slots, shape, has_bias=has_bias, is_embedding=False)
            self.replaced[name] = replaced
        return AdaptedLinear(self, table, replaced)

    def embedding(self, name: str, size: int, vocab_size: int) -> AdaptedEmbedding:
        """Return the changes to the embedding of tokens, which has none yet.

        Args:
            name: name of the layer.
            size: numbers of an embedding.
            vocab_size: number of tokens.
        """
        table, replaced = self._add(name, [size], vocab_size), None
        if "embed_tokens" in self._modules_to_save:
            shape = vocab_size, size
            replaced = ReplacedTable(self._num_slots, shape, has_bias=False, is_embedding=True)
            self.replaced[name] = replaced
        return AdaptedEmbedding(self, table, replaced)

    def _add(
        self, name: str, outputs: Sequence[int], inputs: int, bias: Tensor | None = None
    ) -> LoraTable:
        table = LoraTable(self._num_slots, outputs, inputs, self._max_rank, bias)
        self._tables.append(table)
        self.layers[name] = table
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
        slots: Tensor = self.ops.embedding(self.slots.view(-1, 1), rows).view(-1)
        return slots

    def experts(
        self, names: Mapping[int, str], experts: int, outputs: Sequence[int], inputs: int
    ) -> LoraTable:
        """Return the changes to one product of all experts of a mixture, which have none yet.

        Args:
            names: name of the layer of each expert that the rank computes, by the expert's number.
            experts: number of experts, also of other ranks.
            outputs: as in `layer`, of one expert.
            inputs: number of inputs of one expert.
        """
        table = LoraTable(self._num_slots, outputs, inputs, self._max_rank, experts=experts)
        self._tables.append(table)
        self._linear.append(table)
        self.layers |= {name: ExpertPart(table, expert) for expert, name in names.items()}
        return table

    def scratch_nbytes(self, threads: int) -> int:
        """Return an upper bound of the bytes that the operations use.

        `Ops.replace_linear` has four rows of float32 inputs in each thread.
        """
        sizes = [(len(table.bounds) - 1, table.inputs) for table in self._linear]
        return max(
            (lora_scratch_nbytes(self._max_rank, *size, threads) for size in sizes), default=0
        ) + 16 * threads * max((it.shape[1] for it in self.replaced.values()), default=0)

    def set(
        self,
        slot: int,
        weights: Mapping[str, Sequence[LoraWeight | None]],
        replaced: Mapping[str, ReplacedWeight],
    ) -> None:
        """Put an adapter in a slot, between two steps; it takes effect at once.

        Args:
            slot: index of the slot.
            weights: weights for each module of each layer that the adapter changes; they must stay
                in memory until the slot has another adapter.
            replaced: the layers in place of those of the model.
        """
        for name, layers in self.replaced.items():
            layers.set(slot, replaced.get(name))
        for name in self._changed.pop(slot, ()):
            self.layers[name].clear(slot)
        for name, each in weights.items():
            self.layers[name].set(slot, each)
        self._changed[slot] = list(weights)
        self.put_tables()

    @property
    def used(self) -> list[int]:
        """Slots with adapters."""
        return [slot for slot, changed in self._changed.items() if changed]

    def put_tables(self) -> None:
        """Copy the tables of all layers to the device; needed before the first step."""
        self.ops.put_adapter_tables([*self._tables, *self.replaced.values()])

    def clear(self, slot: int) -> None:
        """Remove the adapter from a slot."""
        self.set(slot, {}, {})
