"""Items that an engine process keeps: a client's record of them, and what is sent."""

import random

import msgspec
import pytest

from octavo.engine.kept_items import ItemRecord, KeptItems, RequestWithItems
from octavo.errors import EngineDeadError
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreRequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    RequestOptions,
    TensorData,
)

ENTRY = 1024


def request_of(*names, size=100):
    """Return a request with items; a name is the item's content."""
    items = [
        MultiModalFeatureSpec(
            "image",
            name,
            PlaceholderRange(i, 1),
            {"pixels": TensorData("uint8", (size,), name.encode() * size)},
            1,
        )
        for i, name in enumerate(names)
    ]
    return EngineCoreRequest(
        "r", [0] * len(names), CoreSamplingParams(), RequestOptions(0.0), mm_features=items
    )


class Pair:
    """A client's record, and the process at the other end."""

    def __init__(self, max_nbytes):
        self.record, self.kept = ItemRecord(), KeptItems()
        self.record.max_nbytes = max_nbytes

    def send(self, request):
        """Send a request; return the number of its items that were sent whole."""
        before = msgspec.msgpack.encode(request)
        message = self.record.pack(request)
        self.record.note(message)
        data = msgspec.msgpack.encode(message)
        assert self.kept.complete(msgspec.msgpack.decode(data, type=RequestWithItems)) == request
        assert msgspec.msgpack.encode(request) == before
        sizes = {
            name: ENTRY + sum(len(tensor.data) for tensor in item.values())
            for name, item in self.kept._data.items()
        }
        assert sizes == self.record._sizes
        assert self.record.nbytes == sum(sizes.values()) <= self.record.max_nbytes
        return sum(bool(item.data) for item in message.request.mm_features)


def test_kept_items_are_sent_once():
    pair = Pair(10_000)
    assert pair.send(request_of("a", "b", "a")) == 2
    assert pair.send(request_of("b", "a")) == 0
    assert pair.send(request_of("c", "a")) == 1
    assert Pair(10_000).send(request_of("a")) == 1  # another process has nothing


def test_the_items_unused_for_longest_are_forgotten():
    pair = Pair(3 * (ENTRY + 100))
    pair.send(request_of("a", "b", "c"))
    pair.send(request_of("a"))
    assert pair.send(request_of("d")) == 1
    assert pair.send(request_of("a", "c", "d")) == 0
    assert pair.send(request_of("b", "c")) == 1  # c is used, so another makes room
    assert pair.send(request_of("c")) == 0


def test_items_that_do_not_fit_are_not_kept():
    pair = Pair(3 * (ENTRY + 100))
    pair.send(request_of("a", "b"))
    assert pair.send(request_of("a", "c", "d", "e", "c")) == 4
    assert pair.send(request_of("a", "b")) == 0
    assert pair.send(request_of("x", size=10_000)) == 1
    assert pair.send(request_of("x", size=10_000)) == 1


def test_any_sequence():
    rng = random.Random(0)
    pair = Pair(6 * (ENTRY + 100))
    whole = sent = 0
    for _ in range(300):
        names = rng.choices("abcdefghij", k=rng.randint(1, 8))
        whole, sent = whole + pair.send(request_of(*names)), sent + len(names)
    assert 0 < whole < sent / 2


def test_a_message_that_is_not_sent_changes_nothing():
    pair = Pair(10_000)
    pair.send(request_of("a"))
    pair.record.pack(request_of("b"))
    assert pair.send(request_of("a", "b")) == 1


def test_a_missing_item_is_an_error():
    pair = Pair(10_000)
    pair.send(request_of("a"))
    message = pair.record.pack(request_of("a"))
    with pytest.raises(EngineDeadError, match="without an item"):
        KeptItems().complete(message)


def test_both_records_are_cleared():
    pair = Pair(10_000)
    pair.send(request_of("a", "b"))
    pair.record.clear()
    pair.kept.clear()
    assert pair.send(request_of("a")) == 1
