"""Arrival of requests, steps ahead of their results, and checks of the state."""

import msgspec
import pytest

from octavo.errors import ContextLengthError, RequestError
from octavo.messages import FinishReason, ModelRunnerOutput
from octavo.request import RequestStatus
from tests.fakes import FakeEngine, scheduled_tokens


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


def test_an_empty_step_brings_nothing():
    engine = FakeEngine()
    work = engine.scheduler.schedule()
    assert work.scheduled_reqs == []
    assert engine.scheduler.update_from_output(work, ModelRunnerOutput()) == []
