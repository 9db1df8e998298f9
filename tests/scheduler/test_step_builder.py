"""The choice of a step's requests and of their numbers of tokens."""

import pytest

from tests.fakes import FakeEngine, scheduled_tokens


class TestBudget:
    def test_running_requests_come_first_then_prompts_in_chunks(self):
        engine = FakeEngine(max_num_batched_tokens=10)
        engine.add("a", range(4))
        engine.step()
        engine.add("b", range(20, 35))
        engine.add("c", range(40, 50))
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"a": 1, "b": 9}
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"a": 1, "b": 6, "c": 3}
        assert engine.steps[-1].total_num_scheduled_tokens == 10
        engine.run()

    def test_prompts_stay_whole_without_chunked_prefill(self):
        engine = FakeEngine(max_num_batched_tokens=16, enable_chunked_prefill=False)
        engine.add("a", range(12))
        engine.add("b", range(20, 30))
        engine.add("c", range(2))
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"a": 12}  # no request overtakes b
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"a": 1, "b": 10, "c": 2}
        engine.run()

    def test_a_preempted_request_longer_than_the_budget_is_split_all_the_same(self):
        engine = FakeEngine(
            max_num_batched_tokens=16,
            enable_chunked_prefill=False,
            num_blocks=7,
            max_num_seqs=2,
        )
        a = engine.add("a", range(14), max_tokens=30)
        b = engine.add("b", range(20, 34), max_tokens=30)
        engine.run()
        assert b.num_preemptions > 0
        engine.check_tokens(a, b)
        assert any(
            r.req_id == "b" and r.new is not None and len(r.new.token_ids) > 16
            for work in engine.steps
            for r in work.scheduled_reqs
        )

    def test_long_prompts_are_limited(self):
        engine = FakeEngine(max_num_batched_tokens=40, long_prefill_token_threshold=6)
        engine.add("a", range(20))
        engine.add("b", range(30, 35))
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"a": 6, "b": 5}
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"a": 6, "b": 1}

    def test_max_num_seqs(self):
        engine = FakeEngine(max_num_seqs=2)
        for name in "abc":
            engine.add(name, range(4), max_tokens=3)
        engine.step()
        assert engine.running_ids() == ["a", "b"]
        assert engine.scheduler.make_stats().num_waiting_reqs == 1
        engine.run()


class TestStages:
    """Pipeline parallelism: steps of different requests follow one another."""

    @pytest.mark.parametrize(("stages", "requests"), [(2, 6), (2, 5), (3, 7), (4, 8)])
    def test_requests_that_decode_are_divided_among_the_stages(self, stages, requests):
        engine = FakeEngine(num_stages=stages, depth=stages, num_blocks=200)
        for i in range(requests):
            engine.add(f"r{i}", [1, 2, 3, i], max_tokens=40)
        for _ in range(2 * stages + 2):
            engine.step()
        steps = [{r.req_id for r in step.scheduled_reqs} for step in engine.steps[-2 * stages :]]
        engine.run()
        most = -(-requests // stages)
        assert all(len(step) <= most for step in steps)
        for i in range(stages):  # each of the steps in a row has other requests, and together all
            window = steps[i : i + stages]
            assert sum(map(len, window)) == len(set().union(*window)) == requests

    def test_what_is_in_flight_goes_on_if_there_is_nothing_else(self):
        engine = FakeEngine(num_stages=2, depth=3)
        engine.add("a", [1, 2, 3], max_tokens=20)
        engine.run()
        assert all(step.scheduled_reqs for step in engine.steps[:20])

    def test_a_prompt_fills_the_stages_in_parts(self):
        engine = FakeEngine(num_stages=2, depth=3, max_num_batched_tokens=8)
        engine.add("a", list(range(40)), max_tokens=2)
        for _ in range(3):
            engine.schedule()
        assert [step.total_num_scheduled_tokens for step in engine.steps] == [8, 8, 8]
        engine.run()
