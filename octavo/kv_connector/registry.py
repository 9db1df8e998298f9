"""Registry of connectors by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_connector.base import (
    KVConnector,
    KVConnectorBase,
    KVConnectorRole,
    KVConnectorWorker,
    accept_states,
    refuse_states,
)
from octavo.kv_connector.layout import KVLayout

_CONNECTORS = {
    "OffloadingConnector": "octavo.kv_connector.offload",
    "MultiConnector": "octavo.kv_connector.multi",
    "P2PConnector": "octavo.kv_connector.p2p",
    "SharedStorageConnector": "octavo.kv_connector.shared_storage",
}
"""Modules of the built-in connectors."""
_RENAMED = {"ExampleConnector": "SharedStorageConnector"}
"""Newer names in vLLM."""


def get_connector(config: KVTransferConfig) -> KVConnector:
    """Return the connector that the settings name.

    Raises:
        ConfigError: no connector has that name.
    """
    name, path = config.kv_connector, config.kv_connector_module_path
    if path is None:
        name = _RENAMED.get(name, name)
    where = _CONNECTORS.get(name) if path is None else path
    if where is None:
        raise ConfigError(
            f"kv_transfer_config: kv_connector={name!r} is not one of {', '.join(_CONNECTORS)}; "
            "a custom connector needs kv_connector_module_path, the name of its module."
        )
    try:
        found = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"kv_transfer_config: kv_connector_module_path={where!r} has no {name} ({error})."
        ) from error
    if isinstance(found, type) and issubclass(found, KVConnectorBase):
        return _of_class(found)
    if not isinstance(found, KVConnector):
        raise ConfigError(
            f"kv_transfer_config: {where}.{name} is no octavo.kv_connector.base.KVConnectorBase; "
            "derive it from that class."
        )
    return found


def _of_class(connector: type[KVConnectorBase]) -> KVConnector:
    """Return a connector whose halves are objects of one class."""

    def make_worker_half(
        config: EngineConfig, layout: KVLayout, notify: Callable[[], object]
    ) -> KVConnectorWorker:
        made = connector(config, KVConnectorRole.WORKER, layout)
        made.notify = notify
        return made

    return KVConnector(
        lambda config, layout: connector(config, KVConnectorRole.SCHEDULER, layout),
        make_worker_half,
        connector.host_nbytes,
        accept_states if connector.supports_states else refuse_states,
    )
