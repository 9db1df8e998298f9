import msgspec
import pytest

from octavo.config import EngineConfig
from octavo.kv_connector.base import KVConnectorBase, KVConnectorMetadata, KVConnectorRole
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.models.cache import AttentionCache
from octavo.worker.kv_transfer import KVTransfers
from tests.kv_connector.test_pages import make_layout


class Words(KVConnectorMetadata, array_like=True):
    text: str = "nothing"


class Told(KVConnectorBase):
    """Writes down what it is told."""

    metadata_type = Words

    def __init__(self):
        layout = make_layout([AttentionCache(2, 4)])
        super().__init__(EngineConfig(), KVConnectorRole.WORKER, layout)
        self.calls = []
        self.finished, self.invalid = (set(), set()), set()

    def start_load_kv(self, metadata):
        self.calls.append(("load", metadata.text))

    def wait_for_layer_load(self, layer):
        self.calls.append(("loaded", layer))

    def save_kv_layer(self, layer):
        self.calls.append(("save", layer))

    def wait_for_save(self):
        self.calls.append("saved")

    def step_failed(self):
        self.calls.append("failed")

    def get_finished(self):
        found, self.finished = self.finished, (set(), set())
        return found

    def get_block_ids_with_load_errors(self):
        found, self.invalid = self.invalid, set()
        return found

    def shutdown(self):
        self.calls.append("shutdown")

    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = None


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def reports():
    return []


@pytest.fixture
def transfers(told, reports):
    return KVTransfers(told, 2, reports.append)


def step(**fields):
    return SchedulerOutput(**fields)


def test_a_step_lies_between_loads_and_saves(told, transfers, reports):
    words = msgspec.msgpack.encode(Words("these"))
    with transfers.step(step(kv_connector_metadata=words)):
        told.calls.append("step")
    assert told.calls == [
        *(("load", "these"), ("loaded", 0), ("loaded", 1), "step"),
        *(("save", 0), ("save", 1), "saved"),
    ]
    assert not reports


def test_a_step_without_metadata_is_told_of_as_well(told, transfers):
    with transfers.step(step()):
        pass
    assert told.calls[0] == ("load", "nothing")
    assert told.calls[-1] == "saved"


def test_nothing_is_saved_of_a_step_that_fails(told, transfers):
    with pytest.raises(RuntimeError, match="broken"), transfers.step(step()):
        raise RuntimeError("broken")
    assert told.calls[-1] == "failed"
    assert "saved" not in told.calls


def test_what_has_finished_is_told_once_with_its_blocks(told, transfers, reports):
    told.finished, told.invalid = ({"s"}, {"b", "a"}), {9, 3}
    told.notify()
    told.notify()
    assert reports == [KVConnectorOutput(["s"], ["a", "b"], [3, 9])]
    told.finished = {"t"}, set()
    with transfers.step(step()):
        pass
    assert reports[1:] == [KVConnectorOutput(["t"], [], [])]


def test_the_end_and_the_handshake(told, transfers):
    assert transfers.handshake_metadata() is None
    transfers.shutdown()
    assert told.calls == ["shutdown"]
