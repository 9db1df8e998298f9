"""A front end's records of its engines: forecast and metrics of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from octavo.errors import UnmetDeadlineError
from octavo.fleet.core_client import ElasticClient, WatchedClient
from octavo.frontend.forecast import Forecast
from octavo.messages import EngineCoreRequest
from octavo.observability.metrics import EngineMetrics
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.sampling_params import SamplingParams
from octavo.system import clock

logger = logging.getLogger(__name__)


class EngineRecords:
    """Records of the engines of a client, by their index.

    Args:
        client: the client.
        size: number of engines.
        metrics: the front end's metrics.
        make_forecast: returns a forecast for an engine.
        shows_stats: True if the metrics show the engines' statistics; False if a coordinator's do.
    """

    def __init__(
        self,
        client: WatchedClient,
        size: int,
        metrics: EngineMetrics,
        make_forecast: Callable[[], Forecast],
        *,
        shows_stats: bool,
    ) -> None:
        self._client, self._metrics, self._make_forecast = client, metrics, make_forecast
        self._shows_stats = shows_stats
        self.stats: dict[int, SchedulerStats] = {}
        """Latest statistics of each engine, by its index."""
        self._cache_info: dict[str, Any] = {}
        self._forecasts = [make_forecast() for _ in range(size)]
        for index in range(size):
            self._watch(index)

    def __len__(self) -> int:
        return len(self._forecasts)

    def record(self, stats: SchedulerStats, timestamp: float, index: int) -> None:
        """Record the statistics of an engine's step."""
        if index < len(self):  # an engine that is being ended may send more
            self._forecasts[index].record(stats, timestamp)
            self.stats[index] = stats
        metrics = self._metrics.for_engine(index)
        if self._shows_stats:
            metrics.record_scheduler_stats(stats)
        else:
            metrics.keep_stats(stats)

    def record_sleep_state(self, level: int | None) -> None:
        """Record the level at which all engines sleep; None: they are awake."""
        for index in range(len(self)):
            self._metrics.for_engine(index).record_sleep_state(level)

    def set_cache_info(self, info: dict[str, Any]) -> None:
        """Show the KV cache of all engines, which have the same memory plan."""
        self._cache_info = info
        for index in range(len(self)):
            self._metrics.for_engine(index).set_cache_config_info(info)

    def check_deadlines(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        waiting: Sequence[EngineCoreRequest],
        num_running: int,
    ) -> None:
        """Reject a request if no engine can meet its deadlines.

        Args:
            request: a new request with deadlines.
            params: its parameters.
            waiting: requests without a token.
            num_running: number of answers with a token.

        Raises:
            UnmetDeadlineError: no engine can meet them; it has the seconds until a retry.
        """
        core = request.sampling_params
        # A stop text or token may end the answer at once.
        stops = core.all_stop_token_ids or params.stop or core.grammar is not None
        num_tokens = max(1, core.min_tokens) if stops else core.max_tokens
        refusals = []
        for index, forecast in enumerate(self._forecasts):
            others = [r for r in waiting if self._client.engine_of(r.child_ids[0]) == index]
            try:
                forecast.check(
                    request,
                    others,
                    num_running=num_running // len(self),
                    num_tokens=num_tokens,
                    now=clock.now(),
                )
            except UnmetDeadlineError as error:
                refusals.append(error)
        if len(refusals) == len(self):
            self._metrics.record_rejection("deadline_unmet")
            raise refusals[0]

    async def scale(self, client: ElasticClient, size: int) -> None:
        """Change the number of engines and of their records.

        Raises:
            ScalingError: see `ElasticClient.scale`; the records are unchanged.
        """
        before = keep = len(self)
        for index in range(before, size):
            self._forecasts.append(self._make_forecast())
            self._metrics.add_engine(index)
            self._watch(index)
            self._metrics.for_engine(index).set_cache_config_info(self._cache_info)
        try:
            await client.scale(size)
            keep = size
        finally:
            for index in range(keep, max(before, size)):
                self._metrics.remove_engine(index)
                self.stats.pop(index, None)
            del self._forecasts[keep:]
        logger.info("there are %d engines now", size)

    def _watch(self, index: int) -> None:
        self._metrics.for_engine(index).watch_processes(partial(self._client.family_of, index))
