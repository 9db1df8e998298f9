"""Events for an observer: why requests wait, and which request preempted which."""

from octavo.scheduler.observer import WaitReason
from tests.fakes import FakeEngine


class Notes:
    def __init__(self):
        self.waits, self.preemptions = [], []

    def on_wait(self, request, reason):
        self.waits.append((request.request_id, reason))

    def on_preempt(self, request, by):
        self.preemptions.append((request.request_id, by and by.request_id))


def make(**settings):
    notes = Notes()
    return FakeEngine(observer=notes, **settings), notes


def test_no_seat():
    engine, notes = make(max_num_seqs=1)
    engine.add("a", [1, 2, 3])
    engine.add("b", [1, 2, 3])
    engine.schedule()
    assert notes.waits == [("b", WaitReason.SEAT)]
    engine.run()
    assert set(notes.waits) == {("b", WaitReason.SEAT)}


def test_no_tokens_left_in_the_step():
    engine, notes = make(max_num_batched_tokens=16)
    engine.add("a", list(range(16)))
    engine.add("b", [1, 2, 3])
    engine.schedule()
    assert notes.waits == [("b", WaitReason.BUDGET)]


def test_a_prompt_that_must_be_whole_and_finds_no_room():
    engine, notes = make(max_num_batched_tokens=16, enable_chunked_prefill=False)
    engine.add("a", list(range(10)))
    engine.add("b", list(range(20, 30)))
    engine.schedule()
    assert notes.waits == [("b", WaitReason.BUDGET)]


def test_no_blocks():
    engine, notes = make(num_blocks=5, block_size=8)
    engine.add("a", list(range(24)), max_tokens=4)
    engine.add("b", list(range(50, 74)), max_tokens=4)
    engine.schedule()
    assert notes.waits == [("b", WaitReason.BLOCKS)]
    assert notes.preemptions == []


def test_preemption_names_who_needs_the_blocks():
    engine, notes = make(num_blocks=5, block_size=8, caching=False)
    engine.add("a", list(range(8)), max_tokens=20)
    engine.add("b", list(range(20, 28)), max_tokens=20)
    while not notes.preemptions:
        engine.step()
    assert notes.preemptions == [("b", "a")]
    engine.run()


def test_a_failed_step_preempts_for_nobody():
    engine, notes = make(depth=2)
    engine.add("a", [1, 2, 3])
    engine.schedule()
    engine.add("b", [1, 2, 3])
    engine.schedule()
    work, _ = engine.in_flight.popleft()
    engine.scheduler.fail_step(work, "broken")
    assert notes.preemptions == [("b", None)]


def test_a_preempted_request_waits_for_what_is_in_flight():
    engine, notes = make(num_blocks=5, block_size=8, caching=False, depth=3)
    engine.add("a", list(range(8)), max_tokens=20)
    engine.add("b", list(range(20, 28)), max_tokens=20)
    engine.run()
    assert ("b", WaitReason.IN_FLIGHT) in notes.waits
