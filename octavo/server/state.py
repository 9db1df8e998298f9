"""State that all requests of a server share: engine, limits, and an orderly end."""

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
from octavo.frontend.past import WhatIf
from octavo.frontend.request_memory import leaves_room
from octavo.parsers.answer import Format
from octavo.parsers.detect import find_format
from octavo.server.adapter_table import AdapterTable, ServedAdapter
from octavo.server.auth import tenant_of
from octavo.server.background import Background
from octavo.server.errors import show
from octavo.server.hearing import Hearing
from octavo.server.http_state import HttpState
from octavo.server.middleware import context_of
from octavo.server.object_store import ObjectStore
from octavo.server.recent_prompts import RecentPrompts
from octavo.server.resumable_streams import StreamRegistry
from octavo.server.served_adapters import ServedAdapters
from octavo.server.state_dir import StateDir
from octavo.server.stats_log import StatsLog
from octavo.server.stories import Stories
from octavo.server.view_hub import ViewHub
from octavo.text.chat_template import ChatTemplate
from octavo.text.pair_template import PairTemplate
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Number of finished answers, and seconds, over which throughput is measured.
_RECENT_ANSWERS = 256
_RECENT_SECONDS = 60.0
MAX_RETRY_AFTER = 60
# A request that can do with fewer places holds this part of the free ones.
_PLACES_SHARE = 4
# Interval of checks of an idle engine; requests notice the death of a busy one.
_WATCH_INTERVAL = 0.5
# Most names that an error lists.
_MOST_NAMED = 20


class ServerState(HttpState):
    """State of a server.

    Args:
        config: settings of the server.
        engine_config: settings of the engine; only names are read from it.
        start_engine: creates the engine; may return while the model still loads.
        adapters: table of adapters that this front end shares with others; None: it has its own.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        start_engine: Callable[[], Awaitable[AsyncLLM]],
        adapters: AdapterTable | None = None,
    ) -> None:
        super().__init__(config)
        self.engine_config = engine_config
        self.model_names = engine_config.model.served_model_name or [engine_config.model.model]
        self.adapters = ServedAdapters(engine_config.lora, self.model_names, adapters)
        self.created = int(time.time())
        self.system_fingerprint = _fingerprint(engine_config)
        self.engine: AsyncLLM | None = None
        self.failure: OctavoError | None = None
        """Reason why the engine does not run, or no longer runs."""
        self.state_dir = None if config.state_dir is None else StateDir(config.state_dir)
        folder = None if self.state_dir is None else self.state_dir.subfolder("objects")
        self.objects = ObjectStore(folder, config.request_memory_bytes)
        self.recent_prompts = RecentPrompts()
        self.stories = Stories(config.num_explained)
        self.what_if: WhatIf | None = None
        """Simulation of other settings for explanations."""
        self.simulating = asyncio.Lock()
        """Lock of the one simulation that runs."""
        self.background = Background()
        self.long_line = asyncio.Lock()
        """Lock of the one line of a batch that writes a long answer."""
        self.streams = StreamRegistry(config.resume_grace, self.run)
        self.view = ViewHub(config, self.model_names)
        self.hearing = Hearing()
        self._start_engine = start_engine
        self._started: asyncio.Task[AsyncLLM] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._logging: asyncio.Task[None] | None = None
        self.on_ready: Callable[[], None] = lambda: None
        """Callback for the end of the model's loading."""
        self.at_drain: Callable[[], None] = lambda: None
        """Callback for the begin of the end: work in the background stops."""
        self.at_close: Callable[[], Awaitable[None]] | None = None
        """Callback before the end of the engine."""
        self._num_admitted = 0
        self._admitted: Counter[str | None] = Counter()
        """Number of admitted answers by tenant."""
        self._finish_times: deque[float] = deque(maxlen=_RECENT_ANSWERS)
        self._counter = itertools.count()
        self._warned_of_priority = False
        self._answer_format: asyncio.Task[Format | None] | None = None
        self._special_ids: list[int] | None = None
        self._template: asyncio.Task[ChatTemplate] | None = None
        self._pair_template: asyncio.Task[PairTemplate | None] | None = None

    # Lifecycle of the engine

    def start(self) -> None:
        """Begin to start the engine; return at once."""
        self._started = asyncio.create_task(self._begin())
        self._loading = asyncio.create_task(self._load())

    async def _begin(self) -> AsyncLLM:
        engine = await self._start_engine()
        try:
            await self.adapters.open(engine)
        except BaseException:
            await engine.shutdown()
            raise
        self.engine = engine
        self.streams.memory = self.engine.request_memory
        self.objects.use_memory(self.engine.request_memory)
        return self.engine

    async def _load(self) -> None:
        """Wait for the model, then for the end of the engine."""
        assert self._started is not None
        try:
            engine = await asyncio.shield(self._started)
            if engine.tokenizer is not None:
                await self.chat_template(engine.tokenizer)  # reports a wrong template at once
            await engine.wait_ready()
            self.on_ready()
            if engine.tokenizer is not None:
                await self.answer_format(engine.tokenizer)  # before the first chat needs it
            while engine.is_running:
                await asyncio.sleep(_WATCH_INTERVAL)
            self.fail(EngineDeadError(engine.health().reason))
        except OctavoError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("the engine could not be started")
            self.fail(EngineDeadError(f"the engine could not be started: {error!r}"))

    def log_stats(self) -> None:
        """Log statistics regularly from now on, if the settings allow it."""
        if not self.engine_config.observability.disable_log_stats:
            self._logging = asyncio.create_task(self._log_stats())

    async def _log_stats(self) -> None:
        engine = self.engine
        assert engine is not None
        log, last = StatsLog(await engine.render_metrics()), time.monotonic()
        while True:
            await asyncio.sleep(self.config.log_stats_interval)
            with contextlib.suppress(OctavoError):  # the engine may be missing for a while
                page, now = await engine.render_metrics(), time.monotonic()
                log.log(page, now - last)
                last = now

    async def get_engine(self) -> AsyncLLM:
        """Return the engine; wait until it accepts requests.

        Raises:
            EngineDeadError: the engine could not be started, or died.
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
        """Note that the engine has ended for good, and stop the server.

        While the server stops without requests this is no failure: its nodes may stop at the same
        time.
        """
        if self.failure is None and (self.num_active or not self.draining):
            self.failure = error
            self.on_failure()

    async def close(self) -> None:
        """End the engine. It may be called twice."""
        started = self._loading, self._started, self._logging
        tasks = [task for task in started if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.background.close()
        if self.at_close is not None:
            await self.at_close()
        await self.streams.close()
        await self.hearing.close()
        if self.engine is not None:
            await self.engine.shutdown()
        self.objects.close()
        self.adapters.close()
        if self.state_dir is not None:
            self.state_dir.close()
            self.state_dir = None

    # Ending

    @property
    def drain_timeout(self) -> float:
        """Seconds in which requests in flight may finish at the end."""
        # No request is computed before the model is loaded, or while the engine sleeps.
        idle = self.engine is None or self.engine.loading or self.engine.asleep
        return 0.0 if idle else super().drain_timeout

    def begin_drain(self) -> None:
        """Reject new requests, and end streams without a reader."""
        super().begin_drain()
        self.at_drain()
        self.streams.drain()
        self.view.stop()

    # Requests

    async def find_model(
        self,
        request: Request,
        name: str | None,
        deadline_ms: int | None = None,
        max_ttft_ms: int | None = None,
    ) -> None:
        """Check the model of a request; resolvers may find an unknown adapter.

        Args:
            request: the request, whose body has been read.
            name: the model that it names.
            deadline_ms: limit of the request in milliseconds; None: that of its header.
            max_ttft_ms: limit of its first token in milliseconds; None: that of its header.

        Raises:
            AdapterError: the adapter cannot be used.
            ClientDisconnectError, DeadlineError: see `run`.
            FirstTokenError: the limit of the first token passed.
            NotFoundError: see `find_adapter`.
            QueueFullError, UnavailableError: see `ServedAdapters.resolve`.
        """
        if name is None or name in self.model_names:
            return
        adapter = self.adapters.find(name)
        if adapter is None and not self.adapters.resolves:
            raise self._unknown(name)
        if adapter is None or adapter.ref is None:
            context = context_of(request)
            work = self._wait_for_adapter(name, self.tenant(context.api_key))
            if context.background:
                await work
                return
            deadline = self.deadline(context.arrival, deadline_ms or context.deadline_ms)
            first = max_ttft_ms or context.max_ttft_ms
            first_token = None if first is None else context.arrival + first / 1000
            await self.run_search(request.receive, work, deadline, first_token)

    async def _wait_for_adapter(self, name: str, tenant: str | None) -> None:
        await self.get_engine()  # which has checked the adapters of the settings
        if self.adapters.find(name) is None and not (
            self.adapters.resolves and await self.adapters.resolve(name, tenant)
        ):
            raise self._unknown(name)

    def find_adapter(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter that a request names as its model; None: it names the model, or none.

        Raises:
            NotFoundError: the model is unknown; the message has known ones.
        """
        if name is None or name in self.model_names:
            return None
        adapter = self.adapters.find(name)
        if adapter is None:
            raise self._unknown(name)
        return adapter

    def _unknown(self, name: str) -> NotFoundError:
        known = [*self.model_names, *self.adapters.names(_MOST_NAMED)][:_MOST_NAMED]
        return NotFoundError(
            f"The model {show(name)} does not exist here; this server has {', '.join(known)}.",
            "model",
        )

    @property
    def all_names(self) -> list[str]:
        """Names of the model and of its adapters."""
        return [*self.model_names, *self.adapters.names()]

    @property
    def max_chat_bytes(self) -> int:
        """Maximum size of the body of a chat, which may hold pictures and sounds."""
        if self.engine is not None and self.engine.chat_media is None:
            return self.config.max_request_bytes
        return super().max_chat_bytes

    def tenant(self, api_key: str | None) -> str | None:
        """Return the tenant of a request; None if the server has fewer than two keys."""
        return tenant_of(api_key) if len(self.api_keys) > 1 else None

    def next_id(self) -> int:
        """Return a number that no other engine request of this server has."""
        return next(self._counter)

    def deadline(self, arrival: float, deadline_ms: int | None) -> float | None:
        """Return the deadline of a request: the server's or its own, the earlier one.

        Args:
            arrival: arrival in seconds of `time.monotonic`.
            deadline_ms: limit of the request in milliseconds.
        """
        limits = [deadline_ms / 1000] if deadline_ms is not None else []
        if self.config.request_timeout > 0:
            limits.append(self.config.request_timeout)
        return arrival + min(limits) if limits else None

    def places(self, most: int) -> int:
        """Return a number of places, 1 to `most`, that leaves others free for other requests."""
        limit = self.config.max_num_queued_reqs
        if not limit:
            return most
        return max(1, min(most, (limit - self._num_admitted) // _PLACES_SHARE))

    @contextlib.contextmanager
    def admit(self, count: int, param: str, tenant: str | None = None) -> Iterator[None]:
        """Hold places for `count` answers while they are made.

        Args:
            count: number of answers.
            param: field of the request that determines the number.
            tenant: tenant of the answers; each of several leaves places for the others.

        Raises:
            QueueFullError: too many answers are being made; it has an estimate of the wait.
            RequestError: the server never accepts this number of answers at once.
        """
        limit = self.config.max_num_queued_reqs
        if limit and count > limit:
            raise RequestError(
                f"The request asks for {count} answers (prompts x n), but the server accepts at "
                f"most {limit} unfinished ones (--max-num-queued-reqs); split it.",
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
        """Return the seconds until `places` more answers have probably finished."""
        now = time.monotonic()
        recent = [t for t in self._finish_times if now - t < _RECENT_SECONDS]
        if not recent:
            return 1
        rate = len(recent) / max(now - recent[0], 0.1)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(places / rate)))

    async def run(
        self, receive: Receive, work: Coroutine[object, object, T], deadline: float | None
    ) -> T:
        """Run the work of a request, and note the death of the engine.

        Raises:
            EngineDeadError: the engine has ended for good, and the server stops.
        """
        try:
            return await super().run(receive, work, deadline)
        except EngineDeadError as error:
            self.fail(error)
            raise

    def warn_of_priority(self) -> None:
        """Log once that requests have priorities which this server ignores."""
        if not self._warned_of_priority:
            self._warned_of_priority = True
            logger.warning(
                "requests have a priority, which is ignored without --scheduling-policy priority"
            )

    # Chat templates

    def template_kwargs(
        self, given: dict[str, Any] | None, reasoning_effort: str | None = None
    ) -> dict[str, Any] | None:
        """Return a request's variables for the template, with the server's defaults.

        Args:
            given: variables of the request.
            reasoning_effort: a further variable. If `given` does not have `enable_thinking`, this
                also decides whether the model thinks at all.
        """
        variables = {**self.config.default_chat_template_kwargs, **(given or {})}
        if reasoning_effort is not None:
            variables["reasoning_effort"] = reasoning_effort
            if "enable_thinking" not in (given or {}):
                variables["enable_thinking"] = reasoning_effort != "none"
        return variables or None

    def tokenizer(self, engine: AsyncLLM, param: str) -> Tokenizer:
        """Return the engine's tokenizer.

        Raises:
            RequestError: the engine has none, so the field `param` cannot be text.
        """
        if engine.tokenizer is None:
            raise RequestError(
                f"This server has no tokenizer (--skip-tokenizer-init), so {param} cannot be "
                "text; give token ids to /v1/completions.",
                param,
            )
        return engine.tokenizer

    async def answer_format(self, tokenizer: Tokenizer) -> Format | None:
        """Return the format of the model's answers; see `octavo.parsers.find_format`.

        Raises:
            ConfigError: the template of --chat-template cannot be used.
        """
        if self._answer_format is None:
            template = await self.chat_template(tokenizer)
            names = self.config.tool_call_parser, self.config.reasoning_parser
            self._answer_format = asyncio.create_task(
                asyncio.to_thread(_find_format, template, *names)
            )
        return await asyncio.shield(self._answer_format)

    def special_ids(self, tokenizer: Tokenizer, answer_format: Format) -> list[int]:
        """Return `Format.special_ids` of the server's format."""
        if self._special_ids is None:
            self._special_ids = answer_format.special_ids(tokenizer)
        return self._special_ids

    async def chat_template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template of --chat-template, or the model's template.

        Raises:
            ConfigError: the template of --chat-template cannot be used.
        """
        if self._template is None:
            self._template = asyncio.create_task(
                asyncio.to_thread(ChatTemplate.from_tokenizer, tokenizer, self.config.chat_template)
            )
        return await asyncio.shield(self._template)

    async def pair_template(self, tokenizer: Tokenizer) -> PairTemplate | None:
        """Return the template of --chat-template, or the model's, for pairs; None without one.

        Raises:
            ConfigError: the template of --chat-template cannot be used.
        """
        if self._pair_template is None:
            self._pair_template = asyncio.create_task(
                asyncio.to_thread(PairTemplate.find, tokenizer, self.config.chat_template)
            )
        return await asyncio.shield(self._pair_template)


def state_of(request: Request) -> ServerState:
    """Return the state of the server that received a request."""
    state = request.app.state.octavo
    assert isinstance(state, ServerState)
    return state


def _find_format(
    template: ChatTemplate, tool_parser: str | None, reasoning_parser: str | None
) -> Format | None:
    """Return `find_format` of a template; None, with a warning, if it cannot be examined."""
    try:
        return find_format(template.render, template.sources, tool_parser, reasoning_parser)
    except Exception:
        logger.warning("the format of answers was not found in the chat template", exc_info=True)
        return None


def _fingerprint(config: EngineConfig) -> str:
    """Return a text that changes when the answers to the same request may change."""
    load, cache = config.load.load_format, config.cache.kv_cache_dtype
    settings = [__version__, config.model, load, cache, config.device]
    if config.lora.lora_merge is not None:
        settings.append(config.lora.lora_merge)
    return "fp_" + hashlib.sha256(msgspec.json.encode(settings)).hexdigest()[:12]
