"""Requests in steps: the budget, what arrives, and what comes out."""

import msgspec
import pytest

from octavo.errors import ContextLengthError, RequestError
from octavo.messages import FinishReason, ModelRunnerOutput
from octavo.request import RequestStatus
from tests.fakes import FakeEngine, scheduled_tokens
from tests.params import unpack_logprobs


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


class TestArrival:
    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "message"),
        [
            (40, 1, "context holds 40 tokens"),
            (20, 30, "need 5 KV-cache blocks, but there are 4"),
        ],
    )
    def test_what_never_fits_is_refused(self, prompt, max_tokens, message):
        engine = FakeEngine(max_model_len=40, num_blocks=5)
        with pytest.raises(ContextLengthError, match=message):
            engine.add("a", range(prompt), max_tokens=max_tokens)
        assert not engine.scheduler.has_requests()
        engine.add("b", range(20), max_tokens=12)
        engine.run()

    def test_a_prompt_longer_than_a_step_needs_chunks(self):
        engine = FakeEngine(max_num_batched_tokens=16, enable_chunked_prefill=False)
        with pytest.raises(ContextLengthError, match="chunked prefill is off"):
            engine.add("a", range(17))

    def test_an_empty_prompt(self):
        with pytest.raises(RequestError, match="empty"):
            FakeEngine().add("a", [])

    def test_an_id_in_use(self):
        engine = FakeEngine()
        engine.add("a", range(4))
        with pytest.raises(RequestError, match="in use"):
            engine.add("a", range(4))
        engine.run()
        engine.add("a", range(4))
        engine.run()

    def test_the_context_bounds_the_output(self):
        engine = FakeEngine(max_model_len=20)
        a = engine.add("a", range(12), max_tokens=100)
        engine.run()
        assert len(engine.tokens("a")) == 8
        assert engine.finish_reason("a") == FinishReason.LENGTH
        engine.check_tokens(a)


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


class TestAsync:
    def test_steps_are_scheduled_ahead(self):
        engine = FakeEngine(depth=3)
        a = engine.add("a", range(4), max_tokens=5)
        works = [engine.schedule() for _ in range(3)]
        assert [scheduled_tokens(w) for w in works] == [{"a": 4}, {"a": 1}, {"a": 1}]
        assert a.num_output_placeholders == 3
        engine.run()
        engine.check_tokens(a)

    def test_what_is_handed_to_the_worker_does_not_change_later(self):
        engine = FakeEngine()
        engine.add("a", range(4))
        work = engine.schedule()
        sent = msgspec.msgpack.encode(work)
        engine.run()
        assert msgspec.msgpack.encode(work) == sent

    def test_never_past_the_last_token(self):
        engine = FakeEngine(depth=4)
        engine.add("a", range(4), max_tokens=2)
        works = [engine.schedule() for _ in range(4)]
        assert [w.total_num_scheduled_tokens for w in works] == [4, 1, 0, 0]
        engine.run()
        engine = FakeEngine(depth=4, max_model_len=6)
        engine.add("a", range(4), max_tokens=100)
        assert [engine.schedule().total_num_scheduled_tokens for _ in range(4)] == [4, 1, 0, 0]
        engine.run()

    def test_what_comes_after_a_stop_is_dropped(self):
        alone = FakeEngine()
        alone.add("a", range(4), max_tokens=10)
        alone.run()
        engine = FakeEngine(depth=3)
        a = engine.add("a", range(4), max_tokens=10, stop=[alone.tokens("a")[2]])
        engine.run()
        assert len(engine.steps) > 4  # steps for its fourth and fifth token were in flight
        engine.check_tokens(a)

    def test_updates_must_come_in_order(self):
        engine = FakeEngine(depth=2)
        engine.add("a", range(4))
        engine.schedule()
        engine.schedule()
        with pytest.raises(AssertionError, match="in order"):
            engine.scheduler.update_from_output(*engine.in_flight[1])


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


class TestIntegrity:
    @pytest.fixture
    def engine(self):
        engine = FakeEngine(max_num_seqs=2)
        for name in "abc":
            engine.add(name, range(10))
        engine.step()
        return engine

    @pytest.mark.parametrize(
        ("harm", "message"),
        [
            (lambda s: s.running.pop(), "lost"),
            (lambda s: s.waiting.push(s.running[0]), "two places"),
            (lambda s: s.running.reverse(), "in order"),
            (lambda s: setattr(s.running[0], "num_output_placeholders", 1), "misses tokens"),
            (lambda s: setattr(s.running[0], "status", RequestStatus.WAITING), "WAITING"),
            (lambda s: setattr(s.waiting.peek(), "num_computed_tokens", 1), "waits with"),
            (lambda s: setattr(s.running[0], "num_computed_tokens", 12), "beyond its tokens"),
            (lambda s: s.kv_cache_manager.free(s.running[0]), "held by"),
        ],
    )
    def test_what_does_not_add_up_is_found(self, engine, harm, message):
        engine.scheduler.check_integrity()
        harm(engine.scheduler)
        with pytest.raises(AssertionError, match=message):
            engine.scheduler.check_integrity()


def test_a_worker_that_samples_nothing_is_a_bug():
    engine = FakeEngine()
    engine.add("a", range(4))
    work, result = engine.schedule(), engine.in_flight[0][1]
    broken = msgspec.structs.replace(result, sampled_token_ids=[[]])
    with pytest.raises(AssertionError, match="a got 0 tokens"):
        engine.scheduler.update_from_output(work, broken)


def test_an_empty_step_brings_nothing():
    engine = FakeEngine()
    work = engine.scheduler.schedule()
    assert work.scheduled_reqs == []
    assert engine.scheduler.update_from_output(work, ModelRunnerOutput()) == []


def test_what_a_resumed_request_has_is_not_counted_as_cached_prompt():
    engine = FakeEngine(num_blocks=64)
    engine.add("a", list(range(10)), max_tokens=40)
    engine.run()
    output = [token for o in engine.outputs["a"] for token in o.new_token_ids]
    engine.add("b", list(range(10)), output=output[:30], max_tokens=40)
    engine.run()
    assert engine.outputs["b"][0].num_cached_tokens == 10
