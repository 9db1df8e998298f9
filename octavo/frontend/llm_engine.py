"""An engine in this process, a step at a time: vLLM's `LLMEngine`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from octavo.checkpoints.registry import open_checkpoint
from octavo.checkpoints.sharded_state import SHARDED_PATTERN
from octavo.compat.call_arguments import apply_tokenization, refuse_unsupported
from octavo.config import EngineConfig, ModelConfig
from octavo.config.engine_args import EngineArgs
from octavo.engine.assemble import make_engine_core
from octavo.engine.checks import check_offline
from octavo.errors import EngineDeadError, OctavoError, RequestError, UnsupportedError
from octavo.fleet.core_client import InprocClient
from octavo.frontend.environment import apply_environment
from octavo.frontend.input_processor import InputProcessor, Prompt
from octavo.frontend.interrupts import late_interrupts
from octavo.frontend.output_processor import OutputProcessor
from octavo.messages import EngineCoreRequest, PauseMode, RequestOptions
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.observability.profiler import span
from octavo.observability.recording import Arrival, End, Outputs
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.plan.memory_plan import resolve_dtype, resolve_max_model_len
from octavo.sampling_params import SamplingParams
from octavo.system import clock
from octavo.text.tokenizer import Tokenizer, require_tokenizer

if TYPE_CHECKING:
    from octavo.fleet.isolated import IsolatedClient  # brings ZMQ, likewise
    from octavo.observability.metrics_reader import (
        Metric,  # brings Prometheus, which most do without
    )

logger = logging.getLogger(__name__)

OFFLINE_BATCHED_TOKENS = 8192

T = TypeVar("T")


class LLMEngine:
    """A model in this process. `LLM` is made of it; by itself it is driven by `step`.

    Args:
        config: the settings.
        log_stats: whether there are metrics.
        isolate: whether the core runs in a process of its own, which is replaced if it dies; with
            `data_parallel_size`, each of several does.
        record: see `OutputProcessor`.

    Raises:
        ConfigError, ModelError, HubError: if settings, model folder or download are bad.
        EngineDeadError: if an isolated engine cannot load the model.
    """

    metrics_prefix: ClassVar[str] = "octavo"
    """What the names of `get_metrics` begin with, without the colon, in engines made from now on;
    "vllm" under `octavo.compat.vllm`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_stats: bool = False,
        isolate: bool = False,
        record: Callable[[Arrival | Outputs | End], None] | None = None,
    ) -> None:
        apply_environment()
        self.config = config
        check_offline(config)
        settings = config.model
        path, tokenizer_path = resolve_folders(config)
        self._checkpoint = open_checkpoint(path, config.load.load_format, settings.seed)
        self.spec = read_spec(self._checkpoint, settings)
        self.tokenizer: Tokenizer | None = None
        if not settings.skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_folder(tokenizer_path)
        self._metrics = None
        if log_stats:
            from octavo.observability.metrics import EngineMetrics

            max_model_len = resolve_max_model_len(config, self.spec)
            self._metrics = EngineMetrics(settings.model, max_model_len, self.metrics_prefix)
        self._output_processor = OutputProcessor(self.tokenizer, self._metrics, record)
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
        max_model_len = self.memory_plan.max_model_len
        self.model_config: ModelConfig = msgspec.structs.replace(
            settings, max_model_len=max_model_len
        )
        """The model's settings, with the `max_model_len` that came out."""
        self.input_processor = InputProcessor(settings, self.spec, self.tokenizer, max_model_len)
        self._request_ids = itertools.count()
        self.inboxes: dict[str, list[RequestOutput | OctavoError]] = {}
        """What came for each live request of `start` and has not been taken yet."""
        self._added: set[str] = set()
        """Unfinished requests of `add_request`."""
        self._outputs: list[RequestOutput] = []
        """What came for these and has not been returned by `step` yet."""
        self._running = True

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """An engine of vLLM's settings.

        Raises:
            ConfigError, ModelError, HubError: if settings, model folder or download are bad.
        """
        config = engine_args.create_engine_config()
        return cls(config, log_stats=not engine_args.disable_log_stats)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Adds a request, whose outputs `step` will return.

        Args:
            request_id: unique among the live requests.
            prompt: text, token ids, or a dict with one of them.
            params: what is asked; not changed.
            arrival_time: seconds since 1970; default: now.
            lora_request: adapters are not supported.
            tokenization_kwargs: `truncate_prompt_tokens` and `add_special_tokens`.
            trace_headers: traces are not supported.
            priority: smaller is served earlier (with `scheduling_policy=priority`).

        Returns:
            The id.

        Raises:
            RequestError: the request is bad, or its id is in use.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is not a string.", "request_id")
        refuse_unsupported(lora_request=lora_request, trace_headers=trace_headers)
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
            )
            self._hand_in(request, params, text)
            self._added.add(request_id)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Runs a step; returns the outputs that there are of requests of `add_request`.

        A request that fails by itself has an answer with `finish_reason` "error" and the reason as
        `stop_reason`.

        Raises:
            SleepError: the engine sleeps, and there is nothing to return.
        """
        if self._added and not self._outputs:
            with late_interrupts():
                self.advance()
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to return."""
        return bool(self._added or self._outputs)

    def get_num_unfinished_requests(self) -> int:
        """Live requests; the n answers of a request count n times."""
        return self._output_processor.num_unfinished_requests

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests of `add_request`: nothing more comes of them. Ignores unknown ids."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ids = [i for i in ids if i in self._added]
        with late_interrupts():
            self._abort(ids)
            self._added.difference_update(ids)
            self._outputs = [o for o in self._outputs if o.request_id not in ids]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UnsupportedError: if the engine was made with skip_tokenizer_init.
        """
        return require_tokenizer(self.tokenizer)

    def get_metrics(self) -> list[Metric]:
        """All metrics as they are now.

        Raises:
            UnsupportedError: if the engine was made without them.
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
        """Calls a method of each worker, on its thread, between two steps.

        Args:
            method: its name, or a function that gets the worker before the other arguments.
            timeout: seconds to wait; None: no limit.
            args: what the method gets.
            kwargs: likewise, by name.

        Returns:
            What each worker returned; there is one.

        Raises:
            TimeoutError: it took longer than `timeout`.
            UnsupportedError: workers have no such method; or they are in other processes, and
                something cannot travel there or back, such as a function.
        """
        if not isinstance(self.client, InprocClient):
            raise UnsupportedError(
                "The workers are in other processes (isolate=True, or data_parallel_size > 1); "
                "leave these out to call them."
            )
        return self.client.core.executor.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Calls a function with the model of each worker: an `octavo.models.base.Model`."""
        return self.collective_rpc(lambda worker: func(worker.runner.model))

    @property
    def engine_core(self) -> LLMEngine:
        """Where scripts for vLLM find `save_sharded_state`."""
        return self

    def save_sharded_state(
        self, path: str | Path, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Save the weights in vLLM's sharded form, which `load_format=sharded_state` reads.

        There are files for each of `tensor_parallel_size` ranks, as vLLM divides the model among
        them. Config and tokenizer are not copied.

        Args:
            path: the folder to write to.
            pattern: must be None, or vLLM's own: model-rank-{rank}-part-{part}.safetensors.
            max_size: most bytes of a file; None: no limit.

        Raises:
            ConfigError: the folder holds such files already, or cannot be written to.
            UnsupportedError: settings or the model do not allow it.
        """
        from octavo.models.sharded_save import save_sharded_state  # brings torch

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
                "leave them out, and give them when the saved weights are loaded."
            )
        save_sharded_state(
            self.spec,
            self._checkpoint,
            Path(path),
            dtype=resolve_dtype(config, self.spec),
            size=config.device.tensor_parallel_size,
            max_size=max_size,
        )

    def stats(self) -> SchedulerStats:
        """State and counters of the scheduler and the KV cache."""
        return msgspec.convert(complete(self.client.call_utility("stats")), SchedulerStats)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets all cached prefixes; see `LLM.reset_prefix_cache`."""
        what = reset_running_requests, reset_connector
        return bool(complete(self.client.call_utility("reset_prefix_cache", *what)))

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Computes nothing more until `wake_up`, and gives memory back to the system.

        Requests that are added meanwhile wait.

        Args:
            level: 0 only pauses the engine; 1 gives the memory of weights and KV cache back; 2 is
                1, but `wake_up` takes the weights that the model's folder has by then.
            mode: what becomes of unfinished requests: abort ends them with what they have
                (`finish_reason` "abort"), wait finishes them first, keep lets them go on later.

        Raises:
            RequestError: level or mode is unknown.
            SleepError: the engine was made without `enable_sleep_mode`, and level is not 0.
        """
        with late_interrupts() as interrupts:
            while not complete(self.client.call_utility("sleep", level, mode)):
                self.advance()
                interrupts.raise_now()
        self._record_sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Takes memory up again, and goes on.

        Args:
            tags: what of "weights", "kv_cache" and "scheduling"; None: all.

        Returns:
            Whether the engine is awake: no part of it sleeps.

        Raises:
            RequestError: a tag is unknown.
            SleepError: others have the memory; it sleeps on.
            ModelError: the weights cannot be read, or at level 1 have changed; likewise.
        """
        awake = bool(complete(self.client.call_utility("wake_up", tags)))
        if awake:
            self._record_sleep(None)
        return awake

    def is_sleeping(self) -> bool:
        """Whether it sleeps, at any level."""
        return bool(complete(self.client.call_utility("is_sleeping")))

    def _record_sleep(self, level: int | None) -> None:
        if self._metrics is not None:
            for index in range(self.config.parallel.data_parallel_size):
                self._metrics.for_engine(index).record_sleep_state(level)

    def start_profile(self) -> None:
        """Begins to record spans of steps and kernels; needs `profiler_dir`.

        Raises:
            ProfilerError: there is no `profiler_dir`, or a profile is being recorded already.
        """
        complete(self.client.call_utility("start_profile"))

    def stop_profile(self) -> str:
        """Ends the profile; returns the Chrome trace's file.

        Raises:
            ProfilerError: no profile is being recorded, or it cannot be written.
        """
        return str(complete(self.client.call_utility("stop_profile")))

    def shutdown(self) -> None:
        """Ends the workers and frees their memory. May be called twice."""
        self._running = False
        complete(self.client.shutdown())

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        add_special_tokens: bool = True,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Return the core request of a prompt, and its text; see `InputProcessor.process`."""
        if request_id is None:
            ids = map(str, self._request_ids)
            request_id = next(i for i in ids if i not in self._added)
        return self.input_processor.process(
            request_id,
            prompt,
            params,
            RequestOptions(clock.now() if arrival_time is None else arrival_time),
            add_special_tokens=add_special_tokens,
        )

    def start(self, request: EngineCoreRequest, params: SamplingParams, text: str | None) -> str:
        """Hands in a request whose outputs go to `inboxes`; returns its id.

        Ctrl-C must not come meanwhile; nor in `advance` and `end`.
        """
        self._hand_in(request, params, text)
        self.inboxes[request.request_id] = []
        return request.request_id

    def advance(self) -> list[str]:
        """Runs a step; returns the ids of the requests that it brought something for."""
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
        """Forgets requests of `start`; those that still run are aborted."""
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
    """The result of a call of `InprocClient` or `IsolatedClient`, which never waits."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a call in process waits")


def failed_output(request_id: str, error: OctavoError) -> RequestOutput:
    """The output of a request that failed by itself: others of its batch are not lost."""
    logger.warning("request %s failed: %s", request_id, error)
    answer = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
    return RequestOutput(request_id, None, [], None, [answer], finished=True)
