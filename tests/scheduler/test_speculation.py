import random

import msgspec
import pytest

from octavo.messages import GrammarSpec
from octavo.request import RequestStatus
from octavo.scheduler.speculation import DraftLengths
from tests.fakes import FakeEngine, expected_output, pages
from tests.params import unpack_logprobs


def run(lengths, steps, seconds, right, *, num_reqs=1, found=1.0, seed=0):
    """Run steps; return their time and their number of tokens.

    Args:
        seconds: seconds of a step, by the computed rows and by the drafts of each request.
        right: probability that a draft is right, if the one before it was.
        found: probability that drafts exist at all.
    """
    rng = random.Random(seed)
    total = tokens = 0.0
    for _ in range(steps):
        most = lengths.choose(num_reqs)
        drafted = [most if rng.random() < found else 0 for _ in range(num_reqs)]
        accepted = []
        for count in drafted:
            good = 0
            while good < count and rng.random() < right:
                good += 1
            accepted.append(good)
        took = seconds(num_reqs + sum(drafted), most)
        lengths.record(took, drafted, accepted)
        total += took
        tokens += num_reqs + sum(accepted)
    return total, tokens


def memory_bound(rows, drafts):
    """Return the time of a large model: rows cost little; each draft costs its drafter a bit."""
    return 1.0 + 0.02 * rows + 0.03 * drafts


def compute_bound(rows, drafts):
    return 0.1 + rows + 0.03 * drafts


def test_many_drafts_where_they_cost_little_and_are_right():
    lengths = DraftLengths(8)
    run(lengths, 300, memory_bound, 0.95)
    total, tokens = run(lengths, 1000, memory_bound, 0.95)
    assert lengths.choose(1) >= 6
    assert tokens / total > 4


@pytest.mark.parametrize(
    ("seconds", "right", "num_reqs"),
    [(memory_bound, 0.02, 1), (compute_bound, 0.5, 1), (compute_bound, 0.5, 16)],
)
def test_drafts_that_do_not_pay_cost_next_to_nothing(seconds, right, num_reqs):
    lengths = DraftLengths(5)
    run(lengths, 200, seconds, right, num_reqs=num_reqs)
    total, tokens = run(lengths, 3000, seconds, right, num_reqs=num_reqs)
    without = seconds(num_reqs, 0) / num_reqs
    assert total / tokens < 1.03 * without


def test_the_first_answers_of_a_large_batch_are_not_held_up():
    """Numbers of a model with 1.1 billion parameters on two cores: drafts do not pay."""

    def seconds(rows, drafts):
        return max(0.06, 0.0055 * rows) + 0.002 * drafts

    total, tokens = run(DraftLengths(5), 80, seconds, 0.62, num_reqs=16)
    assert total / tokens < 1.03 * seconds(16, 0) / 16
    total, tokens = run(DraftLengths(5), 40, seconds, 0.62)
    assert total / tokens < 0.7 * seconds(1, 0)


def test_it_says_that_drafts_do_not_pay_at_a_load():
    lengths = DraftLengths(5)
    assert not lengths.paused  # nothing is known yet
    states = []
    for _ in range(300):
        run(lengths, 1, compute_bound, 0.5, num_reqs=16)
        states.append(lengths.paused)
    # From the first measurement on, also while it checks for improvements.
    assert states == sorted(states)
    assert states[-1]
    lengths.choose(0)
    assert lengths.paused  # without requests the load is unknown
    run(lengths, 300, memory_bound, 0.95)
    assert not lengths.paused


def test_what_a_method_does_not_find_costs_nothing():
    """It continues to search, and finds repetitions at once."""
    lengths = DraftLengths(5)
    run(lengths, 2000, lambda rows, drafts: 0.1 + 0.5 * rows, 0.9, found=0.0)
    assert lengths.choose(1) > 0


def test_it_follows_the_text():
    lengths = DraftLengths(6)
    run(lengths, 1000, memory_bound, 0.02)
    assert lengths.choose(1) <= 2
    run(lengths, 1500, memory_bound, 0.95)
    assert lengths.choose(1) >= 4
    run(lengths, 300, memory_bound, 0.02)
    assert lengths.choose(1) <= 2


def test_loads_are_told_apart():
    """The best number for one request need not be the best for sixteen."""
    lengths = DraftLengths(6)

    def seconds(rows, drafts):
        return max(1.0, rows / 16) + 0.02 * drafts

    for seed in range(10):
        run(lengths, 100, seconds, 0.8, seed=seed)
        run(lengths, 100, seconds, 0.8, num_reqs=64, seed=seed)
    assert lengths.choose(1) >= 3
    assert lengths.choose(64) <= 2


def test_a_step_that_was_held_up_changes_little():
    lengths = DraftLengths(4)
    run(lengths, 500, memory_bound, 0.9)
    best = lengths.choose(1)
    lengths.record(1000.0, [best], [best])
    run(lengths, 20, memory_bound, 0.9)
    assert lengths.choose(1) >= best - 1


def test_what_a_drafter_does_once_for_a_prompt_is_not_held_against_it():
    lengths, first = DraftLengths(5), [True]

    def seconds(rows, drafts):
        slow = 20.0 if drafts and first.pop() else 0.0
        first.append(False)
        return slow + memory_bound(rows, drafts)

    total, tokens = run(lengths, 60, seconds, 0.8, num_reqs=8)
    assert (total - 20.0) / tokens < 0.7 * memory_bound(8, 0) / 8


def test_time_that_stands_still():
    lengths = DraftLengths(4)
    run(lengths, 50, lambda rows, drafts: 0.0, 0.5)
    assert 0 <= lengths.choose(1) <= 4


def test_a_gain_within_the_error_of_what_is_measured_is_none():
    lengths = DraftLengths(3)
    run(lengths, 500, lambda rows, drafts: 1.0, 0.0)
    lengths._accepted = [0.01, 0.0, 0.0]
    assert [lengths.choose(1) for _ in range(60)].count(0) > 30


class TestSpeculation:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_tokens_are_those_without(self, depth):
        engine = FakeEngine(num_drafts=4, depth=depth)
        requests = [engine.add(f"r{i}", [i] * 10, max_tokens=40) for i in range(4)]
        engine.run()
        engine.check_tokens(*requests)
        assert engine.executor.num_accepted > 20

    def test_drafts_keep_to_the_budget(self):
        engine = FakeEngine(num_drafts=4, max_num_batched_tokens=8)
        requests = [engine.add(f"r{i}", [i] * 3, max_tokens=30) for i in range(8)]
        engine.run()
        engine.check_tokens(*requests)
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
        engine.check_tokens(a)

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
        engine.check_tokens(a, b)
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
            engine.check_tokens(a)
            rows = [t for o in engine.outputs["a"] for (t,) in unpack_logprobs(o.new_logprobs)[0]]
            assert rows == engine.tokens("a")

    def test_never_past_the_context(self):
        engine = FakeEngine(num_drafts=4, max_model_len=20)
        a = engine.add("a", range(10), max_tokens=40)
        engine.run()
        engine.check_tokens(a)
        assert len(engine.tokens("a")) == 10
