"""The engine core: the one place where scheduler, executor and KV cache are put together."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

from octavo.config import EngineConfig
from octavo.device import resident_memory, resolve_device, trim_memory
from octavo.engine.memory_plan import (
    make_memory_plan,
    resolve_dtype,
    resolve_max_model_len,
    resolve_max_num_batched_tokens,
)
from octavo.errors import EngineDeadError, ProfilerError, RequestError
from octavo.executor.base import get_executor_class
from octavo.kv_cache.hashing import make_block_hasher
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from octavo.models.spec import ModelSpec
from octavo.models.weight_cache import read_ahead
from octavo.profiler import Profiler, span
from octavo.request import RequestStatus, fan_out
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.setup import WorkerSetup

logger = logging.getLogger(__name__)

_Step = tuple[int, SchedulerOutput, Future[None], Future[ModelRunnerOutput]]
"""Its number, from 1; its work; the forward pass; the sampled tokens."""


class EngineCore:
    """Takes checked requests, runs steps, gives token ids.

    Args:
        config: the settings.
        model_path: the model's folder.
        default_batched_tokens: token budget of a step where the config sets none.
        request_memory: bytes that a server's requests may take; None: there is no server.

    Raises:
        ConfigError: if the memory does not suffice or settings do not fit the model.
        ModelError: if the model folder cannot be used.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        default_batched_tokens: int,
        request_memory: int | None = None,
    ) -> None:
        self.config = config
        directory = config.observability.profiler_dir
        self._profiler = None if directory is None else Profiler(directory)
        self.spec = ModelSpec.from_folder(
            model_path, trust_remote_code=config.model.trust_remote_code
        )
        budget = resolve_max_num_batched_tokens(
            config, default_batched_tokens, self.spec.max_model_len
        )
        setup = WorkerSetup(
            config=config,
            spec=self.spec,
            model_path=model_path,
            dtype=resolve_dtype(config, self.spec),
            max_model_len=resolve_max_model_len(config, self.spec),
            max_num_batched_tokens=budget,
        )
        started = time.monotonic()
        executor_class = get_executor_class(config)
        plan = partial(make_memory_plan, config, self.spec, max_num_batched_tokens=budget)
        # While torch is imported, below.
        read_ahead(config, self.spec, model_path, setup.dtype)
        on_cpu = resolve_device(config.device.device) == "cpu"
        if on_cpu:  # what does not fit is refused before anything is loaded
            scratch = executor_class.measure_scratch(setup)
            self.plan, kv_cache = plan(measured=scratch, request_memory=request_memory)
            self._log_plan()
            setup = replace(setup, max_model_len=self.plan.max_model_len, scratch=scratch)
        self.executor = executor_class(setup)
        if not on_cpu:
            self.plan, kv_cache = plan(measured=self.executor.measure_memory())
            self._log_plan()
        self.executor.initialize_kv_cache(kv_cache)
        self.max_model_len = self.plan.max_model_len
        self._block_hasher = make_block_hasher(config.cache.block_size)
        self.scheduler = Scheduler(
            config.scheduler,
            kv_cache,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=budget,
            enable_caching=config.cache.enable_prefix_caching,
        )
        logger.info("model ready in %.2f s", time.monotonic() - started)
        resident = resident_memory()
        if resident is not None and on_cpu:
            logger.info("%s", self.plan.compare(resident))
        # With two steps in flight, the next one is scheduled while the current one computes.
        self._max_in_flight = 2 if config.scheduler.async_scheduling else 1
        self._in_flight: deque[_Step] = deque()
        self._num_scheduled = 0
        self._refused: list[EngineCoreOutput] = []

    def _log_plan(self) -> None:
        for line in self.plan.report().splitlines():
            logger.info("%s", line)

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queues the n requests of a core request; what can never be served gets an error."""
        enabled = self.config.cache.enable_prefix_caching
        requests = fan_out(core_request, self._block_hasher, enable_prefix_caching=enabled)
        try:
            for request in requests:
                self.scheduler.add_request(request)
        except RequestError as error:  # as true of its siblings: the front end ends them all
            self._refused.append(
                EngineCoreOutput(
                    request.request_id,
                    [],
                    finish_reason=FinishReason.ERROR,
                    error=error.message,
                    error_kind=type(error).__name__,
                )
            )

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests, in whatever state they are; unknown ones are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def has_work(self) -> bool:
        """Whether `step` would do or bring anything."""
        return bool(self._in_flight or self._refused or self.scheduler.has_requests())

    def has_unfinished_requests(self) -> bool:
        """Whether any request still waits for tokens."""
        return bool(self._refused) or self.scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Schedules as far ahead as allowed, then takes in the oldest step's result.

        A step that fails as a whole fails the requests in it; the engine goes on.
        """
        while len(self._in_flight) < self._max_in_flight and self.scheduler.has_requests():
            self._num_scheduled += 1
            with span("schedule") as note:
                work = self.scheduler.schedule()
                note(
                    step=self._num_scheduled,
                    requests=len(work.scheduled_reqs),
                    tokens=work.total_num_scheduled_tokens,
                )
            forward = self.executor.execute_model(work)
            sampled = self.executor.sample_tokens()
            self._in_flight.append((self._num_scheduled, work, forward, sampled))
        outputs: list[EngineCoreOutput] = []
        if self._in_flight:
            number, work, forward, sampled = self._in_flight[0]
            try:
                with span("wait") as note:
                    note(step=number)
                    sampled.exception()  # waits for the whole step: one wake-up, not two
                    forward.result()  # its failure is the cause of what sampling would report
                    result = sampled.result()
            except EngineDeadError:
                raise
            except Exception as error:
                logger.exception("a step failed, and its requests with it")
                message = f"The step failed: {type(error).__name__}: {error}"
                outputs = self.scheduler.fail_step(work, message)
            else:
                with span("update_from_output") as note:
                    note(step=number, requests=len(work.scheduled_reqs))
                    outputs = self.scheduler.update_from_output(work, result)
            # Not before: an interrupt (Ctrl-C) while waiting must not lose the step.
            self._in_flight.popleft()
        outputs += self._refused
        self._refused = []
        return EngineCoreOutputs(outputs, self.scheduler.make_stats(), time.monotonic())

    def stats(self) -> SchedulerStats:
        """State and counters of the scheduler."""
        return self.scheduler.make_stats()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False if running requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def trim_memory(self) -> None:
        """Gives memory that was freed back to the system."""
        trim_memory()

    def check_integrity(self) -> None:
        """Checks the scheduler's and the cache's books.

        Raises:
            AssertionError: with what does not add up.
        """
        self.scheduler.check_integrity()

    def start_profile(self) -> None:
        """Begins to record spans of steps and kernels.

        Raises:
            ProfilerError: profiles are off, or one is being recorded.
        """
        profiler = self._get_profiler()
        self._wait_for_steps()
        profiler.start()
        logger.info("recording a profile")

    def stop_profile(self) -> str:
        """Ends the profile; returns the path of the Chrome trace.

        Raises:
            ProfilerError: profiles are off, none is being recorded, or it cannot be written.
        """
        profiler = self._get_profiler()
        self._wait_for_steps()
        return str(profiler.stop())

    def _get_profiler(self) -> Profiler:
        if self._profiler is None:
            raise ProfilerError(
                "Profiles are off; start the engine with --profiler-dir DIR (profiler_dir=...)."
            )
        return self._profiler

    def _wait_for_steps(self) -> None:
        """Lets the workers finish what they have, so that a profile holds whole steps only."""
        wait([sampled for *_, sampled in self._in_flight])

    def shutdown(self) -> None:
        """Ends the workers and frees their memory. May be called twice."""
        if self._profiler is not None and self._profiler.recording:
            self.stop_profile()
        self._in_flight.clear()
        self.executor.shutdown()
