"""Forecast of a request's first and last token, to decide whether its deadlines can be met.

It uses the front end's data: the duration of the last steps, and the waiting prompts. Unknown times
count as zero, so that a forecast is too early rather than too late. An idle engine accepts every
request, since a rejected request would yield no measurement.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable

from octavo.errors import UnmetDeadlineError
from octavo.messages import EngineCoreRequest
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.scheduler.fairness import CREDIT_STEPS, Tenant

# Number of recent steps of a size, and number of them that make a measurement.
_RECENT = 16
_ENOUGH = 4
_MAX_RETRY_AFTER = 60


class StepTimes:
    """Durations of steps by their number of tokens: medians of recent ones."""

    def __init__(self) -> None:
        # Sizes between two powers of two share an entry.
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._last = SchedulerStats()
        self._last_time = -math.inf

    def record(self, stats: SchedulerStats, timestamp: float) -> None:
        """Record the scheduler's statistics at the end of a step.

        Args:
            stats: statistics of the scheduler.
            timestamp: second at which the step ended.
        """
        steps = stats.num_steps - self._last.num_steps
        tokens = stats.num_scheduled_tokens - self._last.num_scheduled_tokens
        # Otherwise no step has ended, the engine is a new one, or it was idle before.
        if steps > 0 and tokens > 0 and self._last.num_running_reqs:
            size = (tokens // steps).bit_length()
            self._seconds[size].append((timestamp - self._last_time) / steps)
        if steps:
            self._last, self._last_time = stats, timestamp

    def seconds(self, num_tokens: int) -> float:
        """Return the minimum seconds of a step of `num_tokens` tokens; 0 if unknown."""
        for size in range(num_tokens.bit_length(), 0, -1):
            if size in self._seconds and len(self._seconds[size]) >= _ENOUGH:
                return statistics.median(self._seconds[size])
        return 0.0


class Forecast:
    """Check that rejects requests with deadlines that cannot be met.

    Args:
        max_num_batched_tokens: token budget of a step.
        heeds_priority: True if the scheduler uses priorities.
    """

    def __init__(self, max_num_batched_tokens: int, *, heeds_priority: bool) -> None:
        self._budget = max_num_batched_tokens
        self._heeds_priority = heeds_priority
        self._times = StepTimes()
        self._stats = SchedulerStats()

    def record(self, stats: SchedulerStats, timestamp: float) -> None:
        """Record statistics, as `StepTimes.record` does."""
        self._times.record(stats, timestamp)
        self._stats = stats

    def check(
        self,
        request: EngineCoreRequest,
        waiting: Iterable[EngineCoreRequest],
        *,
        num_running: int,
        num_tokens: int,
        now: float,
    ) -> None:
        """Check a request with deadlines on its arrival; O(waiting).

        Args:
            request: the request.
            waiting: requests without a token.
            num_running: number of requests with tokens.
            num_tokens: minimum number of tokens of the answer.
            now: current second, on the clock of the deadlines.

        Raises:
            UnmetDeadlineError: a deadline cannot be met; it has the seconds until a retry.
        """
        others, stats = list(waiting), self._stats
        if not others and not num_running:
            return
        first = now + self._first_token(request, others, num_running)
        accepted = sum(stats.num_accepted_tokens_per_pos)
        tokens_per_step = 1 + accepted / stats.num_drafts if stats.num_drafts else 1
        step = self._times.seconds(num_running + 1)
        last = first + (num_tokens - 1) / tokens_per_step * step
        limit, whole = request.options.first_token_deadline, request.options.deadline
        if limit is not None and first > limit:
            self._refuse("its first token", "max_ttft_ms", first - now, first - limit)
        if whole is not None and last > whole:
            self._refuse("its answer", "deadline_ms", last - now, last - whole)

    def _refuse(self, what: str, param: str, seconds: float, late: float) -> None:
        raise UnmetDeadlineError(
            f"{param} cannot be met: {what} is expected after {seconds * 1000:.0f} ms, "
            f"{late * 1000:.0f} ms too late; try again later, or allow for more.",
            param,
            min(math.ceil(late), _MAX_RETRY_AFTER),
        )

    def _first_token(
        self, request: EngineCoreRequest, others: list[EngineCoreRequest], num_running: int
    ) -> float:
        """Return the seconds until the first token: prompts are computed as fast as steps allow."""
        stats = self._stats
        tokens = len(request.prompt_token_ids) + self._tokens_ahead(request, others)
        if stats.prefix_cache_queries:  # the cached share of the prompts is as before
            tokens -= tokens * stats.prefix_cache_hits // stats.prefix_cache_queries
        room = max(1, self._budget - num_running)
        full, rest = divmod(max(1, tokens), room)
        seconds = full * self._times.seconds(self._budget)
        return seconds + (self._times.seconds(rest + num_running) if rest else 0.0)

    def _tokens_ahead(self, request: EngineCoreRequest, others: list[EngineCoreRequest]) -> int:
        """Return the prompt tokens that are certainly computed before the request's."""
        ahead, own = 0, request.options
        of_tenants: defaultdict[Tenant, int] = defaultdict(int)
        for other in others:
            tokens, its = len(other.prompt_token_ids), other.options
            worse = int(its.background) - int(own.background)
            if not worse and self._heeds_priority:
                worse = its.priority - own.priority
            if worse < 0:
                ahead += tokens
            elif worse == 0 and (its.share != own.share or its.due <= own.due):
                of_tenants[its.share] += tokens
        mine = of_tenants.pop(own.share, 0)
        # While this tenant receives its share, each other one receives at most that minus its
        # credit.
        share = max(0, mine + len(request.prompt_token_ids) - CREDIT_STEPS * self._budget)
        return ahead + mine + sum(min(tokens, share) for tokens in of_tenants.values())
