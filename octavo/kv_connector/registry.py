"""Which connectors there are, and how the halves of one are made."""

from __future__ import annotations

import importlib

from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_connector.base import KVConnectorBase, KVConnectorRole
from octavo.kv_connector.layout import KVLayout

_CONNECTORS = {
    "OffloadingConnector": "octavo.kv_connector.offload",
    "MultiConnector": "octavo.kv_connector.multi",
    "P2PConnector": "octavo.kv_connector.p2p",
    "SharedStorageConnector": "octavo.kv_connector.shared_storage",
}
"""Their modules."""
_RENAMED = {"ExampleConnector": "SharedStorageConnector"}
"""Newer names of vLLM's."""


def get_connector_class(config: KVTransferConfig) -> type[KVConnectorBase]:
    """The connector that the settings name.

    Raises:
        ConfigError: there is none of that name.
    """
    name, path = config.kv_connector, config.kv_connector_module_path
    if path is None:
        name = _RENAMED.get(name, name)
    where = _CONNECTORS.get(name) if path is None else path
    if where is None:
        raise ConfigError(
            f"kv_transfer_config: kv_connector={name!r} is not one of {', '.join(_CONNECTORS)}; "
            "one of your own needs kv_connector_module_path, the module that it is in."
        )
    try:
        found = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"kv_transfer_config: kv_connector_module_path={where!r} has no {name} ({error})."
        ) from error
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase)):
        raise ConfigError(
            f"kv_transfer_config: {where}.{name} is no octavo.kv_connector.base.KVConnectorBase; "
            "derive it from that class."
        )
    return found


def make_connector(
    config: EngineConfig, role: KVConnectorRole, layout: KVLayout
) -> KVConnectorBase | None:
    """A half of the connector that the settings ask for; None: they ask for none.

    Raises:
        ConfigError: it cannot be made.
    """
    transfer = config.cache.kv_transfer_config
    if transfer is None:
        return None
    return get_connector_class(transfer)(config, role, layout)
