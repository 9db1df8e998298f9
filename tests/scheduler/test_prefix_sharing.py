"""Requests that share the beginning of a prompt: found blocks, and copies of blocks."""

import pytest

from octavo.request import RequestStatus
from tests.fakes import FakeEngine, pages, scheduled_tokens


class TestCaching:
    def test_siblings_share_the_prompt_in_their_first_step(self):
        engine = FakeEngine()
        requests = [engine.add(f"r{i}", range(20), seed=i) for i in range(4)]
        engine.step()
        assert scheduled_tokens(engine.steps[0]) == {"r0": 20, "r1": 4, "r2": 4, "r3": 4}
        engine.run()
        engine.check_tokens(*requests)

    @staticmethod
    def siblings(engine, prompt, n=4, **params):
        leader = engine.add("r0", prompt, seed=0, **params)
        return [leader] + [
            engine.add(f"r{i}", prompt, seed=i, turn=i, leader=leader, **params)
            for i in range(1, n)
        ]

    @pytest.mark.parametrize("length", [3, 16, 20, 23])
    def test_siblings_copy_the_end_of_the_prompt(self, length):
        engine = FakeEngine()
        requests = self.siblings(engine, range(length))
        engine.step()
        engine.step()
        assert scheduled_tokens(engine.steps[0]) == {"r0": length}
        assert scheduled_tokens(engine.steps[1]) == {"r0": 1, "r1": 1, "r2": 1, "r3": 1}
        assert len(engine.steps[1].blocks_to_copy) == 3
        engine.run()
        engine.check_tokens(*requests)
        assert {r.num_cached_tokens for r in requests[1:]} == {length - 1}

    def test_nothing_to_copy_is_nothing_to_wait_for(self):
        engine = FakeEngine()
        requests = self.siblings(engine, range(17))
        engine.run()
        assert scheduled_tokens(engine.steps[0]) == {"r0": 17, "r1": 1, "r2": 1, "r3": 1}
        assert engine.executor.num_copies == 0
        engine.check_tokens(*requests)

    def test_siblings_copy_each_groups_own_block(self):
        engine = FakeEngine(caches=pages(None, 9), num_drafts=3, depth=2)
        requests = self.siblings(engine, range(30), max_tokens=30)
        engine.step()
        engine.step()
        assert len(engine.steps[1].blocks_to_copy) == 2 * 3
        engine.run()
        engine.check_tokens(*requests)

    def test_a_block_that_has_left_the_leaders_window_is_not_copied(self):
        engine = FakeEngine(caches=pages(None, 5), max_num_seqs=8)
        leader = engine.add("r0", range(20), max_tokens=30)
        for _ in range(12):
            engine.step()
        other = engine.add("r1", range(20), seed=1, leader=leader)
        engine.run()
        engine.check_tokens(leader, other)

    def test_without_a_leader_siblings_compute_the_end_themselves(self):
        engine = FakeEngine()
        requests = self.siblings(engine, range(20))
        engine.step()
        engine.scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED)
        engine.step()
        assert scheduled_tokens(engine.steps[1]) == {"r1": 4, "r2": 4, "r3": 4}
        engine.run()
        engine.check_tokens(*requests[1:])

    def test_a_leader_that_takes_long_is_not_waited_for(self):
        engine = FakeEngine(long_prefill_token_threshold=4)
        requests = self.siblings(engine, range(20))
        engine.step()
        assert scheduled_tokens(engine.steps[0]) == {f"r{i}": 4 for i in range(4)}
        engine.run()
        engine.check_tokens(*requests)

    def test_others_wait_for_a_leader_one_step_at_most(self):
        engine = FakeEngine()
        requests = [*self.siblings(engine, range(20), n=2), engine.add("b", range(50, 60), turn=5)]
        engine.step()
        engine.step()
        assert scheduled_tokens(engine.steps[0]) == {"r0": 20}
        assert scheduled_tokens(engine.steps[1]) == {"r0": 1, "r1": 1, "b": 10}
        engine.run()
        engine.check_tokens(*requests)

    def test_a_prompt_known_to_its_end_is_copied_on_write(self):
        engine = FakeEngine()
        a = engine.add("a", range(16), max_tokens=20)
        engine.step()
        b = engine.add("b", range(16), max_tokens=20, seed=3)
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"a": 1, "b": 1}
        assert len(engine.steps[-1].blocks_to_copy) == 1
        engine.run()
        engine.check_tokens(a, b)
        assert b.num_cached_tokens == 15

    def test_a_resumed_request_finds_its_own_blocks(self):
        engine = FakeEngine(num_blocks=8)
        for i, name in enumerate("abc"):
            engine.add(name, [i] * 16, max_tokens=20)
        engine.run()
        resumed = [
            r.new.num_computed_tokens
            for work in engine.steps
            for r in work.scheduled_reqs
            if r.new is not None and len(r.new.token_ids) > r.new.num_prompt_tokens
        ]
        assert any(resumed)

    def test_reset(self):
        engine = FakeEngine()
        engine.add("a", range(20))
        engine.step()
        assert not engine.scheduler.reset_prefix_cache()
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
        b = engine.add("b", range(20))
        engine.run()
        assert b.num_cached_tokens == 0
