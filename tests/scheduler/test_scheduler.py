from collections import deque

import msgspec
import pytest

from octavo.errors import ContextLengthError, RequestError
from octavo.messages import FinishReason, GrammarSpec, ModelRunnerOutput, PoolingSpec
from octavo.request import RequestStatus
from octavo.scheduler.speculation import DraftLengths
from tests.fakes import FakeEngine, expected_output, pages, pooled, scheduled_tokens
from tests.params import unpack_logprobs


def ids(requests):
    return [request.request_id for request in requests]


def check_tokens(engine, *requests):
    for request in requests:
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        alone = expected_output(request.sampling_params, prompt, engine.scheduler.max_model_len)
        assert engine.tokens(request.request_id) == alone


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
        assert "other" in ids(engine.scheduler.running)
        engine.run()

    def test_those_that_wait_let_a_later_call_pass(self):
        engine = FakeEngine(max_num_seqs=4)
        for turn in range(20):
            engine.add(f"many-{turn}", range(4), turn=turn)
        engine.step()
        engine.add("other", range(4))
        engine.step()
        assert "other" not in ids(engine.scheduler.running)
        while len(engine.scheduler.waiting) == 17:
            engine.step()
        assert "other" in ids(engine.scheduler.running)
        engine.run()


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
        check_tokens(engine, request)

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
        check_tokens(engine, request)


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
        check_tokens(engine, a, b)
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
        assert ids(engine.scheduler.running) == ["a", "b"]
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
        check_tokens(engine, a)


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
        check_tokens(engine, a, b)

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
        check_tokens(engine, a, c)
        (last,) = engine.outputs["b"]
        assert last.finish_reason == FinishReason.ERROR
        assert (last.error, last.error_kind) == ("made to fail", "RequestError")
        assert (b.status, b.error) == (RequestStatus.FINISHED_ERROR, "made to fail")


class TestPreemption:
    def test_the_latest_request_gives_way(self):
        engine = FakeEngine(num_blocks=8)
        requests = [engine.add(name, [i] * 15, max_tokens=30) for i, name in enumerate("abc")]
        engine.run()
        assert requests[0].num_preemptions == 0
        assert requests[2].num_preemptions > 0
        check_tokens(engine, *requests)
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
        check_tokens(engine, *requests)
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
        check_tokens(engine, a, b)

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


class TestBackground:
    """Lines of batches make place for all other requests, under every policy."""

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_any_other_request_takes_a_seat_at_the_next_step(self, policy):
        engine = FakeEngine(scheduling_policy=policy, max_num_seqs=2)
        lines = [engine.add(x, [i] * 9, background=True, priority=-9) for i, x in enumerate("abc")]
        engine.step()
        assert ids(engine.scheduler.running) == ["a", "b"]
        online = engine.add("online", [9] * 4, priority=9)
        engine.step()
        assert ids(engine.scheduler.running) == ["online", "a"]
        engine.run()
        check_tokens(engine, online, *lines)

    def test_it_takes_their_blocks(self):
        engine = FakeEngine(num_blocks=9, max_model_len=64)
        line = engine.add("line", [1] * 50, background=True, max_tokens=4)
        engine.step()
        online = engine.add("online", [2] * 40, max_tokens=4)
        engine.step()
        assert ids(engine.scheduler.running) == ["online"]
        engine.run()
        check_tokens(engine, online, line)
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
        check_tokens(engine, online, *lines)

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


class TestPriority:
    def test_better_priority_is_served_first(self):
        engine = FakeEngine(scheduling_policy="priority", max_num_seqs=1)
        engine.add("late", range(4), priority=5)
        engine.add("early", range(4), priority=-5)
        engine.step()
        assert ids(engine.scheduler.running) == ["early"]
        engine.run()

    def test_it_takes_a_seat(self):
        engine = FakeEngine(scheduling_policy="priority", max_num_seqs=2)
        a = engine.add("a", range(4), priority=1, max_tokens=20)
        b = engine.add("b", range(4), priority=2, max_tokens=20)
        engine.step()
        c = engine.add("c", range(4), priority=1)
        engine.step()
        assert ids(engine.scheduler.running) == ["a", "c"]
        assert (a.num_preemptions, b.num_preemptions, c.num_preemptions) == (0, 1, 0)
        engine.run()
        check_tokens(engine, a, b, c)

    def test_equal_priority_does_not(self):
        engine = FakeEngine(scheduling_policy="priority", max_num_seqs=1)
        a = engine.add("a", range(4), priority=1, turn=5)
        engine.step()
        engine.add("b", range(4), priority=1)
        engine.step()
        assert ids(engine.scheduler.running) == ["a"]
        assert a.num_preemptions == 0
        engine.run()

    def test_it_takes_blocks(self):
        engine = FakeEngine(scheduling_policy="priority", num_blocks=9, max_model_len=64)
        a = engine.add("a", [1] * 30, priority=1, max_tokens=10)
        b = engine.add("b", [2] * 30, priority=2, max_tokens=10)
        engine.step()
        c = engine.add("c", [3] * 30, priority=0, max_tokens=10)
        engine.step()
        assert ids(engine.scheduler.running) == ["c", "a"]
        engine.run()
        check_tokens(engine, a, b, c)
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
        check_tokens(engine, a, b, c)

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


class TestFinish:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_abort_in_every_state(self, depth):
        engine = FakeEngine(max_num_seqs=2, depth=depth)
        requests = {name: engine.add(name, range(20), max_tokens=30) for name in "abcd"}
        engine.scheduler.hold("d", RequestStatus.WAITING_FOR_FSM)
        for _ in range(3):
            engine.step()
        engine.scheduler.finish_requests(["a", "c", "d", "unknown"], RequestStatus.FINISHED_ABORTED)
        engine.scheduler.check_integrity()
        before = engine.tokens("a")
        engine.run()
        assert engine.tokens("a") == before
        assert engine.tokens("c") == engine.tokens("d") == []
        check_tokens(engine, requests["b"])
        engine.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)

    def test_a_result_for_a_former_owner_of_an_id_is_dropped(self):
        engine = FakeEngine(depth=2)
        engine.add("a", [1] * 8)
        engine.schedule()
        engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        a = engine.add("a", [2] * 12)
        engine.run()
        check_tokens(engine, a)

    def test_blocks_of_an_aborted_request_are_handed_out_while_its_step_is_in_flight(self):
        engine = FakeEngine(num_blocks=5, depth=3)
        engine.add("a", [1] * 24, max_tokens=8)
        engine.schedule()
        engine.schedule()
        engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        b = engine.add("b", [2] * 24, max_tokens=8)
        c = engine.add("c", [1] * 24, max_tokens=8)
        engine.run()
        check_tokens(engine, b, c)

    def test_errors_from_outside_are_put_out(self):
        engine = FakeEngine()
        engine.add("a", range(4))
        engine.scheduler.hold("a", RequestStatus.WAITING_FOR_FSM)
        engine.scheduler.fail_request("a", "bad grammar")
        engine.scheduler.fail_request("a", "twice")
        assert engine.scheduler.has_requests()
        (output,) = engine.step()
        assert (output.error, output.error_kind) == ("bad grammar", "RequestError")
        assert not engine.scheduler.has_requests()

    def test_deadlines(self):
        engine = FakeEngine(max_num_seqs=1, depth=2)
        engine.add("a", [1] * 8, deadline=5.0, max_tokens=50)
        engine.add("c", [3] * 8, deadline=5.0)
        b = engine.add("b", [2] * 8, deadline=500.0)
        d = engine.add("d", [4] * 8)
        for _ in range(4):
            engine.step()
        engine.now = 5.0
        engine.run()
        for name in "ac":
            last = engine.outputs[name][-1]
            assert last.finish_reason == FinishReason.ERROR
            assert last.error_kind == "DeadlineError"
        check_tokens(engine, b, d)
        assert 0 < len(engine.tokens("a")) < 50
        assert engine.tokens("c") == []

    def test_first_token_deadlines(self):
        engine = FakeEngine(max_num_seqs=1)
        a = engine.add("a", [1] * 8, first_token_deadline=5.0, max_tokens=50)
        engine.add("b", [2] * 8, first_token_deadline=5.0, deadline=6.0)
        engine.add("c", [3] * 8, first_token_deadline=900.0, deadline=5.0)
        engine.add("d", [4] * 8, first_token_deadline=5.0)
        engine.scheduler.hold("d", RequestStatus.WAITING_FOR_FSM)
        assert engine.scheduler.next_held_deadline == 5.0
        engine.step()
        engine.now = 5.0
        engine.run()
        check_tokens(engine, a)
        errors = [(engine.outputs[i][-1].error_kind, engine.outputs[i][-1].error) for i in "bcd"]
        late = "The first token did not arrive in time."
        assert errors == [
            ("FirstTokenError", late),
            ("DeadlineError", "The deadline passed after 0 output tokens."),
            ("FirstTokenError", late),
        ]


class TestWaits:
    def test_they_do_not_block_the_queue(self):
        engine = FakeEngine(max_num_seqs=1)
        a = engine.add("a", range(4))
        engine.scheduler.hold("a", RequestStatus.WAITING_FOR_FSM)
        b, c = engine.add("b", range(4)), engine.add("c", range(4))
        engine.step()
        assert ids(engine.scheduler.running) == ["b"]
        assert engine.scheduler.make_stats().num_waiting_reqs == 2
        engine.scheduler.set_ready("a")
        engine.scheduler.set_ready("a")
        while ids(engine.scheduler.running) == ["b"]:
            engine.step()
        engine.step()
        assert ids(engine.scheduler.running) == ["a"]  # it arrived before c
        engine.run()
        check_tokens(engine, a, b, c)

    def test_a_request_can_arrive_with_one(self):
        engine = FakeEngine()
        donor = engine.add("x", range(4))
        engine.scheduler.finish_requests(["x"], RequestStatus.FINISHED_ABORTED)
        donor.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        engine.scheduler.add_request(donor)
        assert engine.schedule().total_num_scheduled_tokens == 0
        engine.update()
        engine.scheduler.set_ready("x")
        engine.run()
        check_tokens(engine, donor)


class TestAsync:
    def test_steps_are_scheduled_ahead(self):
        engine = FakeEngine(depth=3)
        a = engine.add("a", range(4), max_tokens=5)
        works = [engine.schedule() for _ in range(3)]
        assert [scheduled_tokens(w) for w in works] == [{"a": 4}, {"a": 1}, {"a": 1}]
        assert a.num_output_placeholders == 3
        engine.run()
        check_tokens(engine, a)

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
        check_tokens(engine, a)

    def test_updates_must_come_in_order(self):
        engine = FakeEngine(depth=2)
        engine.add("a", range(4))
        engine.schedule()
        engine.schedule()
        with pytest.raises(AssertionError, match="in order"):
            engine.scheduler.update_from_output(*engine.in_flight[1])


class TestSpeculation:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_tokens_are_those_without(self, depth):
        engine = FakeEngine(num_drafts=4, depth=depth)
        requests = [engine.add(f"r{i}", [i] * 10, max_tokens=40) for i in range(4)]
        engine.run()
        check_tokens(engine, *requests)
        assert engine.executor.num_accepted > 20

    def test_drafts_keep_to_the_budget(self):
        engine = FakeEngine(num_drafts=4, max_num_batched_tokens=8)
        requests = [engine.add(f"r{i}", [i] * 3, max_tokens=30) for i in range(8)]
        engine.run()
        check_tokens(engine, *requests)
        assert engine.executor.num_accepted > 0

    def test_rejected_drafts_are_rolled_back(self):
        engine = FakeEngine(num_drafts=4)
        a = engine.add("a", range(10), max_tokens=40)
        while "a" in engine.scheduler.requests:
            engine.step()
            if a.status == RequestStatus.RUNNING:
                assert a.num_computed_tokens == a.num_tokens - 1
        stats = engine.scheduler.make_stats()
        assert stats.num_draft_tokens > engine.executor.num_accepted > 0
        assert sum(stats.num_accepted_tokens_per_pos) == engine.executor.num_accepted
        assert stats.num_drafts < len(engine.steps)

    def test_counts_of_each_request(self):
        engine = FakeEngine(num_drafts=4)
        for name, length in (("a", 12), ("b", 7)):
            engine.add(name, range(length), max_tokens=20)
        engine.run()
        last = [engine.outputs[name][-1] for name in "ab"]
        stats = engine.scheduler.make_stats()
        assert sum(output.num_draft_tokens for output in last) == stats.num_draft_tokens
        assert sum(output.num_accepted_tokens for output in last) == engine.executor.num_accepted
        assert engine.executor.num_accepted > 0
        assert all(output.num_draft_tokens > 0 for output in last)

    @pytest.mark.parametrize("windows", [(None,), (None, 5)])
    def test_a_request_with_drafts_in_flight_is_scheduled_on(self, windows):
        """The scheduler assumes a token for each place, and adds places for more."""
        engine = FakeEngine(num_drafts=4, depth=2, caches=pages(*windows))
        a = engine.add("a", range(10), max_tokens=40)
        corrected = 0
        while "a" in engine.scheduler.requests:
            engine.schedule()
            while len(engine.in_flight) > 1:
                engine.update()
            [scheduled] = engine.steps[-1].scheduled_reqs or [None]
            if scheduled is not None and scheduled.num_drafts:
                expected = a.num_computed_tokens
                [behind] = engine.schedule().scheduled_reqs or [None]
                if behind is None:  # its last token may be in flight
                    assert a.num_tokens + a.num_output_placeholders == 50
                    continue
                assert behind.num_tokens == 1 + behind.num_drafts
                expected += behind.num_tokens
                assert a.num_computed_tokens == expected
                engine.update()
                corrected += a.num_computed_tokens < expected
        assert corrected > 1
        assert engine.executor.num_accepted > 1
        engine.run()
        check_tokens(engine, a)

    def test_places_are_shared_out_in_order(self, monkeypatch):
        """A step has a total number of places, and none for requests that do not sample next."""
        monkeypatch.setattr(DraftLengths, "choose", lambda lengths, num_reqs: lengths.most)
        engine = FakeEngine(num_drafts=4, max_num_batched_tokens=40)
        for i in range(4):
            engine.add(f"r{i}", [i] * 5, max_tokens=[2, 30, 30, 30][i])
        engine.step()
        work = engine.schedule()
        assert [r.num_drafts for r in work.scheduled_reqs] == [0, 4, 4, 4]
        engine.scheduler.drafting.max_num_drafts = 6
        engine.update()
        engine.add("long", [9] * 100)
        work = engine.schedule()
        places = {r.req_id: r.num_drafts for r in work.scheduled_reqs}
        assert places == {"r1": 4, "r2": 2, "r3": 0, "long": 0}

    @pytest.mark.parametrize("depth", [1, 2])
    def test_forced_tokens_have_places_once(self, depth):
        engine = FakeEngine(depth=depth)  # no speculation
        engine.scheduler.drafting.max_num_drafts, engine.executor.num_drafts = 32, 8
        plain = engine.add("p", [1, 2], max_tokens=30)
        forced = [engine.add(str(i), [1, 2, i], max_tokens=30) for i in range(3, 6)]
        for _ in range(2):
            engine.step()
        for request in forced:
            request.num_forced = 8
        places = {r.req_id: r.num_drafts for r in engine.schedule().scheduled_reqs}
        assert places == {"p": 0, "3": 8, "4": 8, "5": 8}
        places = {r.req_id: r.num_drafts for r in engine.schedule().scheduled_reqs}
        assert set(places.values()) == {0}
        while len(engine.in_flight) > depth - 1:
            engine.update()
        engine.run()
        for request in (plain, *forced):
            assert engine.tokens(request.request_id) == expected_output(
                request.sampling_params, request.all_token_ids[: request.num_prompt_tokens], 128
            )

    def test_with_many_requests_nothing_is_forced(self):
        engine = FakeEngine()
        engine.scheduler.drafting.max_num_drafts = 32
        requests = [engine.add(str(i), [1, 2, i], max_tokens=30) for i in range(5)]
        engine.step()
        assert engine.scheduler.forced_per_request == 0
        for request in requests:
            request.num_forced = 8
        assert {r.num_drafts for r in engine.schedule().scheduled_reqs} == {0}
        assert {request.num_forced for request in requests} == {0}

    def test_steps_with_forced_tokens_teach_nothing_about_drafts(self):
        engine = FakeEngine(num_drafts=2)
        engine.scheduler.drafting.max_num_drafts, engine.executor.num_drafts, learned = 16, 8, []
        engine.scheduler.drafting.lengths.record = lambda *args: learned.append(args)
        request = engine.add("0", [1, 2], max_tokens=30)
        engine.step()
        engine.step()
        assert len(learned) == 1
        request.num_forced = 6
        engine.step()
        assert len(learned) == 1
        engine.run()

    def test_a_change_of_drafting_is_logged_once_and_at_most_once_a_minute(self, caplog):
        caplog.set_level("INFO", "octavo.scheduler.speculation")
        engine = FakeEngine(num_drafts=2)
        engine.add("0", [1, 2], max_tokens=30)
        lengths = engine.scheduler.drafting.lengths
        lengths.choose = lambda num_reqs: 0
        for engine.now, lengths.paused in ((0, False), (1, True), (2, True), (3, False), (61, 0)):
            engine.step()
            assert engine.scheduler.make_stats().drafting_paused == lengths.paused
        assert caplog.messages == [
            "drafting paused: does not pay at this load (1 running)",
            "drafting resumed: pays at this load (1 running)",
        ]

    def test_a_grammar_counts_where_a_request_samples(self):
        engine = FakeEngine(max_num_batched_tokens=16)
        for request_id, grammar in (("0", None), ("1", GrammarSpec("regex", "a"))):
            request = engine.add(request_id, [int(request_id)] * 20, max_tokens=3)
            request.sampling_params = msgspec.structs.replace(
                request.sampling_params, grammar=grammar
            )
        engine.run()
        sampling = [(r.req_id, r.has_grammar) for step in engine.steps for r in step.scheduled_reqs]
        assert sampling.count(("1", True)) == 3
        assert ("1", False) in sampling
        assert ("0", True) not in sampling

    def test_nobody_is_preempted_for_drafts(self):
        engine = FakeEngine(num_drafts=4, num_blocks=5, block_size=8)
        a = engine.add("a", range(12), max_tokens=4)
        b = engine.add("b", range(20, 32), max_tokens=4)
        engine.step()
        while engine.scheduler.requests:
            engine.step()
        check_tokens(engine, a, b)
        assert engine.scheduler.make_stats().num_preemptions == 0

    def test_drafts_after_a_stop_are_dropped_with_their_logprobs(self):
        alone = FakeEngine()
        alone.add("a", range(10), max_tokens=40)
        alone.run()
        for at in range(1, 20):
            engine = FakeEngine(num_drafts=4)
            stop = [alone.tokens("a")[at]]
            a = engine.add("a", range(10), max_tokens=40, stop=stop, logprobs=0)
            engine.run()
            check_tokens(engine, a)
            rows = [t for o in engine.outputs["a"] for (t,) in unpack_logprobs(o.new_logprobs)[0]]
            assert rows == engine.tokens("a")

    def test_never_past_the_context(self):
        engine = FakeEngine(num_drafts=4, max_model_len=20)
        a = engine.add("a", range(10), max_tokens=40)
        engine.run()
        check_tokens(engine, a)
        assert len(engine.tokens("a")) == 10


class TestFailedStep:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_its_requests_fail_and_the_others_start_over(self, depth):
        engine = FakeEngine(depth=depth, max_num_batched_tokens=16)
        engine.add("a", range(16))
        engine.add("b", range(16))
        engine.schedule()
        while len(engine.in_flight) < depth:
            engine.schedule()
        c = engine.add("c", range(16))
        work, _ = engine.in_flight.popleft()
        failed = engine.scheduler.fail_step(work, "out of memory")
        engine.scheduler.check_integrity()
        assert [(o.request_id, o.error) for o in failed] == [("a", "out of memory")]
        assert engine.scheduler.kv_cache_manager.num_used_blocks == 0
        # The step's data was not written, and no later step may use it.
        engine.executor.memory.clear()
        engine.run()
        assert engine.tokens("a") == []
        assert engine.tokens("b") == engine.tokens("c")
        check_tokens(engine, c)

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_a_lost_step_is_scheduled_again(self, depth):
        engine = FakeEngine(depth=depth, max_num_batched_tokens=16)
        added = [engine.add(name, range(16), max_tokens=6) for name in "ab"]
        for _ in range(4):
            engine.step()
        while len(engine.in_flight) < depth:
            engine.schedule()
        work, _ = engine.in_flight.popleft()
        assert work.scheduled_reqs
        assert engine.scheduler.repeat_step(work) == []
        engine.scheduler.check_integrity()
        engine.executor.memory.clear()
        engine.run()
        for request in added:
            check_tokens(engine, request)
            assert len(engine.tokens(request.request_id)) == 6

    def test_an_empty_step(self):
        engine = FakeEngine()
        assert engine.scheduler.fail_step(engine.scheduler.schedule(), "no") == []


class TestCaching:
    def test_siblings_share_the_prompt_in_their_first_step(self):
        engine = FakeEngine()
        requests = [engine.add(f"r{i}", range(20), seed=i) for i in range(4)]
        engine.step()
        assert scheduled_tokens(engine.steps[0]) == {"r0": 20, "r1": 4, "r2": 4, "r3": 4}
        engine.run()
        check_tokens(engine, *requests)

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
        check_tokens(engine, *requests)
        assert {r.num_cached_tokens for r in requests[1:]} == {length - 1}

    def test_nothing_to_copy_is_nothing_to_wait_for(self):
        engine = FakeEngine()
        requests = self.siblings(engine, range(17))
        engine.run()
        assert scheduled_tokens(engine.steps[0]) == {"r0": 17, "r1": 1, "r2": 1, "r3": 1}
        assert engine.executor.num_copies == 0
        check_tokens(engine, *requests)

    def test_siblings_copy_each_groups_own_block(self):
        engine = FakeEngine(caches=pages(None, 9), num_drafts=3, depth=2)
        requests = self.siblings(engine, range(30), max_tokens=30)
        engine.step()
        engine.step()
        assert len(engine.steps[1].blocks_to_copy) == 2 * 3
        engine.run()
        check_tokens(engine, *requests)

    def test_a_block_that_has_left_the_leaders_window_is_not_copied(self):
        engine = FakeEngine(caches=pages(None, 5), max_num_seqs=8)
        leader = engine.add("r0", range(20), max_tokens=30)
        for _ in range(12):
            engine.step()
        other = engine.add("r1", range(20), seed=1, leader=leader)
        engine.run()
        check_tokens(engine, leader, other)

    def test_without_a_leader_siblings_compute_the_end_themselves(self):
        engine = FakeEngine()
        requests = self.siblings(engine, range(20))
        engine.step()
        engine.scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED)
        engine.step()
        assert scheduled_tokens(engine.steps[1]) == {"r1": 4, "r2": 4, "r3": 4}
        engine.run()
        check_tokens(engine, *requests[1:])

    def test_a_leader_that_takes_long_is_not_waited_for(self):
        engine = FakeEngine(long_prefill_token_threshold=4)
        requests = self.siblings(engine, range(20))
        engine.step()
        assert scheduled_tokens(engine.steps[0]) == {f"r{i}": 4 for i in range(4)}
        engine.run()
        check_tokens(engine, *requests)

    def test_others_wait_for_a_leader_one_step_at_most(self):
        engine = FakeEngine()
        requests = [*self.siblings(engine, range(20), n=2), engine.add("b", range(50, 60), turn=5)]
        engine.step()
        engine.step()
        assert scheduled_tokens(engine.steps[0]) == {"r0": 20}
        assert scheduled_tokens(engine.steps[1]) == {"r0": 1, "r1": 1, "b": 10}
        engine.run()
        check_tokens(engine, *requests)

    def test_a_prompt_known_to_its_end_is_copied_on_write(self):
        engine = FakeEngine()
        a = engine.add("a", range(16), max_tokens=20)
        engine.step()
        b = engine.add("b", range(16), max_tokens=20, seed=3)
        engine.step()
        assert scheduled_tokens(engine.steps[-1]) == {"a": 1, "b": 1}
        assert len(engine.steps[-1].blocks_to_copy) == 1
        engine.run()
        check_tokens(engine, a, b)
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


def test_a_failure_of_a_step_that_was_dropped_fails_nobody_and_ends():
    """One step fails once, and a request fails each step that it is in."""
    engine = FakeEngine(max_num_seqs=3)
    engine.add("good", [1, 2, 3, 4, 5], max_tokens=9)
    scheduler, in_flight, failed = engine.scheduler, deque(), []
    for number in range(40):
        while len(in_flight) < 2:
            in_flight.append(scheduler.schedule())
            if number == 0 and len(in_flight) == 1:
                engine.add("poison", [1, 2, 3], max_tokens=9)
        work = in_flight.popleft()
        ids = [request.req_id for request in work.scheduled_reqs]
        if number == 0 or "poison" in ids:
            failed += [output.request_id for output in scheduler.fail_step(work, "broken")]
        else:
            output = ModelRunnerOutput(req_ids=ids, sampled_token_ids=[[1] for _ in ids])
            scheduler.update_from_output(work, output)
        if number == 0:
            engine.add("later", [1, 2, 3, 4], max_tokens=3)
        scheduler.check_integrity()
    assert not scheduler.requests
    assert failed[0] == "good"
    assert "poison" in failed


def test_what_a_resumed_request_has_is_not_counted_as_cached_prompt():
    engine = FakeEngine(num_blocks=64)
    engine.add("a", list(range(10)), max_tokens=40)
    engine.run()
    output = [token for o in engine.outputs["a"] for token in o.new_token_ids]
    engine.add("b", list(range(10)), output=output[:30], max_tokens=40)
    engine.run()
    assert engine.outputs["b"][0].num_cached_tokens == 10


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


class TestTexts:
    """Requests that return a vector: they end with their last token, and sample none."""

    LAST, MEAN = PoolingSpec("embed"), PoolingSpec("embed", reads_all=True)
    WHOLE = PoolingSpec("embed", reads_all=True, whole=True)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_text_in_chunks_ends_with_its_vector(self, depth):
        engine = FakeEngine(max_num_batched_tokens=10, depth=depth)
        engine.add("a", range(35), pooling=self.LAST)
        engine.run()
        (output,) = engine.outputs["a"]
        assert output.pooled == pooled(range(35))
        assert (output.finish_reason, output.new_token_ids) == (FinishReason.STOP, [])
        assert [s.total_num_scheduled_tokens for s in engine.steps if s.scheduled_reqs] == [
            *(10, 10, 10),
            5,
        ]

    def test_texts_and_answers_share_steps(self):
        engine = FakeEngine()
        request = engine.add("answer", [1, 2, 3], max_tokens=5)
        engine.add("text", [4, 5, 6], pooling=self.LAST)
        engine.step()
        assert set(scheduled_tokens(engine.steps[0])) == {"answer", "text"}
        engine.run()
        check_tokens(engine, request)
        assert engine.outputs["text"][0].pooled == pooled([4, 5, 6])

    def test_a_whole_text_waits_for_a_step_with_room(self):
        engine = FakeEngine(max_num_batched_tokens=10, long_prefill_token_threshold=2)
        for name, length in (("a", 6), ("b", 6), ("c", 4)):
            engine.add(name, range(length), pooling=self.WHOLE)
        engine.run()
        steps = [scheduled_tokens(step) for step in engine.steps if step.scheduled_reqs]
        assert steps == [{"a": 6}, {"b": 6, "c": 4}]

    def test_a_text_may_fill_the_context_but_not_exceed_it_or_a_step(self):
        engine = FakeEngine(max_model_len=32, max_num_batched_tokens=16)
        engine.add("fits", range(32), pooling=self.LAST)
        engine.run()
        assert engine.outputs["fits"][0].pooled is not None
        with pytest.raises(ContextLengthError, match="has 33 tokens, but the context holds 32"):
            engine.add("long", range(33), pooling=self.LAST)
        with pytest.raises(ContextLengthError, match="has 17 tokens, but a step takes 16"):
            engine.add("whole", range(17), pooling=self.WHOLE)

    @pytest.mark.parametrize(("pooling", "cached"), [(LAST, 16), (MEAN, 0)])
    def test_a_pooler_that_reads_all_tokens_uses_no_cached_prefix(self, pooling, cached):
        engine = FakeEngine()
        for name in ("first", "second"):
            engine.add(name, range(20), pooling=pooling)
            engine.run()
        assert engine.outputs["second"][0].num_cached_tokens == cached

    def test_the_failure_of_one_text_is_its_own(self):
        engine = FakeEngine(fail=["bad"])
        for name in ("good", "bad"):
            engine.add(name, [1, 2, 3], pooling=self.MEAN)
        engine.run()
        assert engine.outputs["good"][0].pooled == pooled([1, 2, 3])
        assert engine.outputs["bad"][0].error == "made to fail"

    def test_a_preempted_text_keeps_the_vector_in_flight(self):
        engine = FakeEngine(depth=2)
        engine.add("a", [1, 2, 3], pooling=self.LAST)
        engine.schedule()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.update()
        assert engine.outputs["a"][0].pooled == pooled([1, 2, 3])
        engine.run()
