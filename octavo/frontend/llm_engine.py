"""An engine in this process, a step at a time: vLLM's `LLMEngine`."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from octavo.checkpoints.registry import open_checkpoint
from octavo.checkpoints.sharded_state import SHARDED_PATTERN
from octavo.compat.call_arguments import apply_tokenization
from octavo.config import EngineConfig, ModelConfig
from octavo.engine.assemble import make_engine_core
from octavo.engine.checks import check_offline
from octavo.errors import EngineDeadError, OctavoError, RequestError, UnsupportedError
from octavo.fleet.core_client import InprocClient
from octavo.frontend.adapters import AdapterFiles, no_pins
from octavo.frontend.environment import apply_environment
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.interrupts import late_interrupts
from octavo.frontend.open_media import open_chat_media, open_media
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.prompts import Prompt
from octavo.frontend.traces import make_tracer, read_trace_headers
from octavo.lora_request import LoRARequest
from octavo.messages import AdapterRef, EngineCoreRequest, PauseMode, RequestOptions
from octavo.models.blocks.pooler import PoolerSpec
from octavo.models.hub import resolve_folders
from octavo.models.open_model import with_local_adapter
from octavo.models.registry import read_spec
from octavo.observability.profiler import span
from octavo.observability.recording import Arrival, End, Outputs
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.plan.memory_plan import resolve_dtype, resolve_max_model_len
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.system import clock
from octavo.text.tokenizer import Tokenizer, require_tokenizer

if TYPE_CHECKING:
    from octavo.config.engine_args import EngineArgs
    from octavo.fleet.isolated import IsolatedClient  # imports ZMQ
    from octavo.observability.metrics_reader import (
        Metric,  # imports Prometheus, which most programs do not need
    )

logger = logging.getLogger(__name__)

OFFLINE_BATCHED_TOKENS = 8192

T = TypeVar("T")


class LLMEngine:
    """A model in this process. `LLM` uses it; other callers drive it by `step`.

    Args:
        config: the settings.
        log_stats: True to count metrics.
        isolate: True to run the core in a separate process, which is replaced if it dies; with
            `data_parallel_size`, each core has its own process in any case.
        record: see `OutputProcessor`.

    Raises:
        ConfigError, ModelError, HubError: settings, model folder or download are bad.
        EngineDeadError: an isolated engine cannot load the model.
    """

    metrics_prefix: ClassVar[str] = "octavo"
    """Prefix of the metrics' names in later engines, without the colon; `octavo.compat.vllm` sets
    it to "vllm"."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_stats: bool = False,
        isolate: bool = False,
        record: Callable[[Arrival | Outputs | End], None] | None = None,
    ) -> None:
        apply_environment()
        config = self.config = with_local_adapter(config)
        check_offline(config)
        settings = config.model
        path, tokenizer_path = resolve_folders(config)
        self.checkpoint = open_checkpoint(
            path, config.load.load_format, settings.seed, mmproj=config.load.mmproj
        )
        self.spec = read_spec(self.checkpoint, settings)
        self.adapters = AdapterFiles(config, self.spec)
        """Adapters of requests."""
        for default in self.adapters.defaults.values():
            self.adapters.resolve(default)
        self.tokenizer: Tokenizer | None = None
        if not settings.skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_folder(tokenizer_path, settings.tokenizer_mode)
        self._metrics = None
        if log_stats:
            from octavo.observability.metrics import EngineMetrics

            max_model_len = resolve_max_model_len(config, self.spec)
            self._metrics = EngineMetrics(settings.model, max_model_len, self.metrics_prefix)
        self._tracer = make_tracer(config, self._note_dropped_spans)
        self._output_processor = OutputProcessor(
            self.tokenizer, self._metrics, record, self._tracer
        )
        if self._metrics is not None and config.lora.enable_lora:
            names = self._output_processor.adapter_names
            self._metrics.watch_adapters(config.lora.max_loras, names)
        self.client: InprocClient | IsolatedClient
        if isolate or config.parallel.data_parallel_size > 1:
            from octavo.fleet.isolated import start_isolated

            self.client = start_isolated(
                config,
                path,
                self._output_processor.unfinished,
                default_batched_tokens=OFFLINE_BATCHED_TOKENS,
                log_level=logging.getLevelName(logger.getEffectiveLevel()).lower(),
            )
            self.memory_plan = self.client.memory_plan
        else:
            core, self.memory_plan = make_engine_core(
                config, self.spec, path, default_batched_tokens=OFFLINE_BATCHED_TOKENS
            )
            self.client = InprocClient(core)
            gc.collect()  # here, instead of in a step: a large KV cache has many objects
        max_model_len = self.memory_plan.max_model_len
        self.model_config: ModelConfig = msgspec.structs.replace(
            settings, max_model_len=max_model_len
        )
        """Settings of the model, with the resolved `max_model_len`."""
        media = open_media(self.checkpoint, settings, self.spec, self.tokenizer, max_model_len)
        self.input_processor = InputProcessor(
            settings, self.spec, self.tokenizer, max_model_len, media
        )
        self.chat_media = open_chat_media(media, settings, self.tokenizer, max_model_len)
        """Reader of the media in chats; None: the model reads none."""
        self._request_ids = itertools.count()
        self.inboxes: dict[str, list[RequestOutput | OctavoError]] = {}
        """Outputs and errors of each live request of `start` that the caller has not removed."""
        self._added: set[str] = set()
        """Unfinished requests of `add_request`."""
        self._outputs: list[RequestOutput] = []
        """Outputs of the requests of `add_request` that `step` has not returned yet."""
        self._running = True

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """Create an engine from vLLM's settings.

        Raises:
            ConfigError, ModelError, HubError: settings, model folder or download are bad.
        """
        config = engine_args.create_engine_config()
        return cls(config, log_stats=not engine_args.disable_log_stats)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Add a request; `step` returns its outputs.

        Args:
            request_id: an id that no live request has.
            prompt: text, token ids, or a dict with one of them.
            params: the sampling parameters; not changed.
            arrival_time: seconds since 1970; default: now.
            lora_request: the adapter; None: the model alone.
            tokenization_kwargs: `truncate_prompt_tokens` and `add_special_tokens`.
            trace_headers: W3C's headers traceparent and tracestate of a trace that the request
                continues, and x-request-id; they matter only with `otlp_traces_endpoint`.
            priority: smaller is served earlier (with `scheduling_policy=priority`).

        Returns:
            The id.

        Raises:
            RequestError: the request is bad, or its id is in use.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is not a string.", "request_id")
        params, special = apply_tokenization(params, tokenization_kwargs)
        if priority:
            params = msgspec.structs.replace(params, priority=priority)
        with late_interrupts():
            request, text = self.process(
                prompt,
                params,
                request_id=request_id,
                arrival_time=arrival_time,
                add_special_tokens=special,
                trace_headers=trace_headers,
                adapter=self.adapters.resolve(lora_request),
            )
            self._hand_in(request, params, text)
            self._added.add(request_id)
        return request_id

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter before its first request, which reads it into the memory.

        Returns:
            True if its number was not known, or its files were read again (`load_inplace`).

        Raises:
            AdapterError: the files cannot be used with this model.
            RequestError: adapters are off, or `lora_request` is not a `LoRARequest`.
        """
        return self.adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; its running requests end as they are. False: the number is unknown."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers (`lora_int_id`) of the known adapters."""
        return self.adapters.numbers

    def pin_lora(self, lora_id: int) -> bool:
        """Raise `UnsupportedError`: which adapters stay in memory follows from their requests."""
        raise no_pins(lora_id)

    def step(self) -> list[RequestOutput]:
        """Run a step and return the new outputs of requests of `add_request`.

        A request that fails alone has an answer with `finish_reason` "error" and the error message
        as `stop_reason`.

        Raises:
            SleepError: the engine sleeps, and there is nothing to return.
        """
        if self._added and not self._outputs:
            with late_interrupts():
                self.advance()
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return True if `step` has more outputs to return."""
        return bool(self._added or self._outputs)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of live requests; the n answers of a request count n times."""
        return self._output_processor.num_unfinished_requests

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests of `add_request`, without further outputs. Ignore unknown ids."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ids = [i for i in ids if i in self._added]
        with late_interrupts():
            self._abort(ids)
            self._added.difference_update(ids)
            self._outputs = [o for o in self._outputs if o.request_id not in ids]

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            UnsupportedError: the engine was created with skip_tokenizer_init.
        """
        return require_tokenizer(self.tokenizer)

    def get_metrics(self) -> list[Metric]:
        """Return the current values of all metrics.

        Raises:
            UnsupportedError: the engine was created without metrics.
        """
        if self._metrics is None:
            raise UnsupportedError(
                "Metrics are off; create the engine with disable_log_stats=False."
            )
        from octavo.observability.metrics_reader import read_metrics

        return read_metrics(self._metrics.render().decode())

    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Call a method of each worker, on its thread, between two steps.

        Args:
            method: the method's name, or a function with the worker as its first argument.
            timeout: seconds to wait; None: no limit.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            The results of all workers, in their order.

        Raises:
            TimeoutError: the call took longer than `timeout`.
            UnsupportedError: the method does not exist; or the worker is in another process, and
                an argument or result, such as a function, cannot be sent.
        """
        if not isinstance(self.client, InprocClient):
            raise UnsupportedError(
                "The workers are in other processes (isolate=True, or data_parallel_size > 1); "
                "leave these out to call them."
            )
        return self.client.core.executor.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Call a function with the model of each worker, an `octavo.models.base.Model`."""
        return self.collective_rpc(lambda worker: func(worker.runner.model))

    @property
    def engine_core(self) -> LLMEngine:
        """This engine; scripts for vLLM call its `save_sharded_state`."""
        return self

    def save_sharded_state(
        self, path: str | Path, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Save the weights in vLLM's sharded form, which `load_format=sharded_state` reads.

        Each of `tensor_parallel_size` ranks has its own files, divided as in vLLM. Config and
        tokenizer are not copied.

        Args:
            path: the folder to write to.
            pattern: must be None, or vLLM's own: model-rank-{rank}-part-{part}.safetensors.
            max_size: the largest number of bytes of a file; None: no limit.

        Raises:
            ConfigError: the folder already holds weight files of that form, or is not writable.
            UnsupportedError: the settings or the model do not support this form.
        """
        from octavo.models.sharded_save import save_sharded_state

        config = self.config
        if pattern not in (None, SHARDED_PATTERN):
            raise UnsupportedError(
                f"pattern={pattern!r} is not supported: files are named {SHARDED_PATTERN}; leave "
                "it out.",
                "pattern",
            )
        if config.device.pipeline_parallel_size > 1 or config.model.quantization is not None:
            raise UnsupportedError(
                "save_sharded_state is not supported with pipeline_parallel_size or quantization; "
                "leave them out, and set them when the saved weights are loaded."
            )
        save_sharded_state(
            self.spec,
            self.checkpoint,
            Path(path),
            dtype=resolve_dtype(config, self.spec),
            size=config.device.tensor_parallel_size,
            max_size=max_size,
        )

    def stats(self) -> SchedulerStats:
        """Return the state and counters of the scheduler and the KV cache."""
        return msgspec.convert(complete(self.client.call_utility("stats")), SchedulerStats)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; see `LLM.reset_prefix_cache`."""
        what = reset_running_requests, reset_connector
        return bool(complete(self.client.call_utility("reset_prefix_cache", *what)))

    def reset_encoder_cache(self) -> bool:
        """Forget the results of encoders; see `LLM.reset_encoder_cache`."""
        return bool(complete(self.client.call_utility("reset_encoder_cache")))

    def reset_mm_cache(self) -> None:
        """Forget the kept media; see `LLM.reset_mm_cache`."""
        self.input_processor.reset_mm_cache()
        complete(self.client.call_utility("reset_mm_cache"))

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop computing until `wake_up`, and return memory to the system.

        Requests that are added meanwhile wait.

        Args:
            level: 0 only pauses the engine; 1 also frees the memory of weights and KV cache; 2 is
                like 1, but `wake_up` may load changed weights from the model's folder.
            mode: treatment of unfinished requests: abort ends them with their current output
                (`finish_reason` "abort"), wait finishes them first, keep continues them later.

        Raises:
            RequestError: level or mode is unknown.
            SleepError: level is not 0 and `enable_sleep_mode` is off, or level is 2 and the
                engine has a KV connector.
        """
        with late_interrupts() as interrupts:
            while not complete(self.client.call_utility("sleep", level, mode)):
                self.advance()
                interrupts.raise_now()
        self._record_sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Allocate the memory again and continue.

        Args:
            tags: the parts to wake up, of "weights", "kv_cache" and "scheduling"; None: all.

        Returns:
            True if no part of the engine sleeps.

        Raises:
            RequestError: a tag is unknown.
            SleepError: too little memory is free; the engine stays asleep.
            ModelError: the weights cannot be read, or have changed since `sleep` at level 1; the
                engine stays asleep.
        """
        awake = bool(complete(self.client.call_utility("wake_up", tags)))
        if awake:
            self._record_sleep(None)
        return awake

    def is_sleeping(self) -> bool:
        """Return True if the engine sleeps at any level."""
        return bool(complete(self.client.call_utility("is_sleeping")))

    def _note_dropped_spans(self, count: int) -> None:
        if self._metrics is not None:
            self._metrics.record_dropped_spans(count)

    def _record_sleep(self, level: int | None) -> None:
        if self._metrics is not None:
            for index in range(self.config.parallel.data_parallel_size):
                self._metrics.for_engine(index).record_sleep_state(level)

    def start_profile(self) -> None:
        """Start to record spans of steps and kernels; needs `profiler_dir`.

        Raises:
            ProfilerError: `profiler_dir` is not set, or a profile is already being recorded.
        """
        complete(self.client.call_utility("start_profile"))

    def stop_profile(self) -> str:
        """End the profile and return the path of the Chrome trace.

        Raises:
            ProfilerError: no profile is being recorded, or the trace cannot be written.
        """
        return str(complete(self.client.call_utility("stop_profile")))

    def shutdown(self) -> None:
        """End the workers and free their memory. A second call is harmless."""
        self._running = False
        complete(self.client.shutdown())
        if self._tracer is not None:
            self._tracer.close()
        if self.chat_media is not None:
            self.chat_media.close()

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        add_special_tokens: bool = True,
        trace_headers: Mapping[str, str] | None = None,
        adapter: AdapterRef | None = None,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Return the core request of a prompt, and its text; see `InputProcessor.process`."""
        if request_id is None:
            ids = map(str, self._request_ids)
            request_id = next(i for i in ids if i not in self._added)
        if adapter is None:
            adapter = self.adapters.resolve(self.adapters.of_media(prompt))
        return self.input_processor.process(
            request_id,
            prompt,
            params,
            RequestOptions(
                clock.now() if arrival_time is None else arrival_time,
                trace_headers=read_trace_headers(trace_headers)
                if trace_headers is not None and self._tracer is not None
                else None,
                adapter=adapter,
            ),
            add_special_tokens=add_special_tokens,
        )

    def process_pooling(
        self,
        prompt: Prompt,
        params: PoolingParams,
        *,
        add_special_tokens: bool = True,
        adapter: AdapterRef | None = None,
    ) -> tuple[EngineCoreRequest, PoolerSpec]:
        """Return the core request of a text; see `PoolingInputs.process`."""
        request_id = next(i for i in map(str, self._request_ids) if i not in self._added)
        return self.input_processor.pooling.process(
            request_id,
            prompt,
            params,
            RequestOptions(clock.now(), adapter=self.adapters.resolve_task(params, adapter)),
            add_special_tokens=add_special_tokens,
        )

    def start(self, request: EngineCoreRequest, params: SamplingParams, text: str | None) -> str:
        """Submit a request, deliver its outputs to `inboxes`, and return its id.

        The caller must delay Ctrl-C meanwhile, and also during `advance` and `end`.
        """
        self._hand_in(request, params, text)
        self.inboxes[request.request_id] = []
        return request.request_id

    def advance(self) -> list[str]:
        """Run a step and return the ids of the requests with new outputs or errors."""
        outputs = complete(self.client.get_output())
        with span("process_outputs"):
            processed = self._output_processor.process_outputs(
                outputs.outputs, outputs.timestamp, outputs.engine_index
            )
        complete(self.client.abort_requests(processed.reqs_to_abort))
        if self._metrics is not None and outputs.stats is not None:
            metrics = self._metrics.for_engine(outputs.engine_index)
            metrics.record_scheduler_stats(outputs.stats)
        for output in processed.request_outputs:
            self._put(output.request_id, output, output.finished)
        for request_id, error in processed.errors.items():
            self._put(request_id, error, True)
        return [*(o.request_id for o in processed.request_outputs), *processed.errors]

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests of `start`; abort those that still run."""
        ids = list(request_ids)
        self._abort(ids)
        for request_id in ids:
            del self.inboxes[request_id]

    def _hand_in(
        self, request: EngineCoreRequest, params: SamplingParams, text: str | None
    ) -> None:
        if not self._running:
            raise EngineDeadError("This LLM was shut down; create a new one.")
        self._output_processor.add_request(request, params, text)
        complete(self.client.add_request(request))

    def _abort(self, request_ids: list[str]) -> None:
        complete(self.client.abort_requests(self._output_processor.abort_requests(request_ids)))

    def _put(self, request_id: str, output: RequestOutput | OctavoError, finished: bool) -> None:
        inbox = self.inboxes.get(request_id)
        if inbox is not None:
            inbox.append(output)
            return
        if isinstance(output, OctavoError):
            output = failed_output(request_id, output)
        self._outputs.append(output)
        if finished:
            self._added.discard(request_id)


def complete(call: Coroutine[None, None, T]) -> T:
    """Return the result of a call of `InprocClient` or `IsolatedClient`, which never waits."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a call in process waits")


def failed_output(request_id: str, error: OctavoError) -> RequestOutput:
    """Return the output of a request that failed alone, so that others of its batch survive."""
    logger.warning("request %s failed: %s", request_id, error)
    answer = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
    return RequestOutput(request_id, None, [], None, [answer], finished=True)
