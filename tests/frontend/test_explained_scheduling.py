"""Time lines of requests that the real scheduler serves, with a clock of whole seconds.

A step takes twelve of them: one to schedule it, ten to compute it, and one for its result.
"""

import itertools
import random

import pytest

from octavo.engine.step_reporter import StepReporter
from octavo.frontend.step_log import StepLog
from octavo.frontend.time_line import BETWEEN, Marks, make_time_line
from octavo.scheduler.listener import StepListener
from tests.engine.test_core import make_core
from tests.params import core_params, core_request

BEGIN = 1000.0


class Ticker(StepListener):
    """Listener that lets time pass; it must be the first."""

    def on_schedule(self, step, work):
        self.clock.now += 1

    def on_computed(self, step):
        self.clock.now += 10

    def on_outputs(self, outputs, is_idle):
        self.clock.now += 1


def name(number):
    return f"cmpl-x-0-{number}#{number}"


class Served:
    """Core with requests; `ends` has the time of the end of each, by its number."""

    def __init__(self, depth=1, **settings):
        ticker = Ticker()
        reporter = StepReporter(lambda: ticker.clock.now)
        self.core = make_core(depth, listeners=[ticker, reporter], **settings)
        self.clock = ticker.clock = self.core.clock
        self.log = StepLog(max_seconds=1e9)
        self.begins, self.ends = {}, {}

    def add(self, number, num_prompt, max_tokens):
        self.begins[number] = self.clock.now
        params = core_params(temperature=0, seed=3, max_tokens=max_tokens)
        self.core.add_request(core_request(name(number), list(range(1, num_prompt + 1)), params))

    def step(self):
        outputs = self.core.step()
        self.log.add(0, self.clock.now, outputs.steps)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                assert output.error is None
                self.ends[int(output.request_id.rpartition("#")[2])] = self.clock.now

    def run(self):
        while self.core.has_work():
            self.step()
        self.core.check_integrity()
        self.core.shutdown()

    def line(self, number):
        """Return the time line of a request; check that it is a partition of its time."""
        begin, end = self.begins[number], self.ends[number]
        marks = Marks(begin, end, prompts={number: []}, done=end, is_complete=True)
        found = make_time_line(marks, self.log.between(begin, end))
        assert (found.spans[0].begin, found.spans[-1].end) == (begin, end)
        for span, after in itertools.pairwise(found.spans):
            assert span.begin < span.end == after.begin
        assert sum(found.seconds().values()) == end - begin
        return found


def test_all_seats_are_taken():
    served = Served(max_num_seqs=1)
    served.add(1, 3, 3)
    served.add(2, 3, 3)
    served.run()
    found = served.line(2)
    assert found.seconds() == {"queued": 36, BETWEEN: 6, "prefill": 10, "decode": 20}
    queued = found.spans[0]
    assert (queued.reason, queued.is_behind, queued.who) == ("SEAT", False, {name(1): 36})


def test_a_request_behind_another_one_waits_for_its_reason():
    served = Served(max_num_seqs=1)
    for number in (1, 2, 3):
        served.add(number, 3, 3)
    served.run()
    behind, first = [span for span in served.line(3).spans if span.cause == "queued"]
    assert (behind.begin, behind.end, first.end) == (BEGIN, BEGIN + 36, BEGIN + 72)
    assert (behind.behind, first.behind) == ({name(2): 36}, {})
    assert (behind.who, first.who) == ({name(1): 36}, {name(2): 36})


def test_the_budget_of_the_step_is_used():
    served = Served()
    served.add(1, 40, 2)  # a step has 32 tokens
    served.add(2, 5, 2)
    served.run()
    found = served.line(2)
    assert found.seconds() == {"queued": 12, BETWEEN: 4, "prefill": 10, "decode": 10}
    queued, _, prefill = found.spans[:3]
    assert (queued.reason, queued.who) == ("BUDGET", {name(1): 32})
    assert (prefill.tokens, prefill.who) == (5, {name(1): 8})
    assert prefill.theirs == pytest.approx(10 * 8 / 13)


def test_blocks_are_missing():
    served = Served(blocks=5, caching=False)  # four are usable
    served.add(1, 32, 20)
    served.add(2, 32, 1)
    served.run()
    found = served.line(2)
    budget, blocks = [span for span in found.spans if span.cause == "queued"]
    assert (budget.reason, budget.end - budget.begin) == ("BUDGET", 12)
    assert (blocks.reason, blocks.end) == ("BLOCKS", served.ends[1])
    assert blocks.who == {name(1): 4}  # the last of its 51 tokens is in the fourth block
    assert found.seconds() == {"queued": 20 * 12, BETWEEN: 2, "prefill": 10}


def test_a_request_is_preempted():
    served = Served(blocks=5, caching=False)
    served.add(1, 16, 30)
    served.add(2, 16, 30)
    served.run()
    assert "preempted" not in served.line(1).seconds()
    found = served.line(2)
    # Step 18 would need a fifth block; request 1 ends with step 30.
    (preempted,) = [span for span in found.spans if span.cause == "preempted"]
    assert (preempted.begin, preempted.end) == (BEGIN + 17 * 12, BEGIN + 30 * 12)
    assert preempted.who == {name(1): 13 * 12}
    causes = {"prefill": 10, "preempted": 13 * 12, "recompute": 20, "decode": 28 * 10}
    assert found.seconds() == {**causes, BETWEEN: 44 * 12 - sum(causes.values())}
    assert found.answers[name(2)].num_preemptions == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_all_times_are_partitions(depth, seed):
    dice = random.Random(seed)
    served = Served(depth, blocks=dice.randint(6, 12), max_num_seqs=dice.randint(1, 5))
    left, seen = list(range(1, 16)), set()
    while left or served.core.has_work():
        if left and dice.random() < 0.4:
            served.add(left.pop(0), dice.randint(1, 40), dice.randint(1, 20))
        if served.core.has_work():
            served.step()
    served.run()
    assert len(served.ends) == 15
    for number in served.ends:
        found = served.line(number)
        seen |= found.seconds().keys()
        for span in found.spans:
            assert name(number) not in span.who
            if span.cause == "queued":
                assert span.reason != "SEAT" or span.who
    assert {"queued", "prefill", "decode", BETWEEN} <= seen
    known = {"queued", "prefill", "decode", "preempted", "recompute", "step_of_others", BETWEEN}
    assert seen <= known
