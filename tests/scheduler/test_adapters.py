"""Adapters of requests: slots of the workers' memory, and turns."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import LoRAConfig
from octavo.errors import RequestError
from octavo.messages import AdapterChange, AdapterLoaded, AdapterRef
from octavo.request import Request, RequestStatus
from octavo.scheduler.adapters import MOST_PASSES, AdapterSlots, AdapterTurns, key_of
from octavo.scheduler.listener import StepListener
from tests.fakes import FakeEngine, expected_output
from tests.params import core_params, core_request


def request(name, content, label=None):
    adapter = None if content is None else AdapterRef(label or content, f"/{content}", content)
    return Request(core_request(name, [1], core_params(), adapter=adapter))


class Slots:
    """Slots with requests by name, and a worker that reads an adapter when told to."""

    def __init__(self, num_slots):
        self.slots = AdapterSlots(num_slots)
        self.requests = {}
        self.reading = deque()
        self.memory = {}

    def add(self, name, content, label=None):
        self.requests[name] = request(name, content, label)
        self.slots.add(self.requests[name])
        self.take()
        return self.requests[name]

    def remove(self, name):
        self.slots.remove(self.requests.pop(name))
        self.take()

    def read(self, error=None):
        slot, content = self.reading.popleft()
        if error is None:
            self.memory[slot] = content
        names = self.slots.finish(AdapterLoaded(slot, error))
        if error is not None:  # the caller ends them
            for name in names:
                self.slots.remove(self.requests.pop(name))
        self.take()
        return names

    def take(self):
        for change in self.slots.take_changes():
            if change.adapter is None:
                gone = self.memory.pop(change.slot, None)
                if gone is not None:  # else it could not be read
                    assert gone not in [key_of(r) for r in self.requests.values() if self.ready(r)]
            else:
                assert change.slot not in {slot for slot, _ in self.reading} | self.memory.keys()
                self.reading.append((change.slot, change.adapter.content_hash))
        assert len(self.reading) + len(self.memory) <= self.slots.num_slots
        self.slots.check_integrity(self.requests.values())

    def ready(self, found):
        if not self.slots.is_ready(found):
            return False
        assert self.memory.get(self.slots.slot_of(found)) == key_of(found)
        return True

    def all_ready(self):
        return [name for name, found in self.requests.items() if self.ready(found)]


def test_a_request_waits_until_its_adapter_is_read():
    it = Slots(2)
    waiting, base = it.add("0", "a"), it.add("1", None)
    assert it.slots.is_ready(base)
    assert it.slots.slot_of(base) == -1
    assert not it.slots.is_ready(waiting)
    assert it.slots.num_loading == 1
    assert it.read() == ["0"]
    assert it.all_ready() == ["0", "1"]
    assert it.slots.num_loading == 0
    assert [adapter.name for adapter in it.slots.in_memory] == ["a"]


def test_the_least_recently_used_adapter_makes_place():
    it = Slots(2)
    for name, content in (("0", "a"), ("1", "b")):
        it.add(name, content)
        it.read()
        it.remove(name)
    it.add("2", "a")
    it.remove("2")
    it.add("3", "c")
    assert sorted(it.memory.values()) == ["a"]
    it.read()
    assert sorted(it.memory.values()) == ["a", "c"]


def test_adapters_in_use_stay():
    it = Slots(2)
    it.add("0", "a")
    it.add("1", "b")
    it.read(), it.read()
    it.add("2", "c")
    assert not it.reading
    assert sorted(it.memory.values()) == ["a", "b"]
    it.remove("1")
    assert sorted(it.memory.values()) == ["a"]
    assert it.read() == ["2"]


def test_two_names_of_the_same_content_share_a_slot():
    it = Slots(1)
    first, second = it.add("0", "a", "one"), it.add("1", "a", "two")
    assert it.read() == ["0", "1"]
    assert it.slots.slot_of(first) == it.slots.slot_of(second)


def test_an_adapter_that_cannot_be_read_frees_its_slot():
    it = Slots(1)
    it.add("0", "a")
    it.add("1", "b")
    it.add("2", "a")
    assert it.read("bad") == ["0", "2"]
    assert it.read() == ["1"]
    assert list(it.memory.values()) == ["b"]


def test_an_adapter_whose_requests_have_ended_is_read_to_the_end():
    it = Slots(1)
    it.add("0", "a")
    it.remove("0")
    it.add("1", "b")
    assert [content for _, content in it.reading] == ["a"]  # a worker reads it
    assert it.read() == []
    assert it.read() == ["1"]


def test_requests_that_never_stop_do_not_starve_another_adapter():
    it = Slots(2)
    it.add("a0", "a")
    it.add("b0", "b")
    it.read(), it.read()
    late = it.add("late", "c")
    last = {"a": "a0", "b": "b0"}
    for i in range(1, 4 * MOST_PASSES):
        for content in "ab":  # the next one arrives before the last one ends
            name = f"{content}{i}"
            if last[content] in it.requests:
                it.add(name, content)
                if it.slots.is_ready(it.requests[last[content]]):
                    it.remove(last[content])
                last[content] = name
        if it.reading:
            break
    assert i <= MOST_PASSES + 1
    it.read()
    assert it.ready(late)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), num_slots=st.integers(1, 4))
def test_any_life_of_requests(data, num_slots):
    """The memory never holds more than it may, adapters in use stay, and all are served."""
    it = Slots(num_slots)
    for i in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["add", "add", "remove", "read", "fail"])):
            case "add":
                it.add(f"r{i}", data.draw(st.sampled_from([None, *"abcdefg"])))
            case "remove" if it.requests:
                it.remove(data.draw(st.sampled_from(sorted(it.requests))))
            case "read" if it.reading:
                it.read()
            case "fail" if it.reading:
                it.read("bad")
    while it.requests:
        while it.reading:
            it.read()
        ready = it.all_ready()
        assert ready, "some requests wait forever"
        for name in ready:
            it.remove(name)


def test_turns_of_adapters():
    turns = AdapterTurns(1)
    running = [request("0", "a"), request("1", None)]
    assert turns.may_start(request("2", None), running)
    assert turns.may_start(request("3", "a"), running)
    assert not turns.may_start(request("4", "b"), running)
    assert turns.blocked == {"4"}
    assert turns.release(running) == set()
    for i in range(MOST_PASSES):
        passing = request(f"p{i}", "a")
        assert turns.may_start(passing, running)
        turns.note_start(passing)
    assert not turns.may_start(request("5", "a"), running)  # else the other one never runs
    assert turns.may_start(request("6", None), running)
    assert turns.release(running[1:]) == {"4", "5"}
    assert turns.blocked == set()


class Holds(StepListener):
    def __init__(self):
        self.held = []

    def on_hold(self, request):
        self.held.append((request.request_id, request.status.name))


def test_after_a_turn_requests_may_pass_again():
    """The limit of passes counts from the beginning of each wait."""
    turns = AdapterTurns(1)
    running = [request("first", "a")]
    for wait in range(2):
        assert not turns.may_start(request(f"b{wait}", "b"), running)
        for i in range(MOST_PASSES):
            passing = request(f"{wait}-{i}", "a")
            assert turns.may_start(passing, running)
            turns.note_start(passing)
        assert not turns.may_start(request("late", "a"), running)
        assert turns.release([]) == {f"b{wait}", "late"}


def test_a_step_has_at_most_max_loras_adapters():
    holds = Holds()
    lora = LoRAConfig(enable_lora=True, max_loras=2, max_cpu_loras=4)
    engine = FakeEngine(lora=lora, listeners=[holds], num_blocks=200)
    contents = ["a", None, "b", "c", "a", "d", None, "b"]
    requests = [
        engine.add(str(i), [i, 1, 2], adapter=content, max_tokens=4 + i)
        for i, content in enumerate(contents)
    ]
    most = set()
    while engine.scheduler.requests:
        engine.step()
        live = {row.adapter for row in engine.executor.rows.values()} - {None}
        assert len(live) <= 2
        most.add(len(live))
    assert 2 in most
    for content, found in zip(contents, requests, strict=True):
        alone = expected_output(
            found.sampling_params, [int(found.request_id), 1, 2], 128, None, content
        )
        assert engine.tokens(found.request_id) == alone
    assert ("0", "WAITING_FOR_ADAPTER") in holds.held
    assert ("3", "WAITING_FOR_ADAPTER_TURN") in holds.held
    engine.run()


def test_requests_without_adapters_pass_those_that_wait():
    lora = LoRAConfig(enable_lora=True)
    engine = FakeEngine(lora=lora)
    engine.add("a", [1, 2], adapter="a", max_tokens=50)
    engine.add("b", [1, 2], adapter="b", max_tokens=2)
    engine.add("base", [1, 2], max_tokens=2)
    for _ in range(8):
        engine.step()
    assert engine.finish_reason("base") is not None
    assert engine.scheduler.requests["b"].status == RequestStatus.WAITING_FOR_ADAPTER
    engine.run()
    assert engine.finish_reason("b") is not None


def test_the_same_prompt_with_another_adapter_shares_no_blocks():
    lora = LoRAConfig(enable_lora=True, max_loras=2)
    engine, prompt = FakeEngine(lora=lora), list(range(40))
    cached = {}
    for name, content in (("0", None), ("1", "a"), ("2", "b"), ("3", "a"), ("4", None)):
        found = engine.add(name, prompt, adapter=content)
        engine.run()
        cached[name] = found.num_cached_tokens
    assert cached == {"0": 0, "1": 0, "2": 0, "3": 39, "4": 39}


def test_a_failed_read_ends_only_its_requests():
    lora = LoRAConfig(enable_lora=True)
    engine = FakeEngine(lora=lora)
    engine.add("a", [1, 2], adapter="a")
    engine.add("base", [1, 2])
    engine.schedule()
    engine.finish_reading("the file is damaged")
    engine.run()
    (output,) = engine.outputs["a"]
    assert (output.error, output.error_kind) == ("the file is damaged", "AdapterError")
    assert len(engine.tokens("base")) == 8
    engine.add("again", [1, 2], adapter="a")
    engine.run()
    assert len(engine.tokens("again")) == 8


def test_an_adapter_without_enable_lora_is_an_error():
    engine = FakeEngine()
    with pytest.raises(RequestError, match="start the engine with enable_lora") as caught:
        engine.add("a", [1, 2], adapter="a")
    assert caught.value.param == "lora_request"
    assert not engine.scheduler.requests


def test_a_change_is_sent_without_requests():
    """An engine that only waits for an adapter has a step for the workers, and then none."""
    lora = LoRAConfig(enable_lora=True)
    engine = FakeEngine(lora=lora)
    engine.add("a", [1, 2], adapter="a")
    assert engine.scheduler.has_requests()
    work = engine.schedule()
    adapter = AdapterRef("name of a", "/x", "a")
    assert (work.scheduled_reqs, work.adapter_changes) == ([], [AdapterChange(0, adapter)])
    engine.update()
    assert not engine.scheduler.has_requests()
    assert engine.scheduler.num_loading_adapters == 1
    engine.run()
