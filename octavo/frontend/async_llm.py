"""The engine's asyncio front end: takes requests, keeps their records, streams their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from octavo.compat.call_arguments import check_stat_loggers, refuse_unsupported
from octavo.config import EngineConfig
from octavo.config.engine_args import AsyncEngineArgs
from octavo.engine.checks import check_recording
from octavo.engine.record import make_recorder
from octavo.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    FirstTokenError,
    ScalingError,
    StepFailedError,
    UnmetDeadlineError,
)
from octavo.fleet.coordinator_client import CoordinatorClient
from octavo.fleet.core_client import WatchedClient
from octavo.fleet.core_launcher import CoreLauncher, CoreProcess
from octavo.fleet.data_parallel import DataParallelClient, share_cores
from octavo.fleet.supervisor import Recovery, Supervisor
from octavo.frontend.beam_search import (
    beam_search_nbytes,
    make_beam_search,
    prompt_params,
    run_beam_search,
)
from octavo.frontend.environment import apply_environment
from octavo.frontend.forecast import Forecast
from octavo.frontend.input_processor import InputProcessor, Prompt, processing_time
from octavo.frontend.output_processor import OutputProcessor, RequestOutputCollector
from octavo.frontend.request_memory import RequestMemory, request_nbytes
from octavo.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    PauseMode,
    RequestOptions,
    SchedulerStats,
)
from octavo.models.hub import resolve_folders
from octavo.models.identity import model_hash
from octavo.models.registry import read_spec
from octavo.observability.metrics import EngineMetrics, join_pages
from octavo.observability.recording import Died, Recorder, RecordSettings
from octavo.outputs import RequestOutput
from octavo.plan.memory_plan import resolve_max_model_len, resolve_max_num_batched_tokens
from octavo.platforms.registry import get_platform
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.system import clock
from octavo.system.device import num_cpus, trim_memory
from octavo.system.offload import offload
from octavo.text.tokenizer import Tokenizer, require_tokenizer

logger = logging.getLogger(__name__)

Unfinished = Callable[[], list[EngineCoreRequest]]
OnRecovery = Callable[[Recovery], None]

DEFAULT_REQUEST_MEMORY = 2**30
# How often an engine is looked at, whether it has anything to do, in seconds.
_TRIM_INTERVAL = 1.0
# Steps of an engine that are taken in behind another, before who waits for them gets a turn.
_MOST_FOLLOWING = 7
# Seconds between two questions whether the last requests have finished before a sleep.
_SLEEP_POLL = 0.02


@dataclass(frozen=True)
class Health:
    """Whether the engine makes progress, and if not, why."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class EngineProcesses:
    """How the engines of a server are started and watched.

    Attributes:
        progress_timeout: seconds without a sign of life from the engine, busy or idle, after
            which it is replaced; a step may take as long.
        max_engine_restarts: how often an engine that died is replaced within ten minutes.
        warm_spare: whether an interpreter stands ready for that; None: if memory allows.
        process: the first engine process, not started yet; None: it is made.
        request_memory: bytes that unfinished requests may take, here and in the engine.
        log_level: minimum level that the engine process logs.
        log_format: "text" or "json".
        record: the recording that the processes add to.
    """

    progress_timeout: float = 60.0
    max_engine_restarts: int = 5
    warm_spare: bool | None = None
    process: CoreProcess | None = None
    request_memory: int = DEFAULT_REQUEST_MEMORY
    log_level: str = "info"
    log_format: str = "text"
    record: str | None = None


def start_engines(
    config: EngineConfig,
    path: Path,
    tokenizer_path: Path,
    processes: EngineProcesses,
    unfinished: Unfinished,
    on_recovery: OnRecovery,
) -> Supervisor | DataParallelClient:
    """Starts the engines of a server; returns while the model still loads.

    Args:
        config: the engine's settings.
        path: the model's folder.
        tokenizer_path: the tokenizer's.
        processes: how they are started and watched.
        unfinished: the live requests, in order of arrival, as another engine is to get them.
        on_recovery: see `Supervisor`.
    """
    parallel = config.parallel.of_server()
    config = msgspec.structs.replace(config, parallel=parallel)
    size = parallel.data_parallel_size
    launcher = CoreLauncher(
        share_cores(config),
        path,
        default_batched_tokens=get_platform(config.device.device).server_batched_tokens,
        request_memory=processes.request_memory,
        warm_spare=processes.warm_spare,
        process=processes.process,
        log_level=processes.log_level,
        log_format=processes.log_format,
        record=processes.record,
    )
    restarts, timeout = processes.max_engine_restarts, processes.progress_timeout
    if size == 1 and not parallel.enable_elastic_ep:
        return Supervisor(
            launcher,
            unfinished,
            max_restarts=restarts,
            progress_timeout=timeout,
            on_recovery=on_recovery,
            number=parallel.first_engine if parallel.numbered else None,
        )
    remote = parallel.num_local_engines < size
    return DataParallelClient(
        launcher,
        unfinished,
        config=config,
        model=model_hash(path, tokenizer_path, config.load.load_format) if remote else "",
        max_restarts=restarts,
        progress_timeout=timeout,
        on_recovery=on_recovery,
    )


class AsyncLLM:
    """One model behind an asyncio interface; each engine core runs in a process of its own.

    Made by `start`. All methods belong to the event loop that `start` ran in; of `from_engine_args`
    outside of one, to the first in which something is asked.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        tokenizer_path: Path,
        start_client: Callable[[Unfinished, OnRecovery], WatchedClient],
        *,
        request_memory: int,
        served_name: str | None,
        metrics_prefix: str,
        record: RecordSettings | None = None,
        front_end: int | None = None,
    ) -> None:
        """See `start` and `for_front_end`."""
        config.parallel.check(headless=False)
        config = msgspec.structs.replace(config, parallel=config.parallel.of_server())
        model, size = config.model, config.parallel.data_parallel_size
        check_recording(config, None if record is None else record.path)
        self._num_threads = share_cores(config).device.num_threads or num_cpus()
        self.config = config
        self.spec = read_spec(
            path, trust_remote_code=model.trust_remote_code, overrides=model.hf_overrides
        )
        # Known before the memory plan, except that -1 may come out shorter: see `_became_ready`.
        self.max_model_len = resolve_max_model_len(config, self.spec)
        self.tokenizer: Tokenizer | None = None
        if not model.skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_folder(tokenizer_path)
        self.metrics = EngineMetrics(
            served_name or model.model,
            self.max_model_len,
            metrics_prefix,
            first_engine=config.parallel.first_engine,
        )
        self.stats = SchedulerStats()
        self._input_processor = self._make_input_processor()
        self._recorder: Recorder | None = None
        if record is not None:
            self._recorder = make_recorder(record, config, path, tokenizer_path)
        self._output_processor = OutputProcessor(
            self.tokenizer,
            self.metrics,
            None if self._recorder is None else self._recorder.put,
        )
        self.request_memory = RequestMemory(request_memory)
        """What unfinished requests, and answers on their way to a client, take."""
        self._sleep_level: int | None = None
        """At which level it was put to sleep, if it is not awake again."""
        self._falling_asleep: asyncio.Task[None] | None = None
        self._sleep_lock = asyncio.Lock()
        self._cache_info: dict[str, Any] = {}
        self._change_of_size: asyncio.Task[None] | None = None
        self._dead: EngineDeadError | None = None
        self._shutdown: asyncio.Task[None] | None = None
        """Kept, since nobody else need keep it."""
        self._numbers = itertools.count()
        """Of core requests."""
        self._front_end = front_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        default_batched_tokens = get_platform(config.device.device).server_batched_tokens
        budget = resolve_max_num_batched_tokens(
            config, default_batched_tokens, self.spec.max_model_len
        )
        heeds_priority = config.scheduler.scheduling_policy == "priority"
        self._make_forecast = partial(Forecast, budget, heeds_priority=heeds_priority)
        self._forecasts = [self._make_forecast() for _ in range(size)]
        # Last, so that nothing that fails here leaves a process behind.
        self._client = start_client(self._output_processor.unfinished, self._note_recovery)
        for index in range(size):
            self._watch_engine(self._client, index)
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
                loop.create_task(self._trim_when_idle()),
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
        max_engine_restarts: int = 5,
        warm_spare: bool | None = None,
        process: CoreProcess | None = None,
        request_memory: int = DEFAULT_REQUEST_MEMORY,
        served_name: str | None = None,
        metrics_prefix: str = "octavo",
        log_level: str = "info",
        log_format: str = "text",
        record: RecordSettings | None = None,
    ) -> AsyncLLM:
        """Starts the engine process and returns while the model still loads.

        Requests may be made at once; they wait for the model.

        Args:
            config: the engine's settings.
            progress_timeout: seconds without a sign of life from the engine, busy or idle, after
                which it is replaced; a step may take as long.
            max_engine_restarts: how often an engine that died is replaced within ten minutes.
            warm_spare: whether an interpreter stands ready for that; None: if memory allows.
            process: the first engine process, not started yet; None: it is made.
            request_memory: bytes that unfinished requests may take, here and in the engine.
            served_name: the model's name in the metrics; default: the config's.
            metrics_prefix: what the metrics' names begin with.
            log_level: minimum level that the engine process logs.
            log_format: "text" or "json".
            record: what is recorded, and where.

        Raises:
            ConfigError, ModelError, HubError: if config, model folder or download are bad.
        """
        # A download may take long; the event loop goes on meanwhile.
        folders = await asyncio.to_thread(resolve_folders, config)
        processes = EngineProcesses(
            progress_timeout,
            max_engine_restarts,
            warm_spare,
            process,
            request_memory,
            log_level,
            log_format,
            None if record is None else record.path,
        )
        return cls(
            config,
            *folders,
            partial(start_engines, config, *folders, processes),
            request_memory=request_memory,
            served_name=served_name,
            metrics_prefix=metrics_prefix,
            record=record,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        *,
        usage_context: object = None,
        stat_loggers: Sequence[object] | None = None,
    ) -> AsyncLLM:
        """Starts the engine process with vLLM's settings; as `start`, but a download blocks.

        May be called before there is an event loop.

        Args:
            engine_args: the settings.
            usage_context: ignored: usage is reported to no one.
            stat_loggers: what logs statistics; see `StatLogger`.

        Raises:
            ConfigError, ModelError, HubError: if settings, model folder or download are bad.
            UnsupportedError: a logger of statistics is not one of vLLM's own two.
        """
        check_stat_loggers(stat_loggers)
        level = apply_environment()
        config = engine_args.create_engine_config()
        folders = resolve_folders(config)
        processes = EngineProcesses(log_level=level or "warning")
        return cls(
            config,
            *folders,
            partial(start_engines, config, *folders, processes),
            request_memory=processes.request_memory,
            served_name=None,
            metrics_prefix="octavo",
        )

    @classmethod
    def for_front_end(
        cls,
        config: EngineConfig,
        path: Path,
        tokenizer_path: Path,
        start_client: Callable[[Unfinished, OnRecovery], WatchedClient],
        number: int,
        *,
        request_memory: int,
        served_name: str | None,
        metrics_prefix: str,
    ) -> AsyncLLM:
        """One of several front ends of the engines behind a `Coordinator`.

        Args:
            config: the engine's settings.
            path: the model's folder.
            tokenizer_path: the tokenizer's.
            start_client: opens the way to the coordinator; see `start_engines`.
            number: no other front end of this coordinator had it.
            request_memory: bytes that unfinished requests of this front end may take.
            served_name: see `start`.
            metrics_prefix: see `start`.
        """
        return cls(
            config,
            path,
            tokenizer_path,
            start_client,
            request_memory=request_memory,
            served_name=served_name,
            metrics_prefix=metrics_prefix,
            front_end=number,
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

    @property
    def ready(self) -> bool:
        """Whether there is an engine that takes requests now."""
        return self._dead is None and self._client.up

    @property
    def loading(self) -> bool:
        """Whether the model is not there yet; what becomes of an engine after that is mended."""
        return not self._client.ready.done()

    def health(self) -> Health:
        """Whether there is an engine or, for a while, one to be; see `Supervisor`."""
        if self._dead is not None:
            return Health(False, f"the engine is dead: {self._dead}")
        if self.loading:
            reason = "loading the model"
            if missing := self._client.missing:
                engines = ", ".join(map(str, missing))
                reason = f"waiting for a node (octavo serve --headless) for engine {engines}"
            return Health(True, reason)
        if len(self._forecasts) > 1 and (down := self._client.down):
            engines = ", ".join(f"engine {number} {why}" for number, why in down.items())
            return Health(True, f"{engines}; the others serve" if self.ready else engines)
        if not self.ready:
            parallel = self.config.parallel
            number = f"engine {parallel.first_engine}" if parallel.numbered else "the engine"
            return Health(True, f"starting {number} again")
        return Health(True, "ok")

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        cache_salt: str | None = None,
        deadline: float | None = None,
        first_token_deadline: float | None = None,
        tenant: str | None = None,
        flow: int | None = None,
        add_special_tokens: bool = True,
        turn: int = 0,
        lora_request: None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request; closing the stream aborts it.

        Args:
            prompt: text, token ids, or a dict with one of them.
            sampling_params: parameters of the answer; not changed.
            request_id: unique among the live requests.
            cache_salt: scope of the prefix cache.
            deadline: second of `time.monotonic` after which the request fails.
            first_token_deadline: second after which it fails if it has no token yet.
            tenant: sender of the request: tenants share tokens and memory fairly.
            flow: class of the client's address: without tenants, flows share tokens.
            add_special_tokens: True if the tokenizer adds its special tokens to a text.
            turn: number of prompts before it in the same call: later ones let others pass.
            lora_request: adapters are not supported.
            priority: smaller is served earlier (with `scheduling_policy=priority`).
            data_parallel_rank: must be None: the engine with the least load is chosen.

        Raises:
            RequestError: if the request is bad or fails, or its id is in use.
            QueueFullError: if there is no memory for it now.
            UnmetDeadlineError: if a deadline cannot be met.
            EngineDeadError: if the engine is gone.
        """
        refuse_unsupported(lora_request=lora_request, data_parallel_rank=data_parallel_rank)
        if priority:
            sampling_params = msgspec.structs.replace(sampling_params, priority=priority)
        options = _make_options(cache_salt, deadline, first_token_deadline, tenant, flow, turn)
        stream = self.serve(
            prompt, sampling_params, request_id, options, add_special_tokens=add_special_tokens
        )
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    async def serve(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        options: RequestOptions,
        *,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a request that has an envelope; see `generate`."""
        request, text = await self._process(prompt, params, request_id, options, add_special_tokens)
        nbytes = request_nbytes(request, params, self.spec.vocab_size)
        with self.request_memory.reserve(nbytes, options.tenant):
            async with aclosing(self._stream(request, params, text)) as outputs:
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
        first_token_deadline: float | None = None,
        tenant: str | None = None,
        flow: int | None = None,
        add_special_tokens: bool = True,
        turn: int = 0,
    ) -> RequestOutput:
        """Find the most probable answers to a prompt; cancelling it ends all its requests.

        Its steps are requests of one token each, which queue like all others.

        Args and Raises: as for `generate`.

        Returns:
            The beams as answers, the best first.
        """
        options = _make_options(cache_salt, deadline, first_token_deadline, tenant, flow, turn)
        return await self.serve_beams(
            prompt, params, request_id, options, add_special_tokens=add_special_tokens
        )

    async def serve_beams(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        options: RequestOptions,
        *,
        add_special_tokens: bool = True,
    ) -> RequestOutput:
        """Find the most probable answers to a prompt with an envelope; see `beam_search`."""
        of_prompt = prompt_params(params)
        request, text = await self._process(
            prompt, of_prompt, request_id, options, add_special_tokens
        )
        vocab_size = self.spec.vocab_size
        search = make_beam_search(params, request, vocab_size)
        nbytes = beam_search_nbytes(request, search, vocab_size)
        with self.request_memory.reserve(nbytes, options.tenant):
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

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets all cached prefixes; see `LLM.reset_prefix_cache`."""
        self._attach()
        what = reset_running_requests, reset_connector
        return bool(await self._client.call_utility("reset_prefix_cache", *what))

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
            self._sleep_level = level
            self._record_sleep_state(level)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Takes memory up again, and goes on; whether the engine is awake.

        Args and Raises: as for `LLMEngine.wake_up`.
        """
        async with self._sleep_lock:
            awake = await self._change_sleep("wake_up", tags)
            if awake:
                self._sleep_level = None
                self._record_sleep_state(None)
            return awake

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        """Computes nothing more until `resume_generation`, and keeps all memory.

        Requests that come meanwhile wait, up to their deadlines.

        Args:
            mode: what becomes of unfinished requests: abort ends them with what they have, wait
                finishes them first, keep lets them go on later.
            clear_cache: whether cached prefixes are forgotten, as new weights need it; what is kept
                is computed again then.

        Raises:
            RequestError: mode is unknown.
        """
        await self.sleep(0, mode)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """Goes on after `pause_generation`; memory that sleeps is left asleep."""
        await self.wake_up(["scheduling"])

    async def is_paused(self) -> bool:
        """Whether nothing is computed until `resume_generation` or `wake_up`."""
        return await self.is_sleeping()

    async def do_log_stats(self) -> None:
        """Log a line with what the engine does now; may be called from any event loop."""
        logger.info(
            "running: %d, waiting: %d, KV cache usage: %.1f %%",
            self.stats.num_running_reqs,
            self.stats.num_waiting_reqs,
            100 * self.stats.kv_cache_usage,
        )

    @property
    def asleep(self) -> bool:
        """Whether it was put to sleep and is not awake again."""
        return self._sleep_level is not None

    async def is_sleeping(self) -> bool:
        """Whether it sleeps, at any level, or is about to."""
        await self.check_health()
        self._attach()
        return bool(await self._client.call_utility("is_sleeping"))

    def _record_sleep_state(self, level: int | None) -> None:
        for index in range(len(self._forecasts)):
            self.metrics.for_engine(index).record_sleep_state(level)

    async def _change_sleep(self, method: str, *args: Any) -> bool:
        await self.check_health()
        self._attach()
        return bool(await self._client.call_utility(method, *args))

    @property
    def scaling(self) -> bool:
        """Whether engines are being added or ended."""
        return isinstance(self._client, DataParallelClient) and self._client.scaling

    async def scale(self, size: int) -> None:
        """Changes the number of engines, while requests go on; needs `enable_elastic_ep`.

        Raises:
            ScalingError: it cannot be done, or not now; then all is as before.
        """
        await self.check_health()
        self._attach()
        client = self._client
        can_scale = self.config.parallel.enable_elastic_ep
        if not can_scale or not isinstance(client, DataParallelClient):
            raise ScalingError(
                "The number of engines is fixed; start the server with --enable-elastic-ep."
            )
        if self.asleep:
            raise ScalingError("The engines sleep; wake them up first.")
        # Whoever asked may go away; it is finished all the same.
        self._change_of_size = asyncio.create_task(self._scale(client, size))
        await asyncio.shield(self._change_of_size)

    async def _scale(self, client: DataParallelClient, size: int) -> None:
        before = len(self._forecasts)
        if size > before and size * self._num_threads > (cores := num_cpus()):
            logger.warning(
                "%d engines with %d threads each are more than the %d cores this process may use; "
                "start the server with fewer (--num-threads)",
                size,
                self._num_threads,
                cores,
            )
        for index in range(before, size):
            self._forecasts.append(self._make_forecast())
            self.metrics.add_engine(index)
            self._watch_engine(client, index)
            self.metrics.for_engine(index).set_cache_config_info(self._cache_info)
        keep = before
        try:
            await client.scale(size)
            keep = size
        finally:
            for index in range(keep, max(before, size)):
                self.metrics.remove_engine(index)
            del self._forecasts[keep:]
        logger.info("there are %d engines now", size)

    def _watch_engine(self, client: WatchedClient, index: int) -> None:
        self.metrics.for_engine(index).watch_processes(partial(client.family_of, index))

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
            self._client.close()
            self._end_recording()
            return _Done()
        self._shutdown = loop.create_task(self._end_process())
        return self._shutdown

    async def _end_process(self) -> None:
        try:
            tasks = [task for task in self._tasks if not task.done()]
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # the event loop, too, may be about to end
            await self._client.shutdown()
            self._end_recording()

    def _end_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    async def _process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        options: RequestOptions,
        add_special_tokens: bool,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Return the core request of a prompt, and the prompt's text; see `generate`."""
        if self._dead is not None:
            raise self._dead
        self._attach()
        request, text = await offload(
            processing_time(prompt, params),
            self._input_processor.process,
            request_id,
            prompt,
            params,
            options,
            add_special_tokens=add_special_tokens,
        )
        if options.due < math.inf:
            self._check_deadlines(request, params)
        return request, text

    def _check_deadlines(self, request: EngineCoreRequest, params: SamplingParams) -> None:
        core = request.sampling_params
        # A stop text or token may come at once.
        stops = core.all_stop_token_ids or params.stop or core.grammar is not None
        num_tokens = max(1, core.min_tokens) if stops else core.max_tokens
        waiting = list(self._output_processor.waiting())
        num_running = self.num_unfinished_requests - sum(r.n for r in waiting)
        client, refusals = self._client, []
        for index, forecast in enumerate(self._forecasts):
            others = [r for r in waiting if client.engine_of(r.child_ids[0]) == index]
            try:
                forecast.check(
                    request,
                    others,
                    num_running=num_running // len(self._forecasts),
                    num_tokens=num_tokens,
                    now=clock.now(),
                )
            except UnmetDeadlineError as error:
                refusals.append(error)
        if len(refusals) == len(self._forecasts):  # no engine can meet them
            self.metrics.record_rejection("deadline_unmet")
            raise refusals[0]

    async def _stream(
        self, request: EngineCoreRequest, params: SamplingParams, text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a processed request; closing the stream aborts it."""
        if self._dead is not None:
            raise self._dead
        queue = RequestOutputCollector(params.output_kind)
        name = request.request_id
        # What is on its way of an earlier request must not be taken for one of the same name.
        number = str(next(self._numbers))
        if self._front_end is not None:
            number = f"{self._front_end}.{number}"
        request = msgspec.structs.replace(request, request_id=f"{name}#{number}")
        self._output_processor.add_request(request, params, text, queue, name)
        finished, timed = False, request.options.due < math.inf
        try:
            await self._client.add_request(request)
            while not finished:
                output = queue.get_nowait()
                if output is None:
                    output = await (self._wait(request, name, queue) if timed else queue.get())
                finished = output.finished
                yield output
        finally:
            # Its id may belong to another request by now.
            if not finished and self._output_processor.is_live(name, queue):
                await self.abort(name)

    async def _wait(
        self, request: EngineCoreRequest, name: str, queue: RequestOutputCollector
    ) -> RequestOutput:
        """The next output of a request with deadlines, which hold though no engine sees to them.

        Raises:
            DeadlineError: one of the deadlines has passed.
        """
        options = request.options
        while True:
            due: float | None = options.due
            if self._output_processor.has_first_tokens(name):
                due = options.deadline
            if due is None:
                return await queue.get()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - clock.now())):
                    return await queue.get()
            if options.deadline is not None and options.deadline <= clock.now():
                raise DeadlineError("The deadline passed.")
            if not self._output_processor.has_first_tokens(name):
                raise FirstTokenError("The first token did not come in time.")

    def _make_input_processor(self) -> InputProcessor:
        return InputProcessor(self.config.model, self.spec, self.tokenizer, self.max_model_len)

    async def _handle_outputs(self) -> None:
        self._client.ready.add_done_callback(self._became_ready)
        try:
            while True:
                await self._take_in(await self._client.get_output())
                for _ in range(_MOST_FOLLOWING):
                    outputs = self._client.get_output_nowait()
                    if outputs is None:
                        break
                    await self._take_in(outputs)
        except EngineDeadError as error:
            self._note_death(str(error))
            self._die(error)
        except Exception as error:
            logger.exception("the output handler failed")
            self._die(EngineDeadError(f"the output handler failed: {error!r}"))

    async def _take_in(self, outputs: EngineCoreOutputs) -> None:
        index = outputs.engine_index
        processed = self._output_processor.process_outputs(
            outputs.outputs, outputs.timestamp, index
        )
        # Count the step first: requests read their outputs while the abort waits.
        if outputs.stats is not None:
            self.stats = outputs.stats
            if index < len(self._forecasts):  # one that is ended gets no more
                self._forecasts[index].record(outputs.stats, outputs.timestamp)
            self._show(outputs.stats, index)
        await self._client.abort_requests(processed.reqs_to_abort)

    async def render_metrics(self) -> bytes:
        """All metrics in Prometheus' text format, with those of other front ends."""
        client = self._client
        if not isinstance(client, CoordinatorClient) or self._dead is not None:
            return self.metrics.render()
        return await asyncio.to_thread(join_pages, await client.pages())

    def _show(self, stats: SchedulerStats, index: int) -> None:
        """Has the metrics show what an engine does; behind a coordinator that is its part."""
        metrics = self.metrics.for_engine(index)
        if self._front_end is None:
            metrics.record_scheduler_stats(stats)
        else:
            metrics.keep_stats(stats)

    async def _trim_when_idle(self) -> None:
        """Gives memory back to the system, the first time that nothing runs any more."""
        trimmed = True
        with contextlib.suppress(EngineDeadError):
            await self.wait_ready()
            while True:
                await asyncio.sleep(_TRIM_INTERVAL)
                idle = not self.request_memory.used
                if idle and not trimmed:
                    with contextlib.suppress(StepFailedError):
                        await self._client.call_utility("trim_memory")
                    await asyncio.to_thread(trim_memory)
                trimmed = idle

    def _note_death(self, reason: str) -> None:
        if self._recorder is not None:
            self._recorder.put(Died(clock.now(), reason))

    def _note_recovery(self, recovery: Recovery) -> None:
        self._note_death(recovery.reason)
        self.metrics.for_engine(recovery.engine_index).record_recovery(
            recovery.num_requests, recovery.seconds
        )
        if self._sleep_level is not None:  # whoever put it to sleep counts on its memory
            self._falling_asleep = asyncio.create_task(self.sleep(self._sleep_level, "keep"))

    def _became_ready(self, ready: asyncio.Future[Any]) -> None:
        if ready.cancelled() or ready.exception() is not None:
            return
        plan = ready.result().plan
        if self._recorder is not None:
            self._recorder.put_plan(plan.num_blocks, plan.max_model_len)
        info = {
            **msgspec.structs.asdict(self.config.cache),
            "num_gpu_blocks": plan.num_blocks,
            "kv_cache_size_tokens": int(plan.max_concurrency * plan.max_model_len),
            "kv_cache_max_concurrency": round(plan.max_concurrency, 2),
        }
        self._cache_info = info
        for index in range(len(self._forecasts)):  # one plan for all engines
            self.metrics.for_engine(index).set_cache_config_info(info)
        if plan.max_model_len != self.max_model_len:
            self.max_model_len = plan.max_model_len
            self._input_processor = self._make_input_processor()

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        if self._loop is not None and not self._loop.is_closed():
            self._client.fail_calls(error)
        self._output_processor.propagate_error(error)


def _make_options(
    cache_salt: str | None,
    deadline: float | None,
    first_token_deadline: float | None,
    tenant: str | None,
    flow: int | None,
    turn: int,
) -> RequestOptions:
    """Return the envelope of a call that comes now, with its deadlines as `time.monotonic`'s."""
    return RequestOptions(
        clock.now(),
        tenant=tenant,
        deadline=None if deadline is None else clock.from_monotonic(deadline),
        first_token_deadline=None
        if first_token_deadline is None
        else clock.from_monotonic(first_token_deadline),
        turn=turn,
        cache_salt=cache_salt,
        flow=flow,
    )


class _Done:
    """What can be awaited and has happened."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


AsyncLLMEngine = AsyncLLM
"""Its older name in vLLM."""
