"""Requests for vectors of texts, in steps of their own and beside answers."""

import pytest

from octavo.errors import ContextLengthError
from octavo.messages import FinishReason, PoolingSpec
from tests.fakes import FakeEngine, pooled, scheduled_tokens


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
        engine.check_tokens(request)
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
