"""The asyncio front end: requests, their records, and the streams of their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.checkpoints.registry import open_checkpoint
from octavo.compat.call_arguments import check_stat_loggers, refuse_unsupported
from octavo.config import EngineConfig
from octavo.engine.checks import check_recording
from octavo.errors import (
    ConfigError,
    EngineDeadError,
)
from octavo.fleet.core_client import WatchedClient
from octavo.fleet.start import EngineProcesses, OnRecovery, Unfinished, start_engines
from octavo.fleet.supervisor import Recovery
from octavo.frontend.adapters import AdapterFiles, no_pins
from octavo.frontend.async_pooling import AsyncPooling
from octavo.frontend.beam_search import (
    beam_search_nbytes,
    make_beam_search,
    prompt_params,
    run_beam_search,
)
from octavo.frontend.engine_states import EngineStates
from octavo.frontend.engines import EngineRecords
from octavo.frontend.environment import apply_environment
from octavo.frontend.forecast import Forecast
from octavo.frontend.health import Health, engine_health
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.open_media import open_chat_media, open_media
from octavo.frontend.output_processor import LiveAnswer, OutputProcessor
from octavo.frontend.prompts import Prompt, processing_time
from octavo.frontend.request_memory import (
    RequestMemory,
    request_nbytes,
    trim_when_idle,
)
from octavo.frontend.request_streams import RequestStreams
from octavo.frontend.step_log import EngineDeath, StepLog
from octavo.frontend.time_line import Stages
from octavo.frontend.traces import make_tracer, read_trace_headers
from octavo.kv_cache.block_map import BlockMap
from octavo.lora_request import LoRARequest
from octavo.messages import (
    AdapterRef,
    EngineCoreOutputs,
    EngineCoreRequest,
    PauseMode,
    RequestOptions,
)
from octavo.models.hub import resolve_folders
from octavo.models.open_model import with_local_adapter
from octavo.models.registry import read_spec
from octavo.observability.metrics import EngineMetrics, join_pages
from octavo.observability.recording import Died, Recorder, RecordSettings
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.outputs import RequestOutput
from octavo.plan.memory_plan import resolve_max_model_len, resolve_max_num_batched_tokens
from octavo.platforms.registry import get_platform
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.system import clock
from octavo.system.offload import offload
from octavo.text.tokenizer import Tokenizer, require_tokenizer

if TYPE_CHECKING:
    from octavo.config.engine_args import AsyncEngineArgs

logger = logging.getLogger(__name__)

# Most steps that are processed in a row before waiting requests get a turn.
_MOST_FOLLOWING = 7


class AsyncLLM(AsyncPooling):
    """Asyncio interface to one model; each engine core runs in a separate process.

    All methods belong to one event loop: that of `start`. After `from_engine_args` outside of a
    loop it is the first loop that uses the engine.

    Args:
        config: the engine's settings.
        path: the model's folder.
        tokenizer_path: the tokenizer's folder.
        start_client: starts the engines, or connects to those of a coordinator; called with the
            last two arguments of `start_engines`.
        request_memory: bytes that unfinished requests of this front end may use.
        metrics_prefix: prefix of the metrics' names.
        record: settings of the recording; None: no recording.
        front_end: number of this front end among several with one coordinator, never reused.
        shared_media: folder in which they keep media by their uuids.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        tokenizer_path: Path,
        start_client: Callable[[Unfinished, OnRecovery], WatchedClient],
        *,
        request_memory: int,
        metrics_prefix: str = "octavo",
        record: RecordSettings | None = None,
        front_end: int | None = None,
        shared_media: Path | None = None,
    ) -> None:
        config.parallel.check(headless=False)
        config = msgspec.structs.replace(config, parallel=config.parallel.of_server())
        model = config.model
        check_recording(config, None if record is None else record.path)
        self.config = config
        self.checkpoint = open_checkpoint(path, config.load.load_format, mmproj=config.load.mmproj)
        self.spec = read_spec(self.checkpoint, model)
        # Preliminary: the memory plan may shorten a length of -1, see `_became_ready`.
        self.max_model_len = resolve_max_model_len(config, self.spec)
        self.tokenizer: Tokenizer | None = None
        if not model.skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_folder(tokenizer_path, model.tokenizer_mode)
        self._media = open_media(
            self.checkpoint, model, self.spec, self.tokenizer, self.max_model_len, shared_media
        )
        self.chat_media = open_chat_media(self._media, model, self.tokenizer, self.max_model_len)
        """Reader of the media in chats; None: the model reads none."""
        names = model.served_model_name
        self.metrics = EngineMetrics(
            names[0] if names else model.model,
            self.max_model_len,
            metrics_prefix,
            first_engine=config.parallel.first_engine,
        )
        self.stats = SchedulerStats()
        self.num_blocks = 0
        """Number of blocks of an engine's KV cache; 0 before the model is loaded."""
        self.step_log = StepLog()
        self._input_processor = self._make_input_processor()
        self._adapters = AdapterFiles(config, self.spec)
        self._recorder: Recorder | None = None
        if record is not None:
            from octavo.engine.record import make_recorder

            self._recorder = make_recorder(record, config, path, tokenizer_path)
        self._tracer = make_tracer(config, self.metrics.record_dropped_spans)
        self._output_processor = OutputProcessor(
            self.tokenizer,
            self.metrics,
            None if self._recorder is None else self._recorder.put,
            self._tracer,
        )
        if config.lora.enable_lora:
            adapter_names = self._output_processor.adapter_names
            self.metrics.watch_adapters(config.lora.max_loras, adapter_names)
        self.request_memory = RequestMemory(request_memory)
        """Memory of unfinished requests, and of answers on their way to a client."""
        self._shutdown: asyncio.Task[None] | None = None
        self._dead: EngineDeadError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        default_batched_tokens = get_platform(config.device.device).server_batched_tokens
        self.max_num_batched_tokens = resolve_max_num_batched_tokens(
            config, default_batched_tokens, self.spec
        )
        make_forecast = partial(
            Forecast,
            self.max_num_batched_tokens,
            heeds_priority=config.scheduler.scheduling_policy == "priority",
        )
        # Last, so that a failure before it leaves no process.
        self._client = start_client(self._output_processor.unfinished, self._note_recovery)
        self._streams = RequestStreams(self._client, self._output_processor, front_end)
        self._engines = EngineRecords(
            self._client,
            config.parallel.data_parallel_size,
            self.metrics,
            make_forecast,
            shows_stats=front_end is None,
        )
        self._states = EngineStates(
            self._call, self._client.elastic, self._engines, config.scales_experts
        )
        with contextlib.suppress(RuntimeError):  # there is no event loop yet
            self._attach()

    def _attach(self) -> None:
        """Make the running event loop the one to which the engine belongs.

        Raises:
            RuntimeError: no event loop is running.
            ConfigError: the engine belongs to another event loop.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._tasks = [
                loop.create_task(self._handle_outputs()),
                loop.create_task(trim_when_idle(self.request_memory, self._client)),
            ]
        elif self._loop is not loop:
            raise ConfigError(
                "This AsyncLLM belongs to the event loop in which it was first used, and that is "
                "not the running one; use one asyncio.run for all of its calls."
            )

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        processes: EngineProcesses | None = None,
        *,
        metrics_prefix: str = "octavo",
    ) -> AsyncLLM:
        """Start the engine process; return while the model still loads.

        Requests may be made at once; they wait for the model.

        Args:
            config: the engine's settings.
            processes: settings of the engine processes; None: their defaults.
            metrics_prefix: prefix of the metrics' names.

        Raises:
            ConfigError, ModelError, HubError: config, model folder or download are bad.
        """
        processes = processes or EngineProcesses()
        # A download may take long; the event loop continues meanwhile.
        folders = await asyncio.to_thread(resolve_folders, config)
        config = await asyncio.to_thread(with_local_adapter, config)
        return cls(
            config,
            *folders,
            partial(start_engines, config, *folders, processes),
            request_memory=processes.request_memory,
            metrics_prefix=metrics_prefix,
            record=processes.record,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        *,
        usage_context: object = None,
        stat_loggers: Sequence[object] | None = None,
    ) -> AsyncLLM:
        """Start the engine process with vLLM's settings; as `start`, but a download blocks.

        The call does not need an event loop.

        Args:
            engine_args: the settings.
            usage_context: ignored; no usage is reported.
            stat_loggers: loggers of statistics; see `StatLogger`.

        Raises:
            ConfigError, ModelError, HubError: settings, model folder or download are bad.
            UnsupportedError: a logger of statistics is not one of vLLM's own two.
        """
        check_stat_loggers(stat_loggers)
        level = apply_environment()
        config = engine_args.create_engine_config()
        config, folders = with_local_adapter(config), resolve_folders(config)
        processes = EngineProcesses(log_level=level or "warning")
        return cls(
            config,
            *folders,
            partial(start_engines, config, *folders, processes),
            request_memory=processes.request_memory,
        )

    async def wait_ready(self) -> None:
        """Wait for the model.

        Raises:
            EngineDeadError: the model cannot be loaded; the message has the root cause.
        """
        self._attach()
        await asyncio.shield(self._client.ready)

    @property
    def num_unfinished_requests(self) -> int:
        """Number of live requests; the n answers of a request count n times."""
        return self._output_processor.num_unfinished_requests

    @property
    def ready(self) -> bool:
        """True if an engine accepts requests now."""
        return self._dead is None and self._client.up

    @property
    def loading(self) -> bool:
        """True until the model is loaded for the first time; dead engines are replaced later."""
        return not self._client.ready.done()

    def health(self) -> Health:
        """Return the state: ok if an engine works or will soon be started; see `Supervisor`."""
        if self._dead is not None:
            return Health(False, f"the engine is dead: {self._dead}")
        return engine_health(self._client, len(self._engines), self.config)

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
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request; closing the stream aborts it.

        Args:
            prompt: text, token ids, or a dict with one of them.
            sampling_params: parameters of the answer; not changed.
            request_id: an id that no live request has.
            cache_salt: scope of the prefix cache.
            deadline: second of `time.monotonic` after which the request fails.
            first_token_deadline: second after which it fails if it has no token yet.
            tenant: sender of the request: tenants share tokens and memory fairly.
            flow: class of the client's address: without tenants, flows share tokens.
            add_special_tokens: True if the tokenizer adds its special tokens to a text.
            turn: number of prompts before it in the same call: later ones let others pass.
            lora_request: the adapter, with `enable_lora`; None: the model alone.
            trace_headers: W3C's headers traceparent and tracestate of a trace that the request
                continues, and x-request-id; they matter only with `otlp_traces_endpoint`.
            priority: smaller is served earlier (with `scheduling_policy=priority`).
            data_parallel_rank: must be None: the engine with the least load is chosen.

        Raises:
            RequestError: the request is bad or fails, or its id is in use.
            QueueFullError: too little memory is free now.
            UnmetDeadlineError: a deadline cannot be met.
            EngineDeadError: the engine has ended.
        """
        refuse_unsupported(data_parallel_rank=data_parallel_rank)
        if priority:
            sampling_params = msgspec.structs.replace(sampling_params, priority=priority)
        options = self._envelope(
            cache_salt=cache_salt,
            deadline=deadline,
            first_token_deadline=first_token_deadline,
            tenant=tenant,
            flow=flow,
            turn=turn,
            trace_headers=trace_headers,
        )
        adapter = await self.resolve_adapter(lora_request)
        options = msgspec.structs.replace(options, adapter=adapter)
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
        stages: Stages | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a request that has an envelope; see `generate`.

        `stages` gets the stages of the request before the engine.
        """
        request, text = await self.process(prompt, params, request_id, options, add_special_tokens)
        if stages is not None:
            stages.end("tokenize")
        nbytes = request_nbytes(request, params, self.spec.vocab_size)
        with self.request_memory.reserve(nbytes, options.tenant, background=options.background):
            async with aclosing(self._stream(request, params, text, stages)) as outputs:
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
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Find the most probable answers to a prompt; cancelling it ends all its requests.

        Its steps are requests of one token each, which queue like all others.

        Args and Raises: as for `generate`.

        Returns:
            The beams as answers, the best first.
        """
        options = self._envelope(
            cache_salt=cache_salt,
            deadline=deadline,
            first_token_deadline=first_token_deadline,
            tenant=tenant,
            flow=flow,
            turn=turn,
        )
        adapter = await self.resolve_adapter(lora_request)
        options = msgspec.structs.replace(options, adapter=adapter)
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
        stages: Stages | None = None,
    ) -> RequestOutput:
        """Find the most probable answers to a prompt with an envelope; see `beam_search`.

        `stages` gets the stages of the request before the engine.
        """
        of_prompt = prompt_params(params, self.spec)
        request, text = await self.process(
            prompt, of_prompt, request_id, options, add_special_tokens
        )
        if stages is not None:
            stages.end("tokenize")
        search = make_beam_search(params, request, self.spec)
        nbytes = beam_search_nbytes(request, search, self.spec.vocab_size)
        with self.request_memory.reserve(nbytes, options.tenant, background=options.background):
            return await run_beam_search(
                request, text, search, of_prompt, self.tokenizer, self._stream
            )

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter before its first request; see `LLMEngine.add_lora`."""
        return await asyncio.to_thread(self._adapters.add, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; see `LLMEngine.remove_lora`."""
        return self._adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the numbers (`lora_int_id`) of the known adapters."""
        return self._adapters.numbers

    async def pin_lora(self, lora_id: int) -> bool:
        """Raise `UnsupportedError`; see `LLMEngine.pin_lora`."""
        raise no_pins(lora_id)

    async def check_default_adapters(self) -> None:
        """Check the adapters of prompts with media that name no adapter.

        Raises:
            AdapterError: the files of one cannot be used with this model.
        """
        for default in self._adapters.defaults.values():
            await self._adapters.resolve_async(default)

    async def resolve_adapter(
        self, lora_request: LoRARequest | None, root: Path | None = None
    ) -> AdapterRef | None:
        """Return the adapter of a request, after a check of its files on another thread.

        Args:
            lora_request: the adapter.
            root: folder that must contain its files; None: they may be anywhere, and the path may
                be a hub id.

        Raises:
            AdapterError: the files cannot be used with this model.
            RequestError: adapters are off, or `lora_request` is not a `LoRARequest`.
        """
        return await self._adapters.resolve_async(lora_request, root)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several, within one step; ignore unknown ids."""
        self._attach()
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._streams.abort(ids)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            UnsupportedError: the engine was created with skip_tokenizer_init.
        """
        return require_tokenizer(self.tokenizer)

    async def check_health(self) -> None:
        """Raise the error that ended the engine, if it is dead.

        Raises:
            EngineDeadError: the engine is dead; the message has the root cause.
        """
        if self._dead is not None:
            raise self._dead

    @property
    def errored(self) -> bool:
        """True if the engine is dead."""
        return self._dead is not None

    @property
    def is_running(self) -> bool:
        """True if the engine is not dead."""
        return self._dead is None

    @property
    def engine_stats(self) -> Mapping[int, SchedulerStats]:
        """Latest statistics of each engine, by its index."""
        return self._engines.stats

    @property
    def num_engines(self) -> int:
        """Number of engines; it may change (`scale`)."""
        return len(self._engines)

    def engine_of(self, core_id: str) -> int | None:
        """Return the index of the engine of an unfinished answer; None: it is unknown here."""
        return self._client.engine_of(core_id)

    def live_answers(self) -> Iterator[LiveAnswer]:
        """Yield the unfinished answers of this front end, in order of arrival."""
        return self._output_processor.live_answers()

    async def block_maps(self) -> dict[int, BlockMap]:
        """Return the map of each engine's KV cache, by the engine's index.

        Raises:
            OctavoError: an engine has died before it answered.
        """
        return msgspec.convert(await self._client.call_utility("block_map"), dict[int, BlockMap])

    async def expert_counts(self) -> dict[int, list[tuple[int, list[int]]]]:
        """Return (layer, tokens of each expert) since the start, by the engine's index.

        Raises:
            OctavoError: an engine has died before it answered.
        """
        counts: dict[int, list[tuple[int, list[int]]]] = await self._client.call_utility(
            "expert_counts"
        )
        return counts

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; see `LLM.reset_prefix_cache`."""
        self._attach()
        args = reset_running_requests, reset_connector
        was_reset = bool(await self._client.call_utility("reset_prefix_cache", *args))
        if was_reset:
            self._states.note_cache_emptied()
        return was_reset

    async def reset_encoder_cache(self) -> bool:
        """Forget the results of encoders; see `LLM.reset_encoder_cache`."""
        self._attach()
        return bool(await self._client.call_utility("reset_encoder_cache"))

    async def reset_mm_cache(self) -> None:
        """Forget the media that this front end and the engines keep; see `LLM.reset_mm_cache`."""
        self._attach()
        if self._media is not None:
            self._media.clear()
        await self._client.call_utility("reset_mm_cache")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop computing until `wake_up`, and return memory to the system.

        New requests wait, up to their deadlines.

        Args and Raises: as for `LLMEngine.sleep`.
        """
        await self._states.sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Allocate memory again and continue; return True if the engine is awake.

        Args and Raises: as for `LLMEngine.wake_up`.
        """
        return await self._states.wake_up(tags)

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        """Stop computing until `resume_generation`, and keep all memory.

        New requests wait, up to their deadlines.

        Args:
            mode: effect on unfinished requests: abort ends them with their tokens so far, wait
                finishes them first, keep continues them later.
            clear_cache: True to forget cached prefixes, which is necessary for new weights; kept
                requests are then computed again.

        Raises:
            RequestError: the mode is unknown.
        """
        await self.sleep(0, mode)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """Continue after `pause_generation`; memory that sleeps stays asleep."""
        await self.wake_up(["scheduling"])

    async def is_paused(self) -> bool:
        """Return True if the engine waits for `resume_generation` or `wake_up`."""
        return await self.is_sleeping()

    async def do_log_stats(self) -> None:
        """Log a line with the engine's current work; any event loop may call it."""
        logger.info(
            "running: %d, waiting: %d, KV cache usage: %.1f %%",
            self.stats.num_running_reqs,
            self.stats.num_waiting_reqs,
            100 * self.stats.kv_cache_usage,
        )

    @property
    def asleep(self) -> bool:
        """True if the engines sleep, at any level."""
        return self._states.asleep

    async def is_sleeping(self) -> bool:
        """Return True if the engine sleeps, at any level, or is about to."""
        return bool(await self._call("is_sleeping"))

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the engines, unless they have ended."""
        self._begin()
        return await self._client.call_utility(method, *args)

    @property
    def scaling(self) -> bool:
        """True while engines are being added or ended."""
        return self._states.scaling

    @property
    def cache_emptied_at(self) -> float | None:
        """Second of `time.monotonic` at which an engine's prefix cache was emptied last."""
        return self._states.cache_emptied_at

    async def scale(self, size: int) -> None:
        """Change the number of engines while requests continue; this needs `enable_elastic_ep`.

        Raises:
            ScalingError: the number cannot be changed, or not now; nothing has changed.
        """
        self._begin()
        await self._states.scale(size)

    async def start_profile(self) -> None:
        """Record spans of steps and kernels in the engine process; this needs `profiler_dir`.

        Raises:
            ProfilerError: `profiler_dir` is not set, or a profile is already being recorded.
        """
        self._attach()
        await self._client.call_utility("start_profile")

    async def stop_profile(self) -> str:
        """End the profile; return the path of the Chrome trace.

        Raises:
            ProfilerError: no profile is being recorded, or the trace cannot be written.
        """
        self._attach()
        return str(await self._client.call_utility("stop_profile"))

    def shutdown(self) -> Awaitable[None]:
        """End the engine process. A second call is harmless.

        Returns:
            An awaitable of the process's end. Outside of an event loop the process has ended.
        """
        for task in self._tasks:
            task.cancel()
        if self._dead is None:
            self._die(EngineDeadError("the engine was shut down"))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._client.close()
            self._end_records()
            return _Done()
        self._shutdown = loop.create_task(self._end_process())
        return self._shutdown

    async def _end_process(self) -> None:
        try:
            tasks = [task for task in self._tasks if not task.done()]
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # the event loop, too, may be about to end
            await self._client.shutdown()
            self._end_records()

    def _end_records(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        if self._tracer is not None:
            self._tracer.close()
        if self.chat_media is not None:
            self.chat_media.close()

    def _begin(self) -> None:
        """Begin a call: raise the error that ended the engine, and attach it to the event loop."""
        if self._dead is not None:
            raise self._dead
        self._attach()

    def _envelope(
        self,
        *,
        cache_salt: str | None = None,
        deadline: float | None = None,
        first_token_deadline: float | None = None,
        tenant: str | None = None,
        flow: int | None = None,
        turn: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestOptions:
        """Return the envelope of a new call; the arguments are those of `generate`."""
        traced = None
        if trace_headers is not None and self._tracer is not None:
            traced = read_trace_headers(trace_headers)
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
            trace_headers=traced,
        )

    async def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        options: RequestOptions,
        add_special_tokens: bool,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Return the core request of a prompt, and the prompt's text; see `generate`."""
        self._begin()
        if options.adapter is None and (default := self._adapters.of_media(prompt)) is not None:
            adapter = await self._adapters.resolve_async(default)
            options = msgspec.structs.replace(options, adapter=adapter)
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
            waiting = list(self._output_processor.waiting())
            num_running = self.num_unfinished_requests - sum(r.n for r in waiting)
            if not options.background:  # those in the background make place for it
                num_running -= self._output_processor.num_running_in_background()
            self._engines.check_deadlines(request, params, waiting, num_running)
        return request, text

    def _stream(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        text: str | None = None,
        stages: Stages | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a processed request; see `RequestStreams.stream`."""
        if self._dead is not None:
            raise self._dead
        return self._streams.stream(request, params, text, stages)

    def _make_input_processor(self) -> InputProcessor:
        return InputProcessor(
            *(self.config.model, self.spec, self.tokenizer, self.max_model_len, self._media)
        )

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
        if outputs.steps:
            self.step_log.add(index, outputs.timestamp, outputs.steps)
        processed = self._output_processor.process_outputs(
            outputs.outputs, outputs.timestamp, index
        )
        # Count the step first: requests read their outputs while the abort waits.
        if outputs.stats is not None:
            self.stats = outputs.stats
            self._engines.record(outputs.stats, outputs.timestamp, index)
        await self._client.abort_requests(processed.reqs_to_abort)

    async def render_metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format, with those of other front ends."""
        pages = [] if self._dead is not None else await self._client.pages()
        return await asyncio.to_thread(join_pages, pages) if pages else self.metrics.render()

    def _note_death(self, reason: str) -> None:
        if self._recorder is not None:
            self._recorder.put(Died(clock.now(), reason))

    def _note_recovery(self, recovery: Recovery) -> None:
        self._note_death(recovery.reason)
        self.step_log.deaths.append(
            EngineDeath(clock.now(), recovery.seconds, recovery.engine_index, recovery.reason)
        )
        self._states.note_recovery()
        self.metrics.for_engine(recovery.engine_index).record_recovery(
            recovery.num_requests, recovery.seconds
        )

    def _became_ready(self, ready: asyncio.Future[Any]) -> None:
        if ready.cancelled() or ready.exception() is not None:
            return
        self.step_log.ready = clock.now()
        plan = ready.result().plan
        self.num_blocks = plan.num_blocks
        if self._recorder is not None:
            self._recorder.put_plan(plan.num_blocks, plan.max_model_len)
        self._engines.set_cache_info(
            {
                **msgspec.structs.asdict(self.config.cache),
                "num_gpu_blocks": plan.num_blocks,
                "kv_cache_size_tokens": int(plan.max_concurrency * plan.max_model_len),
                "kv_cache_max_concurrency": round(plan.max_concurrency, 2),
            }
        )
        if plan.max_model_len != self.max_model_len:
            self.max_model_len = plan.max_model_len
            self._input_processor = self._make_input_processor()

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        if self._loop is not None and not self._loop.is_closed():
            self._client.fail_calls(error)
        self._output_processor.propagate_error(error)


class _Done:
    """Awaitable that is done."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


AsyncLLMEngine = AsyncLLM
"""Older name of `AsyncLLM` in vLLM."""
