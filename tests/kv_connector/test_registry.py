import pytest

from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_connector.base import KVConnectorBase, KVConnectorRole
from octavo.kv_connector.offload import OffloadingConnector
from octavo.kv_connector.p2p import P2PConnector
from octavo.kv_connector.registry import get_connector
from octavo.kv_connector.shared_storage import SharedStorageConnector
from octavo.models.cache import AttentionCache
from tests.kv_connector.test_pages import make_layout

LAYOUT = make_layout([AttentionCache(2, 4)])


def config(name, path=None):
    return KVTransferConfig(kv_connector=name, kv_connector_module_path=path)


class Mine(KVConnectorBase):
    """Custom connector: one class for both halves."""

    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = None
    start_load_kv = wait_for_save = get_finished = None

    @classmethod
    def host_nbytes(cls, config):
        return 7


MyHalves = OffloadingConnector


def test_by_name():
    assert get_connector(config("OffloadingConnector")) is OffloadingConnector
    assert get_connector(config("P2PConnector")) is P2PConnector
    assert get_connector(config("ExampleConnector")) is SharedStorageConnector
    assert get_connector(config("MyHalves", __name__)) is OffloadingConnector


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
        get_connector(config(name, path))


def test_halves_of_a_class():
    found = get_connector(config("Mine", __name__))
    calls = []
    scheduler = found.make_scheduler_half(EngineConfig(), LAYOUT)
    worker = found.make_worker_half(EngineConfig(), LAYOUT, lambda: calls.append(1))
    assert scheduler.role is KVConnectorRole.SCHEDULER
    assert worker.role is KVConnectorRole.WORKER
    assert worker.layout is LAYOUT
    worker.notify()
    assert calls == [1]
    assert found.host_nbytes(config("Mine")) == 7


class WithStates(Mine):
    supports_states = True


def test_states_are_refused_by_name():
    for name in ("OffloadingConnector", "SharedStorageConnector", "P2PConnector"):
        get_connector(config(name)).check_states(config(name))
    get_connector(config("WithStates", __name__)).check_states(config("WithStates"))
    with pytest.raises(ConfigError, match="kv_connector=Mine is not supported with models"):
        get_connector(config("Mine", __name__)).check_states(config("Mine"))
    several = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": [config("OffloadingConnector")]},
    )
    get_connector(several).check_states(several)
