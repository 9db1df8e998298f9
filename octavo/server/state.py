"""What all requests of one server share: engine, limits, and the way to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from octavo import __version__
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import (
    EngineDeadError,
    NotFoundError,
    OctavoError,
    QueueFullError,
    RequestError,
)
from octavo.frontend.request_memory import leaves_room
from octavo.server.auth import tenant_of
from octavo.server.errors import show
from octavo.server.http_state import HttpState
from octavo.server.resumable_streams import StreamRegistry
from octavo.server.stats_log import StatsLog
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Over how many finished answers, and how many seconds, throughput is measured.
_RECENT_ANSWERS = 256
_RECENT_SECONDS = 60.0
MAX_RETRY_AFTER = 60
# How often an idle engine is looked at; a busy one that dies is noticed by its requests.
_WATCH_INTERVAL = 0.5


class ServerState(HttpState):
    """One server.

    Args:
        config: the server's settings.
        engine_config: the engine's; only names are read from it.
        start_engine: makes the engine; may return while the model still loads.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        start_engine: Callable[[], Awaitable[AsyncLLM]],
    ) -> None:
        super().__init__(config)
        self.engine_config = engine_config
        self.model_names = engine_config.model.served_model_name or [engine_config.model.model]
        self.created = int(time.time())
        self.system_fingerprint = _fingerprint(engine_config)
        self.engine: AsyncLLM | None = None
        self.failure: OctavoError | None = None
        """Why there is no engine, or no longer one."""
        self.streams = StreamRegistry(config.resume_grace, self.run)
        self._start_engine = start_engine
        self._started: asyncio.Task[AsyncLLM] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._logging: asyncio.Task[None] | None = None
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the model is loaded."""
        self._num_admitted = 0
        self._admitted: Counter[str | None] = Counter()
        """Of these, by tenant."""
        self._finish_times: deque[float] = deque(maxlen=_RECENT_ANSWERS)
        self._counter = itertools.count()
        self._warned_of_priority = False
        self._template: asyncio.Task[ChatTemplate] | None = None

    # Life of the engine

    def start(self) -> None:
        """Begins to start the engine; returns at once."""
        self._started = asyncio.create_task(self._begin())
        self._loading = asyncio.create_task(self._load())

    async def _begin(self) -> AsyncLLM:
        self.engine = await self._start_engine()
        self.streams.memory = self.engine.request_memory
        return self.engine

    async def _load(self) -> None:
        """Waits for the model, then for the end of the engine."""
        assert self._started is not None
        try:
            engine = await asyncio.shield(self._started)
            if engine.tokenizer is not None:
                await self.chat_template(engine.tokenizer)  # a wrong one is told at once
            await engine.wait_ready()
            self.on_ready()
            while engine.is_running:
                await asyncio.sleep(_WATCH_INTERVAL)
            self.fail(EngineDeadError(engine.health().reason))
        except OctavoError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("the engine could not be started")
            self.fail(EngineDeadError(f"the engine could not be started: {error!r}"))

    def log_stats(self) -> None:
        """Log statistics regularly from now on, unless the settings say otherwise."""
        if not self.engine_config.observability.disable_log_stats:
            self._logging = asyncio.create_task(self._log_stats())

    async def _log_stats(self) -> None:
        engine = self.engine
        assert engine is not None
        log, last = StatsLog(await engine.render_metrics()), time.monotonic()
        while True:
            await asyncio.sleep(self.config.log_stats_interval)
            with contextlib.suppress(OctavoError):  # there is no engine for a while
                page, now = await engine.render_metrics(), time.monotonic()
                log.log(page, now - last)
                last = now

    async def get_engine(self) -> AsyncLLM:
        """The engine; waits until it takes requests.

        Raises:
            EngineDeadError: it could not be started, or died.
        """
        if self.failure is not None:
            raise EngineDeadError(str(self.failure))
        if self.engine is not None:
            return self.engine
        assert self._started is not None
        try:
            return await asyncio.shield(self._started)
        except OctavoError as error:
            raise EngineDeadError(str(error)) from error

    def fail(self, error: OctavoError) -> None:
        """Notes that the engine is gone for good; the server has no more purpose.

        Unless it has none anyway: who stops a server may stop its nodes in the same moment.
        """
        if self.failure is None and (self.num_active or not self.draining):
            self.failure = error
            self.on_failure()

    async def close(self) -> None:
        """Ends the engine. May be called twice."""
        started = self._loading, self._started, self._logging
        tasks = [task for task in started if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.streams.close()
        if self.engine is not None:
            await self.engine.shutdown()

    # Ending

    @property
    def drain_timeout(self) -> float:
        """Seconds that requests in flight get to finish at the end."""
        # Nobody computes anything before the model is there, or while it sleeps.
        idle = self.engine is None or self.engine.loading or self.engine.asleep
        return 0.0 if idle else super().drain_timeout

    def begin_drain(self) -> None:
        """Likewise; streams without a reader end."""
        super().begin_drain()
        self.streams.drain()

    # Requests

    def check_model(self, name: str | None) -> None:
        """Refuses a model that is not served here.

        Raises:
            NotFoundError: naming those that are.
        """
        if name is not None and name not in self.model_names:
            raise NotFoundError(
                f"The model {show(name)} does not exist here; this server has "
                f"{', '.join(self.model_names)}.",
                "model",
            )

    def tenant(self, api_key: str | None) -> str | None:
        """Whose share a request takes; None where there is nobody to share with."""
        return tenant_of(api_key) if len(self.api_keys) > 1 else None

    def next_id(self) -> int:
        """A number that no other engine request of this server has."""
        return next(self._counter)

    def deadline(self, arrival: float, deadline_ms: int | None) -> float | None:
        """When a request has to be finished: the server's limit or its own, the earlier one.

        Args:
            arrival: second of `time.monotonic`.
            deadline_ms: the request's own limit in milliseconds.
        """
        limits = [deadline_ms / 1000] if deadline_ms is not None else []
        if self.config.request_timeout > 0:
            limits.append(self.config.request_timeout)
        return arrival + min(limits) if limits else None

    @contextlib.contextmanager
    def admit(self, count: int, param: str, tenant: str | None = None) -> Iterator[None]:
        """Holds a place for `count` answers while they are made.

        Args:
            count: how many.
            param: the field that asks for so many.
            tenant: whose they are: each of several leaves room for the others.

        Raises:
            QueueFullError: too many are being made; with an estimate of when there is room.
            RequestError: so many answers can never be taken at once.
        """
        limit = self.config.max_num_queued_reqs
        if limit and count > limit:
            raise RequestError(
                f"The request asks for {count} answers (prompts x n), but the server takes at most "
                f"{limit} unfinished ones (--max-num-queued-reqs); split it.",
                param,
            )
        free, held = limit - self._num_admitted, self._admitted[tenant]
        shares = tenant is None or leaves_room(held, count, free)
        if limit and (count > free or not shares):
            if self.engine is not None:
                self.engine.metrics.record_rejection("queue_full")
            who = f"The server already has {self._num_admitted} unfinished answers"
            if count <= free:
                who = f"This API key already has {held} unfinished answers, others need room"
            raise QueueFullError(
                f"{who}, and the limit is {limit} (--max-num-queued-reqs); try again later.",
                self._retry_after(max(1, count - free)),
            )
        self._num_admitted += count
        self._admitted[tenant] += count
        try:
            yield
        finally:
            self._num_admitted -= count
            self._admitted[tenant] -= count
        self._finish_times.extend([time.monotonic()] * min(count, _RECENT_ANSWERS))

    def _retry_after(self, places: int) -> int:
        """Seconds until `places` more answers will have finished, from recent throughput."""
        now = time.monotonic()
        recent = [t for t in self._finish_times if now - t < _RECENT_SECONDS]
        if not recent:
            return 1
        rate = len(recent) / max(now - recent[0], 0.1)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(places / rate)))

    async def run(
        self, receive: Receive, work: Coroutine[object, object, T], deadline: float | None
    ) -> T:
        """Likewise; an engine that is found dead is noted.

        Raises:
            EngineDeadError: it is gone for good, and so is the server's purpose.
        """
        try:
            return await super().run(receive, work, deadline)
        except EngineDeadError as error:
            self.fail(error)
            raise

    def warn_of_priority(self) -> None:
        """Says once that requests have priorities which this server does not heed."""
        if not self._warned_of_priority:
            self._warned_of_priority = True
            logger.warning(
                "requests have a priority, which is ignored without --scheduling-policy priority"
            )

    # Chat templates

    def template_kwargs(
        self, given: dict[str, Any] | None, reasoning_effort: str | None = None
    ) -> dict[str, Any] | None:
        """Return a request's variables for the template, and the server's own for those not given.

        Args:
            given: the request's.
            reasoning_effort: another one of them; it also says whether the model thinks at all,
                unless `given` does.
        """
        variables = {**self.config.default_chat_template_kwargs, **(given or {})}
        if reasoning_effort is not None:
            variables["reasoning_effort"] = reasoning_effort
            if "enable_thinking" not in (given or {}):
                variables["enable_thinking"] = reasoning_effort != "none"
        return variables or None

    def tokenizer(self, engine: AsyncLLM, param: str) -> Tokenizer:
        """The engine's tokenizer.

        Raises:
            RequestError: there is none, so the field `param` cannot be text.
        """
        if engine.tokenizer is None:
            raise RequestError(
                f"This server has no tokenizer (--skip-tokenizer-init), so {param} cannot be "
                "text; give token ids to /v1/completions.",
                param,
            )
        return engine.tokenizer

    async def chat_template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """The template given by flag, or the model's own.

        Raises:
            ConfigError: the one given by flag cannot be used.
        """
        if self._template is None:
            self._template = asyncio.create_task(
                asyncio.to_thread(ChatTemplate.from_tokenizer, tokenizer, self.config.chat_template)
            )
        return await asyncio.shield(self._template)


def state_of(request: Request) -> ServerState:
    """The server that a request came to."""
    state = request.app.state.octavo
    assert isinstance(state, ServerState)
    return state


def _fingerprint(config: EngineConfig) -> str:
    """Changes when the answers of the same request may change."""
    load, cache = config.load.load_format, config.cache.kv_cache_dtype
    settings = [__version__, config.model, load, cache, config.device]
    return "fp_" + hashlib.sha256(msgspec.json.encode(settings)).hexdigest()[:12]
