"""Adapters of a worker: read and packed beside the steps, changed between steps."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.adapters import Replacement, Slice, open_adapter
from octavo.models.weight_norms import WeightNorms
from octavo.plan.setup import WorkerSetup
from octavo.worker.platform import Platform

logger = logging.getLogger(__name__)

_Weights = dict[str, list[LoraWeight | None]]
_Replaced = dict[str, ReplacedWeight]


class AdapterStore:
    """Reader of a worker's adapters.

    Args:
        setup: the worker's setup.
        platform: platform of the device.
        device: the model's device.
        ops: operations that pack weights.
        adapters: the live adapters of the model.
        report: callback for the result of each read, on any thread.
        open_checkpoint: opens the checkpoint that the model's weights come from.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        platform: Platform,
        device: Any,
        ops: Ops,
        adapters: Adapters,
        report: Callable[[AdapterLoaded], object],
        open_checkpoint: Callable[[], Tensors],
    ) -> None:
        self._setup, self._ops, self._adapters, self._report = setup, ops, adapters, report
        self._platform, self._device = platform, device
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
        self._thread = ThreadPoolExecutor(1, "octavo-adapters", _native.work_alone)
        self._read: queue.SimpleQueue[tuple[int, _Weights, _Replaced]] = queue.SimpleQueue()
        self._of_weights: dict[int, AdapterRef] = {}
        """Adapters by slot that depend on the model's weights."""

    def begin_step(self, changes: Sequence[AdapterChange]) -> None:
        """Put the adapters that were read into their slots, then begin the changes.

        No step may run meanwhile.
        """
        while not self._read.empty():
            self._adapters.set(*self._read.get())
        for change in changes:
            self._of_weights.pop(change.slot, None)
            if change.adapter is None:
                self._adapters.clear(change.slot)
            else:
                self._thread.submit(self._load, change.slot, change.adapter)

    def wait(self) -> None:
        """Wait until all adapters have been read whose change has begun."""
        self._thread.submit(lambda: None).result()

    def reload(self) -> None:
        """Read the adapters again that depend on the model's weights, which have changed.

        No step may run meanwhile. Results are reported, as for other reads.
        """
        again, self._of_weights = self._of_weights, {}
        for slot, adapter in again.items():
            self._thread.submit(self._load, slot, adapter)
        self.wait()

    def _load(self, slot: int, adapter: AdapterRef) -> None:
        try:
            with self._platform.beside_steps(self._device):
                weights, replaced, needs_weights = self._pack(slot, adapter)
            if needs_weights:
                self._of_weights[slot] = adapter
            self._read.put((slot, weights, replaced))
        except OctavoError as error:
            self._report(AdapterLoaded(slot, str(error), type(error).__name__))
        except Exception as error:  # such as a MemoryError; other adapters are not affected
            logger.exception("the adapter %s could not be read", adapter.path)
            message = f"The adapter {adapter.name!r} could not be read: {error!r}"
            self._report(AdapterLoaded(slot, message))
        else:
            self._report(AdapterLoaded(slot))

    def _pack(self, slot: int, adapter: AdapterRef) -> tuple[_Weights, _Replaced, bool]:
        """Read an adapter into a slot's memory; return its packed weights, and its own layers.

        No step uses the slot from now on.

        The last value is True if they depend on the model's weights.

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
        biases = {
            layer: None if (bias := layers[layer].bias) is None else self._ops.to_host(bias)
            for layer in weights
        }
        memory = self._memory[slot]
        begin, needs_weights = 0, False

        def pack(layer: str, one: Slice) -> None:
            nonlocal begin, needs_weights
            (rank, inputs), outputs = one.a.shape, one.b.shape[0]
            affine = one.affine(biases[layer])
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
        return weights, replaced, needs_weights

    def shutdown(self) -> None:
        """End the thread, after the adapter that it reads."""
        self._thread.shutdown(cancel_futures=True)
