"""The effects of results on requests: stops, outputs, statistics, progress."""

import msgspec
import pytest

from octavo.messages import FinishReason
from octavo.request import RequestStatus
from tests.fakes import FakeEngine, scheduled_tokens
from tests.params import unpack_logprobs


class TestStop:
    def outputs(self, **params):
        engine = FakeEngine()
        engine.add("a", range(8), **params)  # its first ten tokens differ from one another
        engine.run()
        return engine.tokens("a"), engine.outputs["a"][-1]

    def test_max_tokens(self):
        tokens, last = self.outputs(max_tokens=5)
        assert len(tokens) == 5
        assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, None)

    def test_stop_token_of_the_request(self):
        free, _ = self.outputs(max_tokens=10)
        tokens, last = self.outputs(max_tokens=10, stop_token_ids=[free[4]])
        assert tokens == free[:5]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, free[4])

    def test_end_of_sequence(self):
        free, _ = self.outputs(max_tokens=10)
        tokens, last = self.outputs(max_tokens=10, stop=[free[4]])
        assert tokens == free[:5]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)

    def test_min_tokens(self):
        free, _ = self.outputs(max_tokens=10)
        tokens, _ = self.outputs(max_tokens=10, min_tokens=4, stop=[free[3]])
        assert tokens == free  # the fourth token may not end it yet
        tokens, _ = self.outputs(max_tokens=10, min_tokens=4, stop=[free[4]])
        assert tokens == free[:5]

    def test_a_stop_token_that_is_the_last_allowed_is_a_stop(self):
        free, _ = self.outputs(max_tokens=10)
        _, last = self.outputs(max_tokens=5, stop=[free[4]])
        assert last.finish_reason == FinishReason.STOP


class TestOutputs:
    def test_logprobs_are_passed_on(self):
        engine = FakeEngine(max_num_batched_tokens=4)
        engine.add("a", range(10), max_tokens=3, logprobs=1, prompt_logprobs=1)
        engine.run()
        outputs = engine.outputs["a"]
        prompt_rows = [o.new_prompt_logprobs for o in outputs if o.new_prompt_logprobs]
        assert [t for rows in prompt_rows for (t,) in unpack_logprobs(rows)[0]] == list(
            range(1, 10)
        )
        assert len(prompt_rows) == 3
        rows = [o.new_logprobs for o in outputs if o.new_logprobs]
        assert [t for r in rows for (t,) in unpack_logprobs(r)[0]] == engine.tokens("a")
        assert [o.new_token_ids for o in outputs][:2] == [[], []]

    def test_prompt_logprobs_come_once_after_a_preemption(self):
        engine = FakeEngine(num_blocks=7, max_num_batched_tokens=16)
        a = engine.add("a", range(20), max_tokens=20)
        b = engine.add("b", range(20, 40), max_tokens=20, prompt_logprobs=1)
        engine.run()
        assert b.num_preemptions > 0
        rows = [o.new_prompt_logprobs for o in engine.outputs["b"] if o.new_prompt_logprobs]
        assert [t for r in rows for (t,) in unpack_logprobs(r)[0]] == list(range(21, 40))
        engine.check_tokens(a, b)

    def test_what_a_request_is_told_about_itself(self):
        engine = FakeEngine()
        engine.now = 7.0
        engine.add("a", range(20), max_tokens=2)
        engine.step()
        engine.now = 9.0
        engine.add("b", range(20), max_tokens=2)
        engine.run()
        assert [(o.num_cached_tokens, o.first_scheduled_time) for o in engine.outputs["a"]] == [
            (0, 7.0)
        ] * 2
        assert [(o.num_cached_tokens, o.first_scheduled_time) for o in engine.outputs["b"]] == [
            (16, 9.0)
        ] * 2

    def test_statistics(self):
        engine = FakeEngine()
        engine.add("a", range(20), max_tokens=2)
        engine.add("b", range(20), max_tokens=2)
        engine.step()
        stats = engine.scheduler.make_stats()
        assert stats.num_running_reqs == 2
        assert stats.num_used_blocks == 4  # two shared and one each
        assert stats.num_total_blocks == 63
        assert stats.kv_cache_usage == 4 / 63
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 16)
        assert (stats.num_steps, stats.num_scheduled_tokens) == (1, 24)
        engine.run()
        stats = engine.scheduler.make_stats()
        assert (stats.num_steps, stats.num_scheduled_tokens) == (2, 26)
        assert stats.num_used_blocks == 0

    def test_an_error_fails_its_request_only(self):
        engine = FakeEngine(fail=["b"], depth=2)
        a, b, c = (engine.add(name, range(20)) for name in "abc")
        engine.run()
        engine.check_tokens(a, c)
        (last,) = engine.outputs["b"]
        assert last.finish_reason == FinishReason.ERROR
        assert (last.error, last.error_kind) == ("made to fail", "RequestError")
        assert (b.status, b.error) == (RequestStatus.FINISHED_ERROR, "made to fail")


class TestProgress:
    """Steps with a part of a prompt make outputs, if the request wants to know them."""

    def make(self, depth=1, caching=True, **options):
        engine = FakeEngine(max_num_batched_tokens=10, depth=depth, caching=caching)
        return engine, engine.add("a", range(35), **options)

    def computed(self, engine, name="a"):
        return [(o.num_computed_tokens, len(o.new_token_ids)) for o in engine.outputs[name]]

    @pytest.mark.parametrize("depth", [1, 2])
    def test_each_part_of_the_prompt(self, depth):
        engine, request = self.make(depth, progress=True, max_tokens=2)
        engine.run()
        assert self.computed(engine) == [(10, 0), (20, 0), (30, 0), (0, 1), (0, 1)]
        assert engine.outputs["a"][0].first_scheduled_time is not None
        engine.check_tokens(request)

    def test_nothing_without_being_asked(self):
        engine, _ = self.make(max_tokens=2)
        engine.run()
        assert self.computed(engine) == [(0, 1), (0, 1)]

    def test_cached_tokens_count(self):
        engine, _ = self.make(max_tokens=2)
        engine.run()
        engine.add("b", range(60), progress=True, max_tokens=1)
        engine.run()
        cached = engine.outputs["b"][0].num_cached_tokens
        assert cached > 20
        parts = [count for count, _ in self.computed(engine, "b")]
        assert parts == [*range(cached + 10, 60, 10), 0]

    def test_only_the_leader_of_several_answers(self):
        engine, request = self.make(caching=False, progress=True, max_tokens=2)
        engine.add("follower", range(35), progress=True, leader=request, max_tokens=2)
        engine.run()
        assert self.computed(engine)[0] == (10, 0)
        assert sum("follower" in scheduled_tokens(step) for step in engine.steps) > 4
        assert all(count == 0 for count, _ in self.computed(engine, "follower"))

    def test_nothing_of_what_is_computed_again(self):
        engine, request = self.make(progress=True, max_tokens=6)
        while not request.num_output_tokens:
            engine.step()
        engine.scheduler.pause("keep")
        engine.scheduler.kv_cache_manager.reset_prefix_cache()
        engine.scheduler.resume()
        engine.run()
        assert self.computed(engine)[4:] == [(0, 1)] * 5
        engine.check_tokens(request)


def test_a_worker_that_samples_nothing_is_a_bug():
    engine = FakeEngine()
    engine.add("a", range(4))
    work, result = engine.schedule(), engine.in_flight[0][1]
    broken = msgspec.structs.replace(result, sampled_token_ids=[[]])
    with pytest.raises(AssertionError, match="a got 0 tokens"):
        engine.scheduler.update_from_output(work, broken)


def test_what_a_resumed_request_has_is_not_counted_as_cached_prompt():
    engine = FakeEngine(num_blocks=64)
    engine.add("a", list(range(10)), max_tokens=40)
    engine.run()
    output = [token for o in engine.outputs["a"] for token in o.new_token_ids]
    engine.add("b", list(range(10)), output=output[:30], max_tokens=40)
    engine.run()
    assert engine.outputs["b"][0].num_cached_tokens == 10
