"""Ends of requests: aborts, deadlines, and steps that fail."""

from collections import deque

import pytest

from octavo.messages import FinishReason, ModelRunnerOutput
from octavo.request import RequestStatus
from tests.fakes import FakeEngine


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
        engine.check_tokens(requests["b"])
        engine.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)

    def test_a_result_for_a_former_owner_of_an_id_is_dropped(self):
        engine = FakeEngine(depth=2)
        engine.add("a", [1] * 8)
        engine.schedule()
        engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        a = engine.add("a", [2] * 12)
        engine.run()
        engine.check_tokens(a)

    def test_blocks_of_an_aborted_request_are_handed_out_while_its_step_is_in_flight(self):
        engine = FakeEngine(num_blocks=5, depth=3)
        engine.add("a", [1] * 24, max_tokens=8)
        engine.schedule()
        engine.schedule()
        engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        b = engine.add("b", [2] * 24, max_tokens=8)
        c = engine.add("c", [1] * 24, max_tokens=8)
        engine.run()
        engine.check_tokens(b, c)

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
        engine.check_tokens(b, d)
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
        engine.check_tokens(a)
        errors = [(engine.outputs[i][-1].error_kind, engine.outputs[i][-1].error) for i in "bcd"]
        late = "The first token did not arrive in time."
        assert errors == [
            ("FirstTokenError", late),
            ("DeadlineError", "The deadline passed after 0 output tokens."),
            ("FirstTokenError", late),
        ]


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
        engine.check_tokens(c)

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
            engine.check_tokens(request)
            assert len(engine.tokens(request.request_id)) == 6

    def test_an_empty_step(self):
        engine = FakeEngine()
        assert engine.scheduler.fail_step(engine.scheduler.schedule(), "no") == []


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
