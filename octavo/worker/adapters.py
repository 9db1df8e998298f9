"""Adapters of a worker: read and packed beside the steps, changed between steps."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo import _native
from octavo.checkpoints.base import Tensors
from octavo.errors import AdapterError, OctavoError
from octavo.kernels.base import Ops
from octavo.kernels.lora import LoraWeight
from octavo.kernels.replaced import ReplacedWeight
from octavo.kernels.sizes import lora_nbytes
from octavo.layers.adapter import Adapters
from octavo.messages import AdapterChange, AdapterLoaded, AdapterRef
from octavo.models.adaptable_model import AdaptableModel, targeted_layers
from octavo.models.adapters import Replacement, Slice, open_adapter
from octavo.models.weight_norms import WeightNorms
from octavo.plan.setup import WorkerSetup
from octavo.worker.platform import Platform

logger = logging.getLogger(__name__)

_Weights = dict[str, list[LoraWeight | None]]
_Replaced = dict[str, ReplacedWeight]


def make_adapters(setup: WorkerSetup, ops: Ops) -> Adapters | None:
    """Return the live adapters of a model that is loaded next; None: adapters are off."""
    config, lora = setup.config, setup.config.lora
    if not lora.enable_lora:
        return None
    return Adapters(
        ops,
        lora.num_in_memory,
        lora.max_lora_rank,
        lora.lora_modules_to_save,
        adapts_experts=config.adapts_experts,
        targets=targeted_layers(setup.part, lora),
        moves_experts=config.device.enable_eplb,
    )


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """Adapter that has been read."""

    weights: _Weights
    """Packed weights by layer."""
    replaced: _Replaced
    """Its own layers."""
    needs_weights: bool
    """True if they depend on the model's weights."""


class ModelAdapters:
    """Adapters of one model of a worker, and their memory.

    Args:
        setup: setup of the model.
        platform: platform of the device.
        ops: operations that pack weights.
        adapters: the live adapters of the model.
        open_checkpoint: opens the checkpoint that the model's weights come from.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        platform: Platform,
        ops: Ops,
        adapters: Adapters,
        open_checkpoint: Callable[[], Tensors],
    ) -> None:
        self._setup, self._ops, self._adapters = setup, ops, adapters
        lora = setup.config.lora
        self._model = AdaptableModel(
            setup.part, adapters.layers, lora.lora_modules_to_save, lora.lora_target_modules
        )
        num_slots, nbytes = lora.num_in_memory, self._model.slot_nbytes(adapters, setup.dtype)
        self._memory = platform.allocate_cache(num_slots, nbytes, ops)
        """Memory of each slot: uint8 [slots, slot_nbytes]."""
        self.nbytes = num_slots * nbytes
        """Size of this memory."""
        adapters.put_tables()
        self._open_checkpoint = open_checkpoint
        self._weights = setup.part.weights()

    def set(self, slot: int, packed: PackedAdapter | None) -> None:
        """Put an adapter into its slot, or none. No step may run meanwhile."""
        if packed is None:
            self._adapters.clear(slot)
        else:
            self._adapters.set(slot, packed.weights, packed.replaced)

    def pack(self, slot: int, adapter: AdapterRef) -> PackedAdapter:
        """Read an adapter into a slot's memory.

        No step uses the slot from now on.

        Raises:
            AdapterError: the files cannot be used, or have changed since they were checked.
            ModelError: the model's weights cannot be read, or have changed since they were loaded.
        """
        setup, layers = self._setup, self._adapters.layers
        opened = open_adapter(
            Path(adapter.path),
            self._model,
            dtype=setup.dtype,
            max_lora_rank=setup.config.lora.max_lora_rank,
        )
        weights: _Weights = {
            shape.layer: [None] * (len(layers[shape.layer].bounds) - 1)
            for shape, _ in opened.slices
        }
        memory = self._memory[slot]
        begin, needs_weights = 0, False

        def pack(layer: str, one: Slice) -> None:
            nonlocal begin, needs_weights
            (rank, inputs), outputs = one.a.shape, one.b.shape[0]
            bias = None if one.gain is None else layers[layer].bias
            affine = one.affine(None if bias is None else self._ops.to_host(bias))
            has_affine = affine is not None
            end = begin + lora_nbytes(rank, outputs, inputs, setup.dtype, affine=has_affine)
            out = memory[begin:end]
            module = layers[layer].module_of(one.begin, one.end)
            packed = self._ops.pack_lora(one.a, one.b, one.scale, setup.dtype, out, affine)
            weights[layer][module] = packed
            begin += layers[layer].weight_nbytes(module, rank, setup.dtype, affine=has_affine)
            needs_weights |= one.gain is not None

        replaced: _Replaced = {}

        def pack_whole(layer: str, one: Replacement) -> None:
            nonlocal begin
            table = self._adapters.replaced[layer]
            end = begin + table.nbytes(setup.dtype)
            out = memory[begin:end]
            replaced[layer] = self._ops.pack_replaced(one.weight, one.bias, setup.dtype, table, out)
            begin = end

        norms = WeightNorms(self._weights, self._open_checkpoint)
        if opened.read(pack, norms, pack_whole) != adapter.content_hash:
            raise AdapterError(
                f"The files of the adapter {adapter.name!r} in {adapter.path} have changed since "
                "it was loaded; load it again."
            )
        return PackedAdapter(weights, replaced, needs_weights)


class AdapterStore:
    """Reader of a worker's adapters.

    Args:
        platform: platform of the device.
        device: the model's device.
        model: the adapters of the model.
        report: callback for the result of each read, on any thread.
    """

    def __init__(
        self,
        platform: Platform,
        device: Any,
        model: ModelAdapters,
        report: Callable[[AdapterLoaded], object],
    ) -> None:
        self._platform, self._device, self._report = platform, device, report
        self.model = model
        self.drafter: ModelAdapters | None = None
        """Adapters of the draft model; None: this rank does not draft, or drafts without them."""
        self._thread = ThreadPoolExecutor(1, "octavo-adapters", _native.work_alone)
        self._read: queue.SimpleQueue[tuple[int, PackedAdapter, PackedAdapter | None]] = (
            queue.SimpleQueue()
        )
        self._of_weights: dict[int, AdapterRef] = {}
        """Adapters by slot that depend on the weights of their models."""

    def begin_step(self, changes: Sequence[AdapterChange]) -> None:
        """Put the adapters that were read into their slots, then begin the changes.

        No step may run meanwhile.
        """
        while not self._read.empty():
            slot, adapter, draft = self._read.get()
            self._set(slot, adapter, draft)
        for change in changes:
            self._of_weights.pop(change.slot, None)
            if change.adapter is None:
                self._set(change.slot, None, None)
            else:
                self._thread.submit(self._load, change.slot, change.adapter)

    def _set(self, slot: int, adapter: PackedAdapter | None, draft: PackedAdapter | None) -> None:
        self.model.set(slot, adapter)
        if self.drafter is not None:
            self.drafter.set(slot, draft)

    def wait(self) -> None:
        """Wait until all adapters have been read whose change has begun."""
        self._thread.submit(lambda: None).result()

    def reload(self) -> None:
        """Read the adapters again that depend on the models' weights, which have changed.

        No step may run meanwhile. Results are reported, as for other reads.
        """
        again, self._of_weights = self._of_weights, {}
        for slot, adapter in again.items():
            self._thread.submit(self._load, slot, adapter)
        self.wait()

    def _load(self, slot: int, adapter: AdapterRef) -> None:
        try:
            with self._platform.beside_steps(self._device):
                packed, draft = self.model.pack(slot, adapter), None
                if self.drafter is not None and adapter.draft is not None:
                    draft = self.drafter.pack(slot, adapter.draft)
            if packed.needs_weights or (draft is not None and draft.needs_weights):
                self._of_weights[slot] = adapter
            self._read.put((slot, packed, draft))
        except OctavoError as error:
            self._report(AdapterLoaded(slot, str(error), type(error).__name__))
        except Exception as error:  # such as a MemoryError; other adapters are not affected
            logger.exception("the adapter %s could not be read", adapter.path)
            message = f"The adapter {adapter.name!r} could not be read: {error!r}"
            self._report(AdapterLoaded(slot, message))
        else:
            self._report(AdapterLoaded(slot))

    def shutdown(self) -> None:
        """End the thread, after the adapter that it reads."""
        self._thread.shutdown(cancel_futures=True)
