import time

import msgspec
import pytest

from octavo._native import StepProgress
from octavo.config import EngineConfig
from octavo.kv_connector.base import KVConnectorMetadata, KVConnectorWorker
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.models.cache import AttentionCache
from octavo.worker.kv_transfer import KVTransfers
from tests.kv_connector.test_pages import make_layout


class Words(KVConnectorMetadata, array_like=True):
    text: str = "nothing"


class Told(KVConnectorWorker):
    """Connector that records its calls."""

    metadata_type = Words

    def __init__(self):
        super().__init__(EngineConfig(), make_layout([AttentionCache(2, 4)]), lambda: None)
        self.calls, self.broken = [], False
        self.finished, self.invalid = (set(), set()), set()

    def start_load_kv(self, metadata):
        self.calls.append(("load", metadata.text))

    def wait_for_layer_load(self, layer):
        self.calls.append(("loaded", layer))

    def save_kv_layer(self, layer):
        if self.broken:
            raise OSError("full")
        self.calls.append(("save", layer))

    def wait_for(self, call):
        until = time.monotonic() + 60
        while call not in self.calls:
            assert time.monotonic() < until, self.calls
            time.sleep(0.001)

    def break_after(self, call, before):
        before()
        self.wait_for(call)
        raise ZeroDivisionError

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


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def reports():
    return []


@pytest.fixture
def progress():
    return StepProgress()


@pytest.fixture
def transfers(told, progress, reports):
    def make_connector(notify):
        told.notify = notify
        return told

    made = KVTransfers(make_connector, 2, progress, reports.append)
    yield made
    made.shutdown()


def step(**fields):
    return SchedulerOutput(**fields)


def long_step(tokens=500):
    metadata = msgspec.msgpack.encode(Words())
    return step(kv_connector_metadata=metadata, total_num_scheduled_tokens=tokens)


def test_a_step_lies_between_loads_and_saves(told, transfers, reports):
    words = msgspec.msgpack.encode(Words("these"))
    with transfers.step(step(kv_connector_metadata=words)):
        told.calls.append("step")
    assert told.calls == [
        *(("load", "these"), "step", ("loaded", 0), ("save", 0), ("loaded", 1), ("save", 1)),
        "saved",
    ]
    assert not reports


def test_another_thread_goes_along_with_a_long_step(told, transfers, progress):
    with transfers.step(long_step()):
        told.wait_for(("loaded", 0))
        progress.reach(1)
        told.wait_for(("loaded", 1))
        assert told.calls == [("load", "nothing"), ("loaded", 0), ("save", 0), ("loaded", 1)]
        progress.reach(2)
        told.wait_for(("save", 1))
        told.calls.append("step")
    assert told.calls[-3:] == [("save", 1), "step", "saved"]


def test_all_is_saved_though_a_step_told_of_no_layer(told, transfers):
    for _ in range(2):
        told.calls.clear()
        with transfers.step(long_step()):
            told.wait_for(("loaded", 0))
        assert told.calls[-2:] == [("save", 1), "saved"]


def test_a_step_without_metadata_is_told_of_as_well(told, transfers):
    with transfers.step(step(total_num_scheduled_tokens=500)):
        pass
    assert told.calls == [("load", "nothing"), "saved"]


@pytest.mark.parametrize("reached", [0, 1])
def test_nothing_more_is_saved_of_a_step_that_fails(told, transfers, progress, reached):
    for work in (step(), long_step()):
        told.calls.clear()
        # It reaches the next layer, or has no metadata.
        last = ("loaded", reached) if work.kv_connector_metadata else ("load", "nothing")
        with pytest.raises(ZeroDivisionError), transfers.step(work):
            told.break_after(last, lambda: progress.reach(reached))
        assert told.calls[-1] == "failed"
        assert "saved" not in told.calls
        assert ("save", reached) not in told.calls


@pytest.mark.parametrize("work", [0, 500])
def test_a_step_fails_when_saving_does(told, transfers, work):
    told.broken = True
    with pytest.raises(OSError, match="full"), transfers.step(long_step(work)):
        pass
    assert told.calls[-1] == "failed"


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
