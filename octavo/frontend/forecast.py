"""When a request will have its first token, and its last: whether its deadlines can be met.

Made of what the front end knows: how long the last steps took, and whose prompts wait. What is not
known counts nothing, so that a forecast is too early rather than too late, and an idle engine takes
every request: from what it refuses it would learn nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable

from octavo.errors import UnmetDeadlineError
from octavo.messages import EngineCoreRequest, SchedulerStats
from octavo.scheduler.fairness import CREDIT_STEPS, Tenant

# Steps of a size that are looked at, and how many of them make a measurement.
_RECENT = 16
_ENOUGH = 4
_MAX_RETRY_AFTER = 60


class StepTimes:
    """How long steps take, by their number of tokens: medians of recent ones."""

    def __init__(self) -> None:
        # Sizes between two powers of two are one.
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._last = SchedulerStats()
        self._last_time = -math.inf

    def record(self, stats: SchedulerStats, timestamp: float) -> None:
        """Take in what the scheduler said when a step had ended.

        Args:
            stats: the scheduler's.
            timestamp: second at which it ended.
        """
        steps = stats.num_steps - self._last.num_steps
        tokens = stats.num_scheduled_tokens - self._last.num_scheduled_tokens
        # Otherwise there was none, the engine is another one, or it had nothing to do before.
        if steps > 0 and tokens > 0 and self._last.num_running_reqs:
            size = (tokens // steps).bit_length()
            self._seconds[size].append((timestamp - self._last_time) / steps)
        if steps:
            self._last, self._last_time = stats, timestamp

    def seconds(self, num_tokens: int) -> float:
        """What a step of so many tokens takes at least; 0 if nothing is known."""
        for size in range(num_tokens.bit_length(), 0, -1):
            if size in self._seconds and len(self._seconds[size]) >= _ENOUGH:
                return statistics.median(self._seconds[size])
        return 0.0


class Forecast:
    """Refuses requests whose deadlines cannot be met.

    Args:
        max_num_batched_tokens: token budget of a step.
        heeds_priority: True if the scheduler does.
    """

    def __init__(self, max_num_batched_tokens: int, *, heeds_priority: bool) -> None:
        self._budget = max_num_batched_tokens
        self._heeds_priority = heeds_priority
        self._times = StepTimes()
        self._stats = SchedulerStats()

    def record(self, stats: SchedulerStats, timestamp: float) -> None:
        """Implement `StepTimes.record`."""
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
            request: it.
            waiting: those that have no token yet.
            num_running: how many have.
            num_tokens: fewest tokens that the answer will have.
            now: second, as deadlines have it.

        Raises:
            UnmetDeadlineError: one of them cannot be met, with the seconds after which it might.
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
        """Seconds until the first token: prompts are computed as fast as steps allow."""
        stats = self._stats
        tokens = len(request.prompt_token_ids) + self._tokens_ahead(request, others)
        if stats.prefix_cache_queries:  # of the prompts as much is cached as before
            tokens -= tokens * stats.prefix_cache_hits // stats.prefix_cache_queries
        room = max(1, self._budget - num_running)
        full, rest = divmod(max(1, tokens), room)
        seconds = full * self._times.seconds(self._budget)
        return seconds + (self._times.seconds(rest + num_running) if rest else 0.0)

    def _tokens_ahead(self, request: EngineCoreRequest, others: list[EngineCoreRequest]) -> int:
        """Prompt tokens that are computed before the request's, as far as is sure."""
        ahead, own = 0, request.options
        of_tenants: defaultdict[Tenant, int] = defaultdict(int)
        for other in others:
            tokens, its = len(other.prompt_token_ids), other.options
            worse = its.priority - own.priority if self._heeds_priority else 0
            if worse < 0:
                ahead += tokens
            elif worse == 0 and (its.share != own.share or its.due <= own.due):
                of_tenants[its.share] += tokens
        mine = of_tenants.pop(own.share, 0)
        # While this tenant gets so many, each of the others gets no more, and less by its credit.
        share = max(0, mine + len(request.prompt_token_ids) - CREDIT_STEPS * self._budget)
        return ahead + mine + sum(min(tokens, share) for tokens in of_tenants.values())
