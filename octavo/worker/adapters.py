"""Adapters of a worker: read and packed beside the steps, changed between steps."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octavo.errors import AdapterError, OctavoError
from octavo.kernels.base import Ops
from octavo.kernels.lora import ExpertPart, LoraTable, LoraWeight
from octavo.kernels.sizes import lora_nbytes
from octavo.layers.adapter import Adapters
from octavo.messages import AdapterChange, AdapterLoaded, AdapterRef
from octavo.models.adapters import AdaptableModel, Slice, open_adapter
from octavo.plan.setup import WorkerSetup
from octavo.worker.platform import Platform

logger = logging.getLogger(__name__)

_Weights = dict[str, list[LoraWeight | None]]


class AdapterStore:
    """Reader of a worker's adapters.

    Args:
        setup: the worker's setup.
        platform: platform of the device.
        device: the model's device.
        ops: operations that pack weights.
        adapters: the live adapters of the model.
        report: callback for the result of each read, on any thread.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        platform: Platform,
        device: Any,
        ops: Ops,
        adapters: Adapters,
        report: Callable[[AdapterLoaded], object],
    ) -> None:
        self._setup, self._ops, self._adapters, self._report = setup, ops, adapters, report
        self._platform, self._device = platform, device
        num_slots, nbytes = setup.config.lora.num_in_memory, adapters.slot_nbytes(setup.dtype)
        self._memory = platform.allocate_cache(num_slots, nbytes, ops)
        """Memory of each slot: uint8 [slots, slot_nbytes]."""
        self.nbytes = num_slots * nbytes
        """Size of this memory."""
        adapters.put_tables()
        self._model = AdaptableModel(setup.part, adapters.layers)
        self._thread = ThreadPoolExecutor(1, "octavo-adapters")
        self._read: queue.SimpleQueue[tuple[int, _Weights]] = queue.SimpleQueue()

    def begin_step(self, changes: Sequence[AdapterChange]) -> None:
        """Put the adapters that were read into their slots, then begin the changes.

        No step may run meanwhile.
        """
        while not self._read.empty():
            self._adapters.set(*self._read.get())
        for change in changes:
            if change.adapter is None:
                self._adapters.clear(change.slot)
            else:
                self._thread.submit(self._load, change.slot, change.adapter)

    def _load(self, slot: int, adapter: AdapterRef) -> None:
        try:
            with self._platform.beside_steps(self._device):
                weights = self._pack(slot, adapter)
            self._read.put((slot, weights))
        except OctavoError as error:
            self._report(AdapterLoaded(slot, str(error), type(error).__name__))
        except Exception as error:  # such as a MemoryError; other adapters are not affected
            logger.exception("the adapter %s could not be read", adapter.path)
            message = f"The adapter {adapter.name!r} could not be read: {error!r}"
            self._report(AdapterLoaded(slot, message))
        else:
            self._report(AdapterLoaded(slot))

    def _pack(self, slot: int, adapter: AdapterRef) -> _Weights:
        """Read an adapter into a slot's memory; return its packed weights by linear layer.

        No step uses the slot from now on.

        Raises:
            AdapterError: the files cannot be used, or have changed since they were checked.
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
        begin = 0

        def pack(layer: str, one: Slice) -> None:
            nonlocal begin
            (rank, inputs), outputs = one.a.shape, one.b.shape[0]
            end = begin + lora_nbytes(rank, outputs, inputs, setup.dtype)
            out = memory[begin:end]
            module = _module_of(layers[layer], one)
            packed = self._ops.pack_lora(one.a, one.b, one.scale, setup.dtype, out)
            weights[layer][module] = packed
            begin += layers[layer].weight_nbytes(module, rank, setup.dtype)

        if opened.read(pack) != adapter.content_hash:
            raise AdapterError(
                f"The files of the adapter {adapter.name!r} in {adapter.path} have changed since "
                "it was loaded; load it again."
            )
        return weights

    def shutdown(self) -> None:
        """End the thread, after the adapter that it reads."""
        self._thread.shutdown(cancel_futures=True)


def _module_of(table: LoraTable | ExpertPart, one: Slice) -> int:
    """Return the index of the module whose outputs a slice changes."""
    module: int = table.bounds.tolist().index(one.begin)
    assert table.bounds[module + 1] == one.end
    return module
