import pytest

from octavo.config import CacheConfig, EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_connector.base import KVConnectorRole
from octavo.kv_connector.offload import OffloadingConnector
from octavo.kv_connector.p2p import P2PConnector
from octavo.kv_connector.registry import get_connector_class, make_connector
from octavo.models.cache import AttentionCache
from tests.kv_connector.test_pages import make_layout

LAYOUT = make_layout([AttentionCache(2, 4)])


def config(name, path=None):
    return KVTransferConfig(kv_connector=name, kv_connector_module_path=path)


class Mine(OffloadingConnector):
    """Custom connector."""


def test_by_name():
    assert get_connector_class(config("OffloadingConnector")) is OffloadingConnector
    assert get_connector_class(config("P2PConnector")) is P2PConnector
    assert get_connector_class(config("ExampleConnector")).__name__ == "SharedStorageConnector"
    found = get_connector_class(config("Mine", "tests.kv_connector.test_registry"))
    assert found.__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "path", "says"),
    [
        ("Other", None, "'Other' is not one of OffloadingConnector, Multi"),
        ("Other", "json", "'json' has no Other"),
        ("Other", "no.such.module", "'no.such.module' has no Other"),
        ("JSONDecoder", "json", "json.JSONDecoder is no octavo.kv_connector"),
        ("dumps", "json", "json.dumps is no octavo.kv_connector"),
    ],
)
def test_unknown_ones(name, path, says):
    with pytest.raises(ConfigError, match=says):
        get_connector_class(config(name, path))


def test_none_is_made_where_none_is_asked_for():
    assert make_connector(EngineConfig(), KVConnectorRole.SCHEDULER, LAYOUT) is None


def test_a_half_is_made():
    extra = {"cpu_bytes_to_use": 4 * LAYOUT.image_nbytes}
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", engine_id="0", kv_connector_extra_config=extra
    )
    settings = EngineConfig(cache=CacheConfig(kv_transfer_config=transfer))
    made = make_connector(settings, KVConnectorRole.SCHEDULER, LAYOUT)
    assert isinstance(made, OffloadingConnector)
    assert made.role is KVConnectorRole.SCHEDULER
