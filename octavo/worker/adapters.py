"""Adapters of a worker: read and packed beside the steps, changed between steps."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo.errors import AdapterError, OctavoError
from octavo.kernels.base import Ops
from octavo.layers.adapter import Adapters, LoraSlice
from octavo.messages import AdapterChange, AdapterLoaded, AdapterRef
from octavo.models.adapters import AdaptableModel, open_adapter
from octavo.plan.setup import WorkerSetup

logger = logging.getLogger(__name__)

_Slices = dict[str, list[LoraSlice]]


class AdapterStore:
    """Reader of a worker's adapters.

    Args:
        setup: the worker's setup.
        ops: operations that pack weights.
        adapters: the live adapters of the model.
        report: callback for the result of each read, on any thread.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        ops: Ops,
        adapters: Adapters,
        report: Callable[[AdapterLoaded], object],
    ) -> None:
        self._setup, self._ops, self._adapters, self._report = setup, ops, adapters, report
        self._model = AdaptableModel(setup.part, adapters.layers)
        self._thread = ThreadPoolExecutor(1, "octavo-adapters")
        self._read: queue.SimpleQueue[tuple[int, _Slices]] = queue.SimpleQueue()

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
            self._read.put((slot, self._pack(adapter)))
        except OctavoError as error:
            self._report(AdapterLoaded(slot, str(error), type(error).__name__))
        except Exception as error:  # such as a MemoryError; other adapters are not affected
            logger.exception("the adapter %s could not be read", adapter.path)
            message = f"The adapter {adapter.name!r} could not be read: {error!r}"
            self._report(AdapterLoaded(slot, message))
        else:
            self._report(AdapterLoaded(slot))

    def _pack(self, adapter: AdapterRef) -> _Slices:
        """Read an adapter; return its packed slices by linear layer.

        Raises:
            AdapterError: the files cannot be used, or have changed since they were checked.
        """
        setup = self._setup
        file = open_adapter(
            Path(adapter.path),
            self._model,
            dtype=setup.dtype,
            max_lora_rank=setup.config.lora.max_lora_rank,
        )
        loaded = file.read()
        if loaded.content_hash != adapter.content_hash:
            raise AdapterError(
                f"The files of the adapter {adapter.name!r} in {adapter.path} have changed since "
                "it was loaded; load it again."
            )
        return {
            layer: [
                LoraSlice(one.begin, one.end, self._ops.pack_lora(one.a, one.b), one.scale)
                for one in slices
            ]
            for layer, slices in loaded.slices.items()
        }

    def shutdown(self) -> None:
        """End the thread, after the adapter that it reads."""
        self._thread.shutdown(cancel_futures=True)
