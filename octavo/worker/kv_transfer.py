"""The worker's half of a KV connector beside the steps that a worker runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import msgspec

from octavo import _native
from octavo.errors import ConfigError
from octavo.kv_connector.base import KVConnectorBase, KVConnectorRole
from octavo.kv_connector.pages import KVCaches
from octavo.kv_connector.registry import make_connector
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.worker.model_runner import ModelRunner

# Tokens of a step from which on another thread goes along with it: less is copied faster than that
# thread is woken for each layer.
_LONG_STEP = 64


class KVTransfers:
    """Tells a connector about each step, and others what it has finished.

    Args:
        connector: the worker's half.
        num_layers: layers that this rank keeps something of.
        progress: is told which of them a step has computed.
        report: is given what has been finished, on any thread.
    """

    def __init__(
        self,
        connector: KVConnectorBase,
        num_layers: int,
        progress: _native.StepProgress,
        report: Callable[[KVConnectorOutput], object],
    ) -> None:
        self._connector, self._report = connector, report
        self._num_layers, self._progress = num_layers, progress
        self._beside = ThreadPoolExecutor(1, "octavo-kv-layers")
        self._decoder = msgspec.msgpack.Decoder(connector.metadata_type)
        self._nothing = connector.metadata_type()
        self._lock = threading.Lock()
        connector.notify = self._tell

    @contextlib.contextmanager
    def step(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Loads and saves, each layer while a step computes the next ones."""
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
        self._tell()

    def _go_along(self) -> None:
        """Loads and saves each layer as a step comes to it."""
        for layer in range(self._num_layers):
            self._connector.wait_for_layer_load(layer)
            self._progress.wait(layer + 1)
            if self._stopped:
                return
            self._connector.save_kv_layer(layer)

    def _tell(self) -> None:
        with self._lock:  # a request's blocks go with it
            sent, received = self._connector.get_finished()
            invalid = self._connector.get_block_ids_with_load_errors()
        if sent or received:
            self._report(KVConnectorOutput(sorted(sent), sorted(received), sorted(invalid)))

    def handshake_metadata(self) -> Any:
        """See `KVConnectorBase.get_handshake_metadata`."""
        return self._connector.get_handshake_metadata()

    def shutdown(self) -> None:
        """Ends the connector."""
        self._beside.shutdown()
        self._connector.shutdown()


def make_transfers(
    runner: ModelRunner, num_blocks: int, report: Callable[[KVConnectorOutput], object]
) -> KVTransfers | None:
    """What the settings ask for; None: they ask for nothing.

    Args:
        runner: has its KV cache.
        num_blocks: of it.
        report: see `KVTransfers`.

    Raises:
        ConfigError: the connector cannot be made.
    """
    setup = runner.setup
    layout = setup.kv_layout
    connector = make_connector(setup.config, KVConnectorRole.WORKER, layout)
    if connector is None:
        return None
    if runner.backend.name != "cpu":
        raise ConfigError(
            f"kv_transfer_config is not supported with attention_backend={runner.backend.name}; "
            "use device=cpu with attention_backend=cpu."
        )
    tensors = [tensor.data_ptr() for tensor in runner.state.kv_tensors]
    connector.register_kv_caches(KVCaches(layout, tensors, num_blocks))
    assert runner.progress is not None
    return KVTransfers(connector, len(setup.part.caches), runner.progress, report)
