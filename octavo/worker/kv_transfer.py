"""Calls to the worker's half of a KV connector before, during and after steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import msgspec

from octavo import _native
from octavo.errors import ConfigError
from octavo.kv_connector.base import KVConnectorWorker
from octavo.kv_connector.pages import KVCaches
from octavo.kv_connector.registry import get_connector
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.worker.model_runner import ModelRunner

# Least tokens of a step that another thread accompanies. A shorter step's layers are copied faster
# than the thread wakes up for each of them.
_LONG_STEP = 64


class KVTransfers:
    """Driver of the worker's half of a connector.

    Args:
        make_connector: returns the half; its argument is the half's `notify`.
        num_layers: layers of this rank that have a cache.
        progress: counter of the layers that a step has computed.
        report: callback for finished transfers, on any thread.
    """

    def __init__(
        self,
        make_connector: Callable[[Callable[[], object]], KVConnectorWorker],
        num_layers: int,
        progress: _native.StepProgress,
        report: Callable[[KVConnectorOutput], object],
    ) -> None:
        self._report = report
        self._num_layers, self._progress = num_layers, progress
        self._beside = ThreadPoolExecutor(1, "octavo-kv-layers")
        self._lock = threading.Lock()
        self._connector = connector = make_connector(self._report_finished)
        self._decoder = msgspec.msgpack.Decoder(connector.metadata_type)
        self._nothing = connector.metadata_type()

    @contextlib.contextmanager
    def step(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Load and save KV in a step: each layer while the step computes the next ones."""
        connector, encoded = self._connector, scheduler_output.kv_connector_metadata
        connector.start_load_kv(self._nothing if encoded is None else self._decoder.decode(encoded))
        self._progress.reset()
        self._stopped, beside = False, None
        if encoded is not None and scheduler_output.total_num_scheduled_tokens >= _LONG_STEP:
            beside = self._beside.submit(self._go_along)
        try:
            yield
            self._progress.reach(self._num_layers)
            if beside is not None:
                beside.result()
            elif encoded is not None:
                self._go_along()
            connector.wait_for_save()
        except BaseException:
            self._stopped = True
            self._progress.reach(self._num_layers)
            if beside is not None:
                wait([beside])
            connector.step_failed()
            raise
        if loaded := scheduler_output.kv_loads_before:
            with self._lock:
                invalid = connector.get_block_ids_with_load_errors()
            self._report(KVConnectorOutput([], loaded, sorted(invalid)))
        self._report_finished()

    def _go_along(self) -> None:
        """Load and save each layer when the step reaches it."""
        for layer in range(self._num_layers):
            self._connector.wait_for_layer_load(layer)
            self._progress.wait(layer + 1)
            if self._stopped:
                return
            self._connector.save_kv_layer(layer)

    def _report_finished(self) -> None:
        with self._lock:  # reports a request together with its failed blocks
            sent, received = self._connector.get_finished()
            invalid = self._connector.get_block_ids_with_load_errors()
        if sent or received:
            self._report(KVConnectorOutput(sorted(sent), sorted(received), sorted(invalid)))

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Implement `KVConnectorWorker`."""
        self._connector.register_kv_caches(kv_caches)

    def handshake_metadata(self) -> Any:
        """Implement `KVConnectorWorker.get_handshake_metadata`."""
        return self._connector.get_handshake_metadata()

    def shutdown(self) -> None:
        """Shut down the connector."""
        self._beside.shutdown()
        self._connector.shutdown()


def make_transfers(
    runner: ModelRunner, num_blocks: int, report: Callable[[KVConnectorOutput], object]
) -> KVTransfers | None:
    """Return the driver of the configured connector; None: no connector is configured.

    Args:
        runner: the model runner, with its KV cache.
        num_blocks: blocks of the KV cache.
        report: see `KVTransfers`.

    Raises:
        ConfigError: the connector cannot be created.
    """
    setup = runner.setup
    transfer = setup.config.cache.kv_transfer_config
    if transfer is None:
        return None
    if runner.backend.name != "cpu":
        raise ConfigError(
            f"kv_transfer_config is not supported with attention_backend={runner.backend.name}; "
            "use device=cpu with attention_backend=cpu."
        )
    layout = setup.kv_layout
    make_half = partial(get_connector(transfer).make_worker_half, setup.config, layout)
    tensors = [tensor.data_ptr() for tensor in runner.state.kv_tensors]
    assert runner.progress is not None
    transfers = KVTransfers(make_half, len(setup.part.caches), runner.progress, report)
    transfers.register_kv_caches(KVCaches(layout, tensors, num_blocks))
    return transfers
