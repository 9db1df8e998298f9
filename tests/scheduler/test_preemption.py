"""Turns of requests: seats, priorities, and requests that give way to others."""

from octavo.messages import FinishReason
from octavo.request import RequestStatus
from tests.fakes import FakeEngine, scheduled_tokens


class TestTurns:
    """A call of many prompts cannot starve other calls."""

    def test_prompts_of_one_call_leave_an_eighth_of_the_seats_to_others(self):
        engine = FakeEngine(max_num_seqs=16)
        for turn in range(20):
            engine.add(f"many-{turn}", range(4), turn=turn)
        engine.step()
        assert len(engine.scheduler.running) == 14
        engine.add("other", range(4))
        engine.step()
        assert "other" in engine.running_ids()
        engine.run()

    def test_those_that_wait_let_a_later_call_pass(self):
        engine = FakeEngine(max_num_seqs=4)
        for turn in range(20):
            engine.add(f"many-{turn}", range(4), turn=turn)
        engine.step()
        engine.add("other", range(4))
        engine.step()
        assert "other" not in engine.running_ids()
        while len(engine.scheduler.waiting) == 17:
            engine.step()
        assert "other" in engine.running_ids()
        engine.run()


class TestPriority:
    def test_better_priority_is_served_first(self):
        engine = FakeEngine(scheduling_policy="priority", max_num_seqs=1)
        engine.add("late", range(4), priority=5)
        engine.add("early", range(4), priority=-5)
        engine.step()
        assert engine.running_ids() == ["early"]
        engine.run()

    def test_it_takes_a_seat(self):
        engine = FakeEngine(scheduling_policy="priority", max_num_seqs=2)
        a = engine.add("a", range(4), priority=1, max_tokens=20)
        b = engine.add("b", range(4), priority=2, max_tokens=20)
        engine.step()
        c = engine.add("c", range(4), priority=1)
        engine.step()
        assert engine.running_ids() == ["a", "c"]
        assert (a.num_preemptions, b.num_preemptions, c.num_preemptions) == (0, 1, 0)
        engine.run()
        engine.check_tokens(a, b, c)

    def test_equal_priority_does_not(self):
        engine = FakeEngine(scheduling_policy="priority", max_num_seqs=1)
        a = engine.add("a", range(4), priority=1, turn=5)
        engine.step()
        engine.add("b", range(4), priority=1)
        engine.step()
        assert engine.running_ids() == ["a"]
        assert a.num_preemptions == 0
        engine.run()

    def test_it_takes_blocks(self):
        engine = FakeEngine(scheduling_policy="priority", num_blocks=9, max_model_len=64)
        a = engine.add("a", [1] * 30, priority=1, max_tokens=10)
        b = engine.add("b", [2] * 30, priority=2, max_tokens=10)
        engine.step()
        c = engine.add("c", [3] * 30, priority=0, max_tokens=10)
        engine.step()
        assert engine.running_ids() == ["c", "a"]
        engine.run()
        engine.check_tokens(a, b, c)
        assert b.num_preemptions > 0

    def test_not_from_those_of_equal_priority(self):
        engine = FakeEngine(scheduling_policy="priority", num_blocks=9, max_model_len=64)
        a = engine.add("a", [1] * 30, priority=1, max_tokens=10)
        b = engine.add("b", [2] * 10, priority=2, max_tokens=4)
        engine.step()
        c = engine.add("c", [3] * 40, priority=1, max_tokens=2)
        engine.run()
        assert a.num_preemptions == 0
        assert b.num_preemptions == 1
        engine.check_tokens(a, b, c)

    def test_it_takes_the_budget(self):
        engine = FakeEngine(scheduling_policy="priority", max_num_batched_tokens=8)
        engine.add("a", range(4), priority=1)
        engine.step()
        engine.add("b", range(20), priority=0)
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"b": 8}
        assert engine.scheduler.make_stats().num_preemptions == 0
        engine.run()

    def test_no_one_is_preempted_for_want_of_budget(self):
        engine = FakeEngine(
            scheduling_policy="priority", max_num_batched_tokens=20, enable_chunked_prefill=False
        )
        a = engine.add("a", range(4), priority=0)
        b = engine.add("b", range(4), priority=2)
        engine.step()
        engine.add("c", range(20), priority=1)
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"a": 1, "b": 1}
        engine.run()
        assert a.num_preemptions == b.num_preemptions == 0


class TestPreemption:
    def test_the_latest_request_gives_way(self):
        engine = FakeEngine(num_blocks=8)
        requests = [engine.add(name, [i] * 15, max_tokens=30) for i, name in enumerate("abc")]
        engine.run()
        assert requests[0].num_preemptions == 0
        assert requests[2].num_preemptions > 0
        engine.check_tokens(*requests)
        assert engine.scheduler.make_stats().num_preemptions == sum(
            r.num_preemptions for r in requests
        )
        assert engine.outputs["c"][-1].num_preemptions == requests[2].num_preemptions
        ends = [i for i, work in enumerate(engine.steps) for r in work.finished_req_ids if r == "a"]
        assert len(ends) == 1

    def test_statistics_keep_what_was_cached_at_the_start(self):
        """Prefixes that a request finds again after a preemption are its own."""
        engine = FakeEngine(num_blocks=12)
        engine.add("earlier", [1] * 16, max_tokens=1)
        engine.run()
        a = engine.add("a", [2] * 30, max_tokens=30)
        b = engine.add("b", [1] * 16 + [3] * 14, max_tokens=30)
        engine.now = 5.0
        engine.step()
        engine.now = 6.0
        engine.run()
        assert a.num_preemptions == 0
        assert b.num_preemptions > 0
        again = [
            r.new.num_computed_tokens
            for work in engine.steps
            for r in work.scheduled_reqs
            if r.req_id == "b" and r.new is not None
        ]
        assert again[0] == 16
        assert set(again) != {16}, "it finds more than at first"
        told = [o for o in engine.outputs["b"] if o.first_scheduled_time]
        assert {o.num_cached_tokens for o in told} == {16}
        assert told[-2].num_preemptions, "before the last output, which has all statistics"
        assert {output.num_cached_tokens for output in engine.outputs["a"]} == {0}
        assert b.first_scheduled_time == 5.0

    def test_no_request_of_the_step_is_preempted(self):
        engine = FakeEngine(num_blocks=8, num_drafts=3)
        for i in range(5):
            engine.add(f"r{i}", [i] * 10, max_tokens=30)
        engine.run()
        for work in engine.steps:
            assert not set(work.finished_req_ids) & set(scheduled_tokens(work))

    def test_memory_for_two_and_many_offered(self):
        engine = FakeEngine(num_blocks=2 * 8 + 1, max_num_seqs=32, depth=2)
        requests = [engine.add(f"r{i}", [i] * 20, max_tokens=40) for i in range(32)]
        engine.run()
        engine.check_tokens(*requests)
        assert engine.scheduler.make_stats().num_preemptions > 0

    def test_a_token_in_flight_survives(self):
        engine = FakeEngine(num_blocks=6, depth=3)
        a = engine.add("a", [1] * 14, max_tokens=20)
        b = engine.add("b", [2] * 14, max_tokens=20)
        while not b.num_preemptions:
            engine.step()
        assert b.num_output_placeholders > 0
        assert b.status == RequestStatus.PREEMPTED
        engine.run()
        engine.check_tokens(a, b)

    def test_a_request_can_end_while_preempted(self):
        engine = FakeEngine(num_blocks=6, depth=2)
        engine.add("a", [1] * 14, max_tokens=20)
        b = engine.add("b", [2] * 16, max_tokens=18)
        while not b.num_output_placeholders or not b.num_preemptions:
            engine.step()
        left = b.num_output_tokens + b.num_output_placeholders
        b.max_tokens = left  # the token in flight is its last
        engine.run()
        assert len(engine.tokens("b")) == left
        assert engine.finish_reason("b") == FinishReason.LENGTH

    def test_arrival_order_is_kept(self):
        engine = FakeEngine(num_blocks=8, max_num_seqs=4)
        for i in range(8):
            engine.add(f"r{i}", [i] * 15, max_tokens=10)
        ends = []
        while engine.scheduler.has_requests():
            ends += [o.request_id for o in engine.step() if o.finish_reason is not None]
        assert engine.scheduler.make_stats().num_preemptions > 0
        assert ends == [f"r{i}" for i in range(8)]
