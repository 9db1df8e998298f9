"""`MultiConnector`: several at once. All save; the first one that has a prompt loads it."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_connector.base import KVConnectorBase, KVConnectorMetadata, KVConnectorRole
from octavo.kv_connector.layout import KVLayout
from octavo.kv_connector.pages import KVCaches
from octavo.kv_connector.registry import get_connector_class
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.request import Request


class MultiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`; as vLLM calls it."""

    connectors: list[KVTransferConfig]
    """Their settings, in the order in which they are asked for a prompt."""

    @classmethod
    def of(cls, config: KVTransferConfig) -> MultiSettings:
        """Reads them.

        Raises:
            ConfigError: one is wrong.
        """
        where = "kv_transfer_config: kv_connector_extra_config"
        try:
            found = msgspec.convert(config.kv_connector_extra_config, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}") from None
        if not found.connectors:
            raise ConfigError(f"{where}: connectors is empty; give one or more.")
        for inner in found.connectors:
            if get_connector_class(inner) is MultiConnector:
                raise ConfigError(f"{where}: connectors has a MultiConnector; give its connectors.")
        engine_id = config.engine_id
        named = [msgspec.structs.replace(each, engine_id=engine_id) for each in found.connectors]
        return cls(connectors=named)


class MultiMetadata(KVConnectorMetadata, array_like=True):
    """What workers do with a step."""

    parts: list[bytes | None] = msgspec.field(default_factory=list)
    """Of each connector, as msgpack."""


class MultiConnector(KVConnectorBase):
    """See the module."""

    metadata_type = MultiMetadata

    def __init__(self, config: EngineConfig, role: KVConnectorRole, layout: KVLayout) -> None:
        super().__init__(config, role, layout)
        self._connectors: list[KVConnectorBase] = []
        self._loading: dict[str, KVConnectorBase] = {}
        """Which one loads a request's blocks."""
        self._found: KVConnectorBase | None = None
        """Which one has what was asked for last."""
        try:
            for transfer in MultiSettings.of(self.transfer_config).connectors:
                cache = msgspec.structs.replace(config.cache, kv_transfer_config=transfer)
                inner = msgspec.structs.replace(config, cache=cache)
                self._connectors.append(get_connector_class(transfer)(inner, role, layout))
        except BaseException:
            self.shutdown()
            raise
        for connector in self._connectors:
            connector.notify = lambda: self.notify()

    @classmethod
    def host_nbytes(cls, config: KVTransferConfig) -> int:
        """See `KVConnectorBase`."""
        connectors = MultiSettings.of(config).connectors
        return sum(get_connector_class(inner).host_nbytes(inner) for inner in connectors)

    # The scheduler's half

    @property
    def num_expired(self) -> int:
        """See `KVConnectorBase`."""
        return sum(connector.num_expired for connector in self._connectors)

    def set_xfer_handshake_metadata(self, metadata: list[Any]) -> None:
        """See `KVConnectorBase`."""
        for i, connector in enumerate(self._connectors):
            connector.set_xfer_handshake_metadata([of_rank[i] for of_rank in metadata])

    def check_request(self, request: Request) -> None:
        """See `KVConnectorBase`; those that take `kv_transfer_params` look at them."""
        base = KVConnectorBase.check_request
        takers = [c for c in self._connectors if type(c).check_request is not base]
        if not takers:
            super().check_request(request)
        for connector in takers:
            connector.check_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            if not connector.transfer_config.loads:
                continue
            found, beside = connector.get_num_new_matched_tokens(request, num_computed_tokens)
            if found:
                self._found = connector
                return found, beside
        return 0, False

    def update_state_after_alloc(
        self, request: Request, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """See `KVConnectorBase`."""
        if num_external_tokens:
            assert self._found is not None
            self._loading[request.request_id] = self._found
            self._found.update_state_after_alloc(request, block_ids, num_external_tokens)
            return
        for connector in self._connectors:
            connector.update_state_after_alloc(request, block_ids, 0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata | None:
        """See `KVConnectorBase`."""
        built = [c.build_connector_meta(scheduler_output) for c in self._connectors]
        if all(part is None for part in built):
            return None
        encode = msgspec.msgpack.encode
        return MultiMetadata([None if part is None else encode(part) for part in built])

    def step_succeeded(self) -> None:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            connector.step_succeeded()

    def steps_failed(self) -> None:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            connector.steps_failed()

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            received = [i for i in output.finished_recving if self._loading.get(i) is connector]
            mine = msgspec.structs.replace(output, finished_recving=received)
            connector.update_connector_output(mine)
        for request_id in output.finished_recving:
            self._loading.pop(request_id, None)

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """See `KVConnectorBase`; the first one that has something to say is heard."""
        said = [connector.request_finished(request) for connector in self._connectors]
        return next((params for params in said if params is not None), None)

    def reset_cache(self) -> bool:
        """See `KVConnectorBase`."""
        done = [connector.reset_cache() for connector in self._connectors]
        return all(done)

    # The worker's half

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            connector.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> Any:
        """See `KVConnectorBase`."""
        return [connector.get_handshake_metadata() for connector in self._connectors]

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """See `KVConnectorBase`."""
        assert isinstance(metadata, MultiMetadata)
        parts = metadata.parts or [None] * len(self._connectors)
        for connector, part in zip(self._connectors, parts, strict=True):
            kind = connector.metadata_type
            connector.start_load_kv(
                kind() if part is None else msgspec.msgpack.decode(part, type=kind)
            )

    def wait_for_layer_load(self, layer: int) -> None:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            connector.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            connector.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            connector.wait_for_save()

    def step_failed(self) -> None:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            connector.step_failed()

    def get_finished(self) -> tuple[set[str], set[str]]:
        """See `KVConnectorBase`."""
        sent, received = set[str](), set[str]()
        for connector in self._connectors:
            more_sent, more_received = connector.get_finished()
            sent |= more_sent
            received |= more_received
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `KVConnectorBase`."""
        found = [connector.get_block_ids_with_load_errors() for connector in self._connectors]
        return set[int]().union(*found)

    def shutdown(self) -> None:
        """See `KVConnectorBase`."""
        for connector in self._connectors:
            connector.shutdown()
