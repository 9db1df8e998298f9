"""Requests in the background beside others."""

import pytest

from tests.fakes import FakeEngine, scheduled_tokens


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
