"""Turns of requests: seats, priorities, and requests that give way to others."""

import pytest

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


class TestBackground:
    """Lines of batches make place for all other requests, under every policy."""

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_any_other_request_takes_a_seat_at_the_next_step(self, policy):
        engine = FakeEngine(scheduling_policy=policy, max_num_seqs=2)
        lines = [engine.add(x, [i] * 9, background=True, priority=-9) for i, x in enumerate("abc")]
        engine.step()
        assert engine.running_ids() == ["a", "b"]
        online = engine.add("online", [9] * 4, priority=9)
        engine.step()
        assert engine.running_ids() == ["online", "a"]
        engine.run()
        engine.check_tokens(online, *lines)

    def test_it_takes_their_blocks(self):
        engine = FakeEngine(num_blocks=9, max_model_len=64)
        line = engine.add("line", [1] * 50, background=True, max_tokens=4)
        engine.step()
        online = engine.add("online", [2] * 40, max_tokens=4)
        engine.step()
        assert engine.running_ids() == ["online"]
        engine.run()
        engine.check_tokens(online, line)
        assert (online.num_preemptions, line.num_preemptions) == (0, 1)

    def test_lines_do_not_preempt_one_another(self):
        engine = FakeEngine(max_num_seqs=1)
        first = engine.add("first", range(4), background=True, turn=5)
        engine.step()
        engine.add("second", range(4), background=True)
        engine.run()
        assert first.num_preemptions == 0

    @pytest.mark.parametrize("tenants", [(None, None), ("x", "y")])
    def test_a_step_with_others_computes_few_of_their_tokens(self, tenants):
        engine = FakeEngine(max_num_batched_tokens=64, block_size=8)
        online = engine.add("online", [1] * 4, max_tokens=4, tenant=tenants[0])
        engine.step()
        lines = [
            engine.add(x, [i] * 60, background=True, max_tokens=2, tenant=tenants[1])
            for i, x in enumerate("abc")
        ]
        while not online.status.finished:
            engine.step()
            if (work := scheduled_tokens(engine.steps[-1])) and "online" in work:
                assert sum(work.values()) == 1 + 16
        sizes = [step.total_num_scheduled_tokens for step in engine.steps]
        engine.run()
        assert max(step.total_num_scheduled_tokens for step in engine.steps[len(sizes) :]) == 64
        engine.check_tokens(online, *lines)

    def test_they_do_not_count_against_their_tenants_other_requests(self):
        computed = set()
        for tenant in "xyz":
            engine = FakeEngine(max_num_batched_tokens=8)
            engine.add("line", [1] * 100, background=True, tenant=tenant, max_tokens=1)
            for _ in range(8):
                engine.step()
            rivals = [engine.add(x, [ord(x)] * 60, tenant=x, max_tokens=1) for x in "xy"]
            for _ in range(5):
                engine.step()
            computed.add(tuple(rival.num_computed_tokens for rival in rivals))
            engine.run()
        assert len(computed) == 1, computed


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
