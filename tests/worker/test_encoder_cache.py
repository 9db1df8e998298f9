import msgspec
import pytest

from octavo.messages import EncoderSlice, NewRequestData, ScheduledRequest, SchedulerOutput
from octavo.system.tensor import full
from octavo.worker.encoder_cache import EncoderCache
from tests.fakes import picture


class Encoder:
    """Encoder whose rows hold the length of an item's name."""

    def __init__(self):
        self.runs = []
        self.parts = []

    def run_apart(self, items):
        self.runs.append([item.identifier for item in items])
        rows = [full((item.num_rows, 2), len(item.identifier), "float32") for item in items]
        self.had_data = [bool(item.data) for item in items]
        return rows, {i: "bad" for i, item in enumerate(items) if item.identifier == "bb"}

    def advance(self, part):
        """Fail: the item is computed as a whole."""
        self.parts.append((part.begin, bool(part.item.data)))


def without_data(item):
    return msgspec.structs.replace(item, data={})


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_run_in_slices_and_its_requests_share_the_data(is_sent):
    """If a slice fails, or another run takes its place, the whole run has the data, too."""
    encoder = Encoder()
    cache = EncoderCache({"image": encoder})
    item = picture("a", 0, 2)
    features = {"1": [item]} if is_sent else {}

    def update(begin, **fields):
        own = without_data(item) if begin or is_sent else item
        cache.update(SchedulerOutput(encoder_slice=EncoderSlice(own, begin, 4), **fields), features)

    update(0)
    new = NewRequestData([1], 1, None, 0)
    features["2"] = [without_data(item), picture("ccc", 4, 1)]
    update(2, scheduled_reqs=[ScheduledRequest("2", 1, new=new)])
    assert encoder.parts == [(0, True), (2, False)]
    other = EncoderSlice(picture("other", 0, 2), 0, 1)
    cache.update(SchedulerOutput(encoder_slice=other), features)
    cache.update(SchedulerOutput(scheduled_encoder_inputs={"2": [0, 1]}), features)
    assert (encoder.runs, encoder.had_data) == ([["a", "ccc"]], [True, True])
    assert not any(item.data for item in features["2"])


def test_items_of_all_requests_are_computed_together_and_forgotten():
    encoder = Encoder()
    cache = EncoderCache({"image": encoder})
    features = {"1": [picture("a", 0, 2), picture("bb", 4, 3)], "2": [picture("ccc", 0, 1)]}
    work = SchedulerOutput(scheduled_encoder_inputs={"1": [1], "2": [0]})
    cache.update(work, features)
    assert encoder.runs == [["bb", "ccc"]]
    assert [bool(item.data) for item in features["1"]] == [True, False]
    assert {name: rows.numpy().tolist() for name, rows in cache.rows.items()} == {
        "bb": [[2, 2]] * 3,
        "ccc": [[3, 3]],
    }
    assert cache.failed == {"bb": "bad"}
    # An item that is given up and computed again in one step stays.
    work = SchedulerOutput(
        scheduled_encoder_inputs={"2": [0]}, free_encoder_mm_hashes=["bb", "ccc", "never there"]
    )
    cache.update(work, features)
    assert list(cache.rows) == ["ccc"]
    assert cache.failed == {}
