from octavo.messages import SchedulerOutput
from octavo.system.tensor import full
from octavo.worker.encoder_cache import EncoderCache
from tests.fakes import picture


class Encoder:
    """Encoder whose rows hold the length of an item's name."""

    def __init__(self):
        self.runs = []

    def run_apart(self, items):
        self.runs.append([item.identifier for item in items])
        rows = [full((item.num_rows, 2), len(item.identifier), "float32") for item in items]
        return rows, {i: "bad" for i, item in enumerate(items) if item.identifier == "bb"}


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
