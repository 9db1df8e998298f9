"""`MultiConnector`: all connectors save; the first one that has a prompt loads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_connector.base import (
    KVConnector,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorSettings,
    KVConnectorWorker,
    PrefixCache,
    SavedState,
    transfer_config_of,
)
from octavo.kv_connector.layout import KVLayout
from octavo.kv_connector.pages import KVCaches
from octavo.kv_connector.registry import get_connector
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.request import Request


class MultiSettings(KVConnectorSettings, frozen=True, kw_only=True):
    """`kv_connector_extra_config`; the names are vLLM's."""

    connectors: list[KVTransferConfig]
    """Settings of the connectors, in the order of the lookup."""

    def __post_init__(self) -> None:
        if not self.connectors:
            raise ValueError("connectors is empty; list one or more.")


class MultiMetadata(KVConnectorMetadata, array_like=True):
    """Instructions for the workers in a step."""

    parts: list[bytes | None] = msgspec.field(default_factory=list)
    """Metadata of each connector, as msgpack."""


def _connectors(config: KVTransferConfig) -> list[tuple[KVConnector, KVTransferConfig]]:
    """Return the connectors and their settings.

    Raises:
        ConfigError: a setting is wrong.
    """
    found = []
    for inner in MultiSettings.of(config).connectors:
        connector = get_connector(inner)
        if connector is MultiConnector:
            raise ConfigError(
                "kv_transfer_config: kv_connector_extra_config: connectors has a MultiConnector; "
                "list its connectors instead."
            )
        found.append((connector, msgspec.structs.replace(inner, engine_id=config.engine_id)))
    return found


def _with_transfer(config: EngineConfig, transfer: KVTransferConfig) -> EngineConfig:
    cache = msgspec.structs.replace(config.cache, kv_transfer_config=transfer)
    return msgspec.structs.replace(config, cache=cache)


def _host_nbytes(config: KVTransferConfig) -> int:
    return sum(connector.host_nbytes(inner) for connector, inner in _connectors(config))


def _check_states(config: KVTransferConfig) -> None:
    for connector, inner in _connectors(config):
        connector.check_states(inner)


class MultiScheduler(KVConnectorScheduler):
    """Scheduler's halves of all connectors."""

    def __init__(self, config: EngineConfig, layout: KVLayout) -> None:
        super().__init__(config, layout)
        self._halves: list[KVConnectorScheduler] = []
        self._loading: dict[str, KVConnectorScheduler] = {}
        """The half that loads a request's blocks."""
        self._found: KVConnectorScheduler | None = None
        """The half that has the blocks of the last lookup."""
        try:
            for connector, inner in _connectors(self.transfer_config):
                made = connector.make_scheduler_half(_with_transfer(config, inner), layout)
                self._halves.append(made)
        except BaseException:
            self.shutdown()
            raise

    @property
    def num_expired(self) -> int:
        """Number of requests whose blocks a peer did not fetch in time."""
        return sum(half.num_expired for half in self._halves)

    def set_xfer_handshake_metadata(self, metadata: list[Any]) -> None:
        """Implement `KVConnectorScheduler`."""
        for i, half in enumerate(self._halves):
            half.set_xfer_handshake_metadata([of_rank[i] for of_rank in metadata])

    def bind_prefix_cache(self, prefix_cache: PrefixCache) -> None:
        """Implement `KVConnectorScheduler`."""
        for half in self._halves:
            half.bind_prefix_cache(prefix_cache)

    def note_states(self, saved: Sequence[SavedState], dropped: Sequence[bytes]) -> None:
        """Implement `KVConnectorScheduler`."""
        for half in self._halves:
            half.note_states(saved, dropped)

    def check_request(self, request: Request) -> None:
        """Call the halves that accept `kv_transfer_params`; see `KVConnectorScheduler`."""
        base = KVConnectorScheduler.check_request
        accepting = [half for half in self._halves if type(half).check_request is not base]
        if not accepting:
            super().check_request(request)
        for half in accepting:
            half.check_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Implement `KVConnectorScheduler`."""
        for half in self._halves:
            if not half.transfer_config.loads:
                continue
            found, is_async = half.get_num_new_matched_tokens(request, num_computed_tokens)
            if found:
                self._found = half
                return found, is_async
        return 0, False

    def update_state_after_alloc(
        self, request: Request, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """Implement `KVConnectorScheduler`."""
        if num_external_tokens:
            assert self._found is not None
            self._loading[request.request_id] = self._found
            self._found.update_state_after_alloc(request, block_ids, num_external_tokens)
            return
        for half in self._halves:
            half.update_state_after_alloc(request, block_ids, 0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata | None:
        """Implement `KVConnectorScheduler`."""
        built = [half.build_connector_meta(scheduler_output) for half in self._halves]
        if all(part is None for part in built):
            return None
        encode = msgspec.msgpack.encode
        return MultiMetadata([None if part is None else encode(part) for part in built])

    def step_succeeded(self) -> None:
        """Implement `KVConnectorScheduler`."""
        for half in self._halves:
            half.step_succeeded()

    def steps_failed(self) -> None:
        """Implement `KVConnectorScheduler`."""
        for half in self._halves:
            half.steps_failed()

    def forget_items(self, request: Request) -> None:
        """Implement `KVConnectorScheduler`."""
        for half in self._halves:
            half.forget_items(request)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Implement `KVConnectorScheduler`."""
        for half in self._halves:
            received = [i for i in output.finished_recving if self._loading.get(i) is half]
            half.update_connector_output(msgspec.structs.replace(output, finished_recving=received))
        for request_id in output.finished_recving:
            self._loading.pop(request_id, None)

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Implement `KVConnectorScheduler`; return the first params that a half returns."""
        params = [half.request_finished(request) for half in self._halves]
        return next((found for found in params if found is not None), None)

    def reset_cache(self) -> bool:
        """Implement `KVConnectorScheduler`."""
        done = [half.reset_cache() for half in self._halves]
        return all(done)

    def shutdown(self) -> None:
        """Implement `KVConnectorScheduler`."""
        for half in self._halves:
            half.shutdown()


class MultiWorker(KVConnectorWorker):
    """Workers' halves of all connectors."""

    metadata_type = MultiMetadata

    def __init__(
        self, config: EngineConfig, layout: KVLayout, notify: Callable[[], object]
    ) -> None:
        super().__init__(config, layout, notify)
        self._halves: list[KVConnectorWorker] = []
        try:
            for connector, inner in _connectors(transfer_config_of(config)):
                made = connector.make_worker_half(_with_transfer(config, inner), layout, notify)
                self._halves.append(made)
        except BaseException:
            self.shutdown()
            raise

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Implement `KVConnectorWorker`."""
        for half in self._halves:
            half.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> Any:
        """Implement `KVConnectorWorker`."""
        return [half.get_handshake_metadata() for half in self._halves]

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Implement `KVConnectorWorker`."""
        assert isinstance(metadata, MultiMetadata)
        parts = metadata.parts or [None] * len(self._halves)
        for half, part in zip(self._halves, parts, strict=True):
            kind = half.metadata_type
            half.start_load_kv(kind() if part is None else msgspec.msgpack.decode(part, type=kind))

    def wait_for_layer_load(self, layer: int) -> None:
        """Implement `KVConnectorWorker`."""
        for half in self._halves:
            half.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """Implement `KVConnectorWorker`."""
        for half in self._halves:
            half.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        """Implement `KVConnectorWorker`."""
        for half in self._halves:
            half.wait_for_save()

    def step_failed(self) -> None:
        """Implement `KVConnectorWorker`."""
        for half in self._halves:
            half.step_failed()

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Implement `KVConnectorWorker`."""
        sent, received = set[str](), set[str]()
        for half in self._halves:
            more_sent, more_received = half.get_finished()
            sent |= more_sent
            received |= more_received
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Implement `KVConnectorWorker`."""
        found = [half.get_block_ids_with_load_errors() for half in self._halves]
        return set[int]().union(*found)

    def shutdown(self) -> None:
        """Implement `KVConnectorWorker`."""
        for half in self._halves:
            half.shutdown()


MultiConnector = KVConnector(MultiScheduler, MultiWorker, _host_nbytes, _check_states)
