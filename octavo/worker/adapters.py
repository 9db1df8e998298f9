"""Adapters of a worker: read and packed beside the steps, changed between steps."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo import _native
from octavo.checkpoints.base import Tensors
from octavo.errors import AdapterError, OctavoError
from octavo.kernels.base import Ops
from octavo.kernels.lora import LoraTable, LoraWeight
from octavo.kernels.memory import map_memory
from octavo.kernels.sizes import lora_nbytes
from octavo.layers.adapter import Adapters
from octavo.messages import AdapterChange, AdapterLoaded, AdapterRef
from octavo.models.adapters import AdaptableModel, Slice, open_adapter
from octavo.models.weight_norms import WeightNorms
from octavo.plan.setup import WorkerSetup

logger = logging.getLogger(__name__)

_Weights = dict[str, list[LoraWeight | None]]


class AdapterStore:
    """Reader of a worker's adapters.

    Args:
        setup: the worker's setup.
        ops: operations that pack weights.
        adapters: the live adapters of the model.
        report: callback for the result of each read, on any thread.
        open_checkpoint: opens the checkpoint that the model's weights come from.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        ops: Ops,
        adapters: Adapters,
        report: Callable[[AdapterLoaded], object],
        open_checkpoint: Callable[[], Tensors],
    ) -> None:
        self._setup, self._ops, self._adapters, self._report = setup, ops, adapters, report
        self._open_checkpoint = open_checkpoint
        self._model = AdaptableModel(setup.part, adapters.layers)
        self._weights = setup.part.weights()
        self._thread = ThreadPoolExecutor(1, "octavo-adapters", _native.work_alone)
        self._read: queue.SimpleQueue[tuple[int, _Weights]] = queue.SimpleQueue()
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

        No step may run meanwhile.

        Raises:
            AdapterError: the files of an adapter have changed, or cannot be read.
            ModelError: the weights cannot be read.
        """
        self._thread.submit(self._reload).result()

    def _reload(self) -> None:
        for slot, adapter in self._of_weights.items():
            self._read.put((slot, self._pack(adapter)[0]))

    def _load(self, slot: int, adapter: AdapterRef) -> None:
        try:
            weights, needs_weights = self._pack(adapter)
            if needs_weights:
                self._of_weights[slot] = adapter
            self._read.put((slot, weights))
        except OctavoError as error:
            self._report(AdapterLoaded(slot, str(error), type(error).__name__))
        except Exception as error:  # such as a MemoryError; other adapters are not affected
            logger.exception("the adapter %s could not be read", adapter.path)
            message = f"The adapter {adapter.name!r} could not be read: {error!r}"
            self._report(AdapterLoaded(slot, message))
        else:
            self._report(AdapterLoaded(slot))

    def _pack(self, adapter: AdapterRef) -> tuple[_Weights, bool]:
        """Read an adapter; return its packed weights by linear layer.

        The second value is True if they depend on the model's weights.

        Raises:
            AdapterError: the files cannot be used, or have changed since they were checked.
            ModelError: the model's weights cannot be read, or have changed since they were loaded.
        """
        setup, layers = self._setup, self._adapters.layers
        loaded = open_adapter(
            Path(adapter.path),
            self._model,
            dtype=setup.dtype,
            max_lora_rank=setup.config.lora.max_lora_rank,
        ).read(norms=WeightNorms(self._weights, self._open_checkpoint))
        if loaded.content_hash != adapter.content_hash:
            raise AdapterError(
                f"The files of the adapter {adapter.name!r} in {adapter.path} have changed since "
                "it was loaded; load it again."
            )
        places = [
            (layer, _module_of(layers[layer], one), one)
            for layer, slices in loaded.slices.items()
            for one in slices
        ]
        biases = {layer: layers[layer].bias for layer in loaded.slices}
        affine = [
            one.affine(None if (bias := biases[layer]) is None else self._ops.to_host(bias))
            for layer, _, one in places
        ]
        sizes = [
            layers[layer].weight_nbytes(
                module, one.a.shape[0], setup.dtype, affine=more is not None
            )
            for (layer, module, one), more in zip(places, affine, strict=True)
        ]
        memory = map_memory(sum(sizes))
        weights: _Weights = {
            layer: [None] * (len(layers[layer].bounds) - 1) for layer in loaded.slices
        }
        begin = 0
        for (layer, module, one), more, size in zip(places, affine, sizes, strict=True):
            (rank, inputs), outputs = one.a.shape, one.b.shape[0]
            end = begin + lora_nbytes(rank, outputs, inputs, setup.dtype, affine=more is not None)
            out = self._ops.to_device(memory[begin:end])
            packed = self._ops.pack_lora(one.a, one.b, one.scale, setup.dtype, out, more)
            weights[layer][module] = packed
            begin += size
        return weights, any(one.gain is not None for _, _, one in places)

    def shutdown(self) -> None:
        """End the thread, after the adapter that it reads."""
        self._thread.shutdown(cancel_futures=True)


def _module_of(table: LoraTable, one: Slice) -> int:
    """Return the index of the module whose outputs a slice changes."""
    module: int = table.bounds.tolist().index(one.begin)
    assert table.bounds[module + 1] == one.end
    return module
