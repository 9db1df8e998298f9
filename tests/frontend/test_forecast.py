"""Forecasts of deadlines, from steps that take a millisecond for each token."""

import pytest

from octavo.errors import UnmetDeadlineError
from octavo.frontend.forecast import Forecast, StepTimes
from octavo.messages import CoreSamplingParams
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.scheduler.fairness import CREDIT_STEPS
from tests.params import core_request

BUDGET = 64


def request(length=64, *, ttft=None, deadline=None, priority=0, tenant=None, background=False):
    return core_request(
        "r",
        [1] * length,
        CoreSamplingParams(),
        priority=priority,
        deadline=deadline,
        first_token_deadline=ttft,
        tenant=tenant,
        background=background,
    )


def stats(num_steps, num_tokens, running=1, **counters):
    return SchedulerStats(
        num_running_reqs=running,
        num_steps=num_steps,
        num_scheduled_tokens=num_tokens,
        **counters,
    )


def forecast(*sizes, heeds_priority=True, **counters):
    """Return a forecast after steps with the given numbers of tokens."""
    made = Forecast(BUDGET, heeds_priority=heeds_priority)
    tokens = 0
    for number, size in enumerate([1, *sizes]):
        tokens += size
        made.record(stats(number + 1, tokens, **counters), tokens / 1000)
    return made


def first_token(made, asked, *waiting, num_running=1):
    """Return the smallest limit in ms that is accepted for a request: the forecast."""
    for limit in range(1, 5000):
        trial = request(
            len(asked.prompt_token_ids),
            ttft=limit / 1000,
            priority=asked.options.priority,
            tenant=asked.options.tenant,
        )
        try:
            made.check(trial, waiting, num_running=num_running, num_tokens=1, now=0.0)
        except UnmetDeadlineError:
            continue
        return limit
    raise AssertionError


KNOWN = [BUDGET] * 6 + [1] * 6


class TestStepTimes:
    def test_the_median_of_steps_of_like_size(self):
        times, now = StepTimes(), 0.0
        for number, seconds in enumerate([0.5, 0.1, 0.1, 100.0, 0.1]):
            now += seconds
            times.record(stats(number + 1, 10 * (number + 1)), now)
        assert times.seconds(10) == times.seconds(15) == pytest.approx(0.1)
        # Larger steps take at least as long; for smaller ones nothing is known.
        assert times.seconds(1000) == pytest.approx(0.1)
        assert times.seconds(7) == 0.0

    def test_few_steps_are_none(self):
        times = StepTimes()
        for number in range(4):
            times.record(stats(number + 1, number + 1), float(number))
        assert times.seconds(1) == 0.0
        times.record(stats(5, 5), 4.0)
        assert times.seconds(1) == 1.0

    def test_idle_time_and_another_engine_do_not_count(self):
        times = StepTimes()
        for number in range(6):
            times.record(stats(number + 1, number + 1), float(number))
        for number in range(6, 30):
            times.record(stats(number + 1, number + 1, running=0), 1000.0 * number)
        for number in range(20):
            times.record(stats(1, 1), 1e6 + 10.0 * number)
        assert times.seconds(1) == 1.0


class TestFirstToken:
    def test_nothing_is_known(self):
        made = Forecast(BUDGET, heeds_priority=False)
        asked = request(10**5, ttft=0.001, deadline=0.001)
        made.check(asked, [asked] * 100, num_running=50, num_tokens=1000, now=0.0)

    def test_an_idle_engine_takes_everything(self):
        asked = request(10**5, ttft=0.001, deadline=0.001)
        forecast(*KNOWN).check(asked, [], num_running=0, num_tokens=1000, now=0.0)

    def test_the_own_prompt(self):
        made = forecast(*KNOWN)
        assert first_token(made, request(63)) == 64
        assert first_token(made, request(3 * 63)) == 3 * 64
        assert first_token(made, request(63), num_running=33) == pytest.approx(128, abs=1)

    def test_those_that_are_due_earlier_are_ahead(self):
        made = forecast(*KNOWN)
        asked = request(63)
        assert first_token(made, asked, request(126, ttft=0.0)) == 3 * 64
        assert first_token(made, asked, request(126, ttft=9.0)) == 64
        assert first_token(made, asked, request(126)) == 64

    def test_priorities(self):
        first, later = request(126, priority=-1), request(126, priority=1, ttft=0.0)
        assert first_token(forecast(*KNOWN), request(63), first, later) == 3 * 64
        blind = forecast(*KNOWN, heeds_priority=False)
        assert first_token(blind, request(63), first, later) == 3 * 64

    def test_other_tenants_get_no_more_than_this_one(self):
        made = forecast(*KNOWN)
        flood = [request(6300, tenant="other")] * 10
        assert first_token(made, request(63, tenant="mine"), *flood) == 64
        tokens = 63 * (CREDIT_STEPS + 4)
        expected = tokens + (tokens - CREDIT_STEPS * BUDGET)
        found = first_token(made, request(tokens, tenant="mine"), *flood)
        assert found == pytest.approx(expected, rel=0.1)

    def test_what_was_cached_so_far(self):
        made = forecast(*KNOWN, prefix_cache_queries=100, prefix_cache_hits=50)
        assert first_token(made, request(126)) == 64

    def test_when_to_come_back(self):
        with pytest.raises(UnmetDeadlineError) as caught:
            forecast(*KNOWN).check(
                request(63 * 40, ttft=10.5), [], num_running=1, num_tokens=1, now=10.0
            )
        error = caught.value
        assert (error.status, error.param, error.code) == (429, "max_ttft_ms", "deadline_unmet")
        assert error.retry_after == 3  # 2.56 s are needed, 0.5 s are available
        assert "expected after 2560 ms, 2060 ms too late" in error.message


class TestAnswer:
    def check(self, made, deadline, num_tokens):
        asked = request(63, deadline=deadline)
        made.check(asked, [], num_running=1, num_tokens=num_tokens, now=0.0)

    def test_its_fewest_tokens_count(self):
        made = forecast(*KNOWN)
        self.check(made, 0.065, 1)
        self.check(made, 0.170, 100)
        with pytest.raises(UnmetDeadlineError, match="deadline_ms cannot be met: its answer"):
            self.check(made, 0.160, 100)

    def test_with_drafts_a_step_brings_more_than_one(self):
        made = forecast(*KNOWN, num_drafts=10, num_accepted_tokens_per_pos=[10, 10])
        self.check(made, 0.100, 100)
        with pytest.raises(UnmetDeadlineError):
            self.check(made, 0.090, 100)


@pytest.mark.parametrize("heeds_priority", [False, True])
def test_lines_of_batches_are_behind(heeds_priority):
    made = forecast(*[64] * 10, heeds_priority=heeds_priority)
    soon = {"ttft": 1e-6}
    lines = [request(640, background=True, tenant=t, **soon) for t in (None, "x")]
    own = request(640)
    assert first_token(made, own, *lines) == first_token(made, own)
    assert first_token(made, own, request(640, **soon)) > first_token(made, own)
