"""The engine's asyncio front end: takes requests, keeps their records, streams their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo import clock
from octavo.config import EngineConfig
from octavo.device import trim_memory
from octavo.engine.beam_search import (
    beam_search_nbytes,
    make_beam_search,
    prompt_params,
    run_beam_search,
)
from octavo.engine.core_launcher import CoreProcess
from octavo.engine.input_processor import InputProcessor, Prompt, processing_time
from octavo.engine.memory_plan import resolve_max_model_len
from octavo.engine.mp_client import AsyncMPClient
from octavo.engine.output_processor import OutputProcessor, RequestOutputCollector
from octavo.engine.request_memory import RequestMemory, request_nbytes
from octavo.engine.vllm_arguments import heed_environment, refuse_adapter, require_tokenizer
from octavo.engine_args import AsyncEngineArgs
from octavo.errors import ConfigError, EngineDeadError
from octavo.messages import EngineCoreRequest, PauseMode, SchedulerStats
from octavo.metrics import EngineMetrics
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.offload import offload
from octavo.outputs import RequestOutput
from octavo.platforms.registry import get_platform
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_REQUEST_MEMORY = 2**30
# Seconds from the answer to a heartbeat to the next heartbeat.
_HEARTBEAT_INTERVAL = 1.0
# Seconds between two questions whether the last requests have finished before a sleep.
_SLEEP_POLL = 0.02


@dataclass(frozen=True)
class Health:
    """Whether the engine makes progress, and if not, why."""

    ok: bool
    reason: str


class AsyncLLM:
    """One model behind an asyncio interface; the engine core runs in its own process.

    Made by `start`. All methods belong to the event loop that `start` ran in; of `from_engine_args`
    outside of one, to the first in which something is asked.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        tokenizer_path: Path,
        *,
        progress_timeout: float,
        request_memory: int,
        served_name: str | None,
        metrics_prefix: str,
        log_level: str,
        log_format: str,
    ) -> None:
        model = config.model
        self.config = config
        self.spec = read_spec(path, trust_remote_code=model.trust_remote_code)
        # Known before the memory plan, except that -1 may come out shorter: see `_became_ready`.
        self.max_model_len = resolve_max_model_len(config, self.spec)
        self.tokenizer: Tokenizer | None = None
        if not model.skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_folder(tokenizer_path)
        # Last, so that nothing that fails here leaves a process behind.
        self._client = AsyncMPClient(
            CoreProcess(
                config,
                path,
                default_batched_tokens=get_platform(config.device.device).server_batched_tokens,
                request_memory=request_memory,
                log_level=log_level,
                log_format=log_format,
            )
        )
        self.metrics = EngineMetrics(served_name or model.model, self.max_model_len, metrics_prefix)
        self.metrics.watch_process(self._client.process.pid)
        self.stats = SchedulerStats()
        self.ready = False
        self._input_processor = self._make_input_processor()
        self._output_processor = OutputProcessor(self.tokenizer, self.metrics)
        self.request_memory = RequestMemory(request_memory)
        """What unfinished requests, and answers on their way to a client, take."""
        self._progress_timeout = progress_timeout
        self._heartbeat_sent: float | None = None
        """Second of `time.monotonic` of the heartbeat that waits for its answer."""
        self._stalled_since: float | None = None
        """When the first answer came that found requests, and no step since the one before."""
        self.asleep = False
        """Whether it was put to sleep and is not awake again."""
        self._sleep_lock = asyncio.Lock()
        self._changes_sleep = False
        """Whether the engine process is falling asleep or waking up: it says nothing meanwhile."""
        self._dead: EngineDeadError | None = None
        self._shutdown: asyncio.Task[None] | None = None
        """Kept, since nobody else need keep it."""
        self._numbers = itertools.count()
        """Of core requests."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        with contextlib.suppress(RuntimeError):  # there is no event loop yet
            self._attach()

    def _attach(self) -> None:
        """Makes the running event loop the one that the engine belongs to.

        Raises:
            RuntimeError: none is running.
            ConfigError: it belongs to another one.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._tasks = [
                loop.create_task(self._handle_outputs()),
                loop.create_task(self._send_heartbeats()),
            ]
        elif self._loop is not loop:
            raise ConfigError(
                "This AsyncLLM belongs to the event loop in which it was first used, and that is "
                "not the running one; use one asyncio.run for all that is asked of it."
            )

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        progress_timeout: float = 60.0,
        request_memory: int = DEFAULT_REQUEST_MEMORY,
        served_name: str | None = None,
        metrics_prefix: str = "octavo",
        log_level: str = "info",
        log_format: str = "text",
    ) -> AsyncLLM:
        """Starts the engine process and returns while the model still loads.

        Requests may be made at once; they wait for the model.

        Args:
            config: the engine's settings.
            progress_timeout: seconds after which `health` fails if the engine, busy or idle, has
                not answered a heartbeat; a step may take as long.
            request_memory: bytes that unfinished requests may take, here and in the engine.
            served_name: the model's name in the metrics; default: the config's.
            metrics_prefix: what the metrics' names begin with.
            log_level: minimum level that the engine process logs.
            log_format: "text" or "json".

        Raises:
            ConfigError, ModelError, HubError: if config, model folder or download are bad.
        """
        # A download may take long; the event loop goes on meanwhile.
        folders = await asyncio.to_thread(resolve_folders, config)
        return cls(
            config,
            *folders,
            progress_timeout=progress_timeout,
            request_memory=request_memory,
            served_name=served_name,
            metrics_prefix=metrics_prefix,
            log_level=log_level,
            log_format=log_format,
        )

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Starts the engine process with vLLM's settings; as `start`, but a download blocks.

        May be called before there is an event loop.

        Raises:
            ConfigError, ModelError, HubError: if settings, model folder or download are bad.
        """
        level = heed_environment()
        config = engine_args.create_engine_config()
        return cls(
            config,
            *resolve_folders(config),
            progress_timeout=60.0,
            request_memory=DEFAULT_REQUEST_MEMORY,
            served_name=None,
            metrics_prefix="octavo",
            log_level=level or "warning",
            log_format="text",
        )

    async def wait_ready(self) -> None:
        """Waits for the model.

        Raises:
            EngineDeadError: with the root cause, if it cannot be loaded.
        """
        self._attach()
        await asyncio.shield(self._client.ready)

    @property
    def num_unfinished_requests(self) -> int:
        """Live requests; the n answers of a request count n times."""
        return self._output_processor.num_unfinished_requests

    def health(self) -> Health:
        """Whether the engine makes progress, not just whether its process lives."""
        if self._dead is not None:
            return Health(False, f"the engine is dead: {self._dead}")
        if not self.ready:
            return Health(True, "loading the model")
        if self._changes_sleep:
            return Health(True, "falling asleep or waking up")
        if self._heartbeat_sent is not None:
            silent = time.monotonic() - self._heartbeat_sent
            if silent > self._progress_timeout:
                return Health(False, f"the engine has not answered for {silent:.0f} s")
        if self._stalled_since is not None:
            stalled = time.monotonic() - self._stalled_since
            if stalled > self._progress_timeout:
                return Health(False, f"no step for {stalled:.0f} s although requests are waiting")
        return Health(True, "ok")

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        cache_salt: str | None = None,
        deadline: float | None = None,
        add_special_tokens: bool = True,
        turn: int = 0,
        lora_request: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams the outputs of one request; closing the stream aborts it.

        Args:
            prompt: text, token ids, or a dict with one of them.
            sampling_params: what is asked; not changed.
            request_id: unique among the live requests.
            cache_salt: scope of the prefix cache.
            deadline: second of `time.monotonic` after which the request fails.
            add_special_tokens: whether the tokenizer adds its special tokens to a text.
            turn: how many prompts came before it in the same call: those behind let others pass.
            lora_request: adapters are not supported.
            priority: smaller is served earlier (with `scheduling_policy=priority`).

        Raises:
            RequestError: if the request is bad or fails, or its id is in use.
            QueueFullError: if there is no memory for it now.
            EngineDeadError: if the engine is gone.
        """
        refuse_adapter(lora_request)
        if priority:
            sampling_params = msgspec.structs.replace(sampling_params, priority=priority)
        request, text = await self._process(
            prompt,
            sampling_params,
            request_id,
            cache_salt=cache_salt,
            deadline=deadline,
            add_special_tokens=add_special_tokens,
            turn=turn,
        )
        nbytes = request_nbytes(request, sampling_params, self.spec.vocab_size)
        with self.request_memory.reserve(nbytes):
            async with aclosing(self._stream(request, sampling_params, text)) as outputs:
                async for output in outputs:
                    yield output

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        cache_salt: str | None = None,
        deadline: float | None = None,
        add_special_tokens: bool = True,
        turn: int = 0,
    ) -> RequestOutput:
        """Finds the most probable answers to a prompt; cancelling it ends all its requests.

        Its steps are requests of one token each, which queue like all others.

        Args and Raises: as for `generate`.

        Returns:
            The beams as answers, the best first.
        """
        of_prompt = prompt_params(params)
        request, text = await self._process(
            prompt,
            of_prompt,
            request_id,
            cache_salt=cache_salt,
            deadline=deadline,
            add_special_tokens=add_special_tokens,
            turn=turn,
        )
        vocab_size = self.spec.vocab_size
        search = make_beam_search(params, request, vocab_size)
        with self.request_memory.reserve(beam_search_nbytes(request, search, vocab_size)):
            return await run_beam_search(
                request, text, search, of_prompt, self.tokenizer, self._stream
            )

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several, within one step; unknown ids are ignored."""
        self._attach()
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._client.abort_requests(self._output_processor.abort_requests(ids))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UnsupportedError: if the engine was made with skip_tokenizer_init.
        """
        return require_tokenizer(self.tokenizer)

    async def check_health(self) -> None:
        """Raises what ended the engine.

        Raises:
            EngineDeadError: with the root cause, if it is gone.
        """
        if self._dead is not None:
            raise self._dead

    @property
    def errored(self) -> bool:
        """Whether the engine is gone."""
        return self._dead is not None

    @property
    def is_running(self) -> bool:
        """Whether it is not."""
        return self._dead is None

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False if running requests hold blocks."""
        self._attach()
        return bool(await self._client.call_utility("reset_prefix_cache"))

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Computes nothing more until `wake_up`, and gives memory back to the system.

        Requests that come meanwhile wait, up to their deadlines.

        Args and Raises: as for `LLMEngine.sleep`.
        """
        async with self._sleep_lock:
            while not await self._change_sleep("sleep", level, mode):
                try:
                    await asyncio.sleep(_SLEEP_POLL)
                except asyncio.CancelledError:  # nobody will ask again
                    await self._change_sleep("wake_up", None)
                    raise
            self.asleep = True
            self.metrics.record_sleep_state(level)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Takes memory up again, and goes on; whether the engine is awake.

        Args and Raises: as for `LLMEngine.wake_up`.
        """
        async with self._sleep_lock:
            awake = await self._change_sleep("wake_up", tags)
            if awake:
                self.asleep = False
                self.metrics.record_sleep_state(None)
            return awake

    async def is_sleeping(self) -> bool:
        """Whether it sleeps, at any level, or is about to."""
        await self.check_health()
        self._attach()
        return bool(await self._client.call_utility("is_sleeping"))

    async def _change_sleep(self, method: str, *args: Any) -> bool:
        await self.check_health()
        self._attach()
        self._changes_sleep = True
        try:
            return bool(await self._client.call_utility(method, *args))
        finally:
            self._changes_sleep = False
            if self._heartbeat_sent is not None:  # its answer comes next
                self._heartbeat_sent = time.monotonic()

    async def start_profile(self) -> None:
        """Has the engine process record spans of its steps and kernels; needs `profiler_dir`.

        Raises:
            ProfilerError: there is no `profiler_dir`, or a profile is being recorded already.
        """
        self._attach()
        await self._client.call_utility("start_profile")

    async def stop_profile(self) -> str:
        """Ends the profile; returns the path of the Chrome trace.

        Raises:
            ProfilerError: no profile is being recorded, or it cannot be written.
        """
        self._attach()
        return str(await self._client.call_utility("stop_profile"))

    def shutdown(self) -> Awaitable[None]:
        """Ends the engine process. May be called twice.

        Returns:
            What may be awaited to know that the process has ended; outside of an event loop it has.
        """
        for task in self._tasks:
            task.cancel()
        if self._dead is None:
            self._die(EngineDeadError("the engine was shut down"))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._client.process.shutdown()
            self._client.close()
            return _Done()
        self._shutdown = loop.create_task(self._end_process())
        return self._shutdown

    async def _end_process(self) -> None:
        try:
            tasks = [task for task in self._tasks if not task.done()]
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # the event loop, too, may be about to end
            await self._client.shutdown()

    async def _process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        cache_salt: str | None,
        deadline: float | None,
        add_special_tokens: bool,
        turn: int,
    ) -> tuple[EngineCoreRequest, str | None]:
        """The core request of a prompt, and the prompt's text; see `generate`."""
        if self._dead is not None:
            raise self._dead
        self._attach()
        arrival_time = clock.now()
        return await offload(
            processing_time(prompt, params),
            self._input_processor.process,
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            deadline=None if deadline is None else clock.from_monotonic(deadline),
            add_special_tokens=add_special_tokens,
            turn=turn,
        )

    async def _stream(
        self, request: EngineCoreRequest, params: SamplingParams, text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a processed request; closing the stream aborts it."""
        if self._dead is not None:
            raise self._dead
        queue = RequestOutputCollector(params.output_kind)
        name = request.request_id
        # What is on its way of an earlier request must not be taken for one of the same name.
        request = msgspec.structs.replace(request, request_id=f"{name}#{next(self._numbers)}")
        self._output_processor.add_request(request, params, text, queue, name)
        finished = False
        try:
            await self._client.add_request(request)
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                yield output
        finally:
            # Its id may belong to another request by now.
            if not finished and self._output_processor.is_live(name, queue):
                await self.abort(name)

    def _make_input_processor(self) -> InputProcessor:
        return InputProcessor(self.config.model, self.spec, self.tokenizer, self.max_model_len)

    async def _handle_outputs(self) -> None:
        self._client.ready.add_done_callback(self._became_ready)
        try:
            while True:
                outputs = await self._client.get_output()
                processed = self._output_processor.process_outputs(
                    outputs.outputs, outputs.timestamp
                )
                await self._client.abort_requests(processed.reqs_to_abort)
                if outputs.stats is not None:
                    self.stats = outputs.stats
                    self.metrics.record_scheduler_stats(outputs.stats)
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            logger.exception("the output handler failed")
            self._die(EngineDeadError(f"the output handler failed: {error!r}"))

    async def _send_heartbeats(self) -> None:
        """Asks the core's busy loop again and again how far it is; `health` looks at the answers.

        The first time that nothing runs any more, memory is given back to the system.
        """
        trimmed, num_scheduled = True, -1
        interval = min(_HEARTBEAT_INTERVAL, self._progress_timeout / 4)
        with contextlib.suppress(EngineDeadError):
            await self.wait_ready()
            while True:
                self._heartbeat_sent = time.monotonic()
                answer = await self._client.call_utility("stats")
                stats = msgspec.convert(answer, SchedulerStats)
                num_waiting = stats.num_waiting_reqs - stats.num_held_reqs
                has_requests = stats.num_running_reqs + num_waiting > 0
                if not has_requests or stats.num_scheduled_tokens != num_scheduled:
                    self._stalled_since = None
                elif self._stalled_since is None:
                    self._stalled_since = time.monotonic()
                num_scheduled = stats.num_scheduled_tokens
                idle = not self.request_memory.used
                if idle and not trimmed:
                    await self._client.call_utility("trim_memory")
                    await asyncio.to_thread(trim_memory)
                trimmed = idle
                self._heartbeat_sent = None
                await asyncio.sleep(interval)

    def _became_ready(self, ready: asyncio.Future[Any]) -> None:
        if ready.cancelled() or ready.exception() is not None:
            return
        info = ready.result()
        self.ready = True
        self.metrics.set_cache_config_info(
            {
                **msgspec.structs.asdict(self.config.cache),
                "num_gpu_blocks": info.num_blocks,
                "kv_cache_size_tokens": int(info.max_concurrency * info.max_model_len),
                "kv_cache_max_concurrency": round(info.max_concurrency, 2),
            }
        )
        if info.max_model_len != self.max_model_len:
            self.max_model_len = info.max_model_len
            self._input_processor = self._make_input_processor()

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        self.ready = False
        if self._loop is not None and not self._loop.is_closed():
            self._client.fail_calls(error)
        self._output_processor.propagate_error(error)


class _Done:
    """What can be awaited and has happened."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


AsyncLLMEngine = AsyncLLM
"""Its older name in vLLM."""
