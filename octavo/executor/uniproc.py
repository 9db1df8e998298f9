"""One worker in a thread of this process.

The thread lets the engine core schedule the next step while this one computes: the native kernels
release the interpreter lock, and a GPU computes asynchronously. A second thread waits for tokens of
a step in transit from a GPU, so that the worker can launch the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from octavo.executor.base import Executor, Wave, find_method
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import (
    AdapterLoaded,
    GrammarOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from octavo.plan.memory import MemoryBudget
from octavo.plan.setup import WorkerSetup
from octavo.worker.expert_group import make_wave
from octavo.worker.model_runner import Drafts
from octavo.worker.platform import Platform
from octavo.worker.worker import Worker

T = TypeVar("T")


class UniProcExecutor(Executor):
    """Executor that runs the worker on one thread; the thread's queue keeps the steps in order.

    Raises:
        ConfigError, ModelError: the worker cannot start; see `Worker`.
    """

    def __init__(self, setup: WorkerSetup, platform: Platform) -> None:
        self.max_in_flight = setup.max_in_flight
        self._thread = ThreadPoolExecutor(1, "octavo-worker")
        self._results = ThreadPoolExecutor(1, "octavo-results")
        try:
            self._worker = self._thread.submit(Worker, setup, platform).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._wave = make_wave(setup)

    @property
    def wave(self) -> Wave | None:
        """Implement `Executor`."""
        return self._wave

    def measure_memory(self) -> MemoryBudget:
        """Implement `Executor`."""
        return self._thread.submit(self._worker.measure_memory).result()

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Implement `Executor`."""
        self._thread.submit(self._worker.initialize_kv_cache, kv_cache).result()

    def execute(self, work: SchedulerOutput) -> _UniProcStep:
        """Implement `Executor`."""
        return _UniProcStep(self._worker, self._thread, self._results, work)

    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Implement `Executor`."""
        worker = self._worker
        call = partial(method, worker) if callable(method) else find_method(worker, method)
        return [self._thread.submit(call, *args, **(kwargs or {})).result(timeout)]

    def register_transfer_callback(self, callback: Callable[[KVConnectorOutput], object]) -> None:
        """Implement `Executor`."""
        self._worker.register_transfer_callback(callback)

    def register_adapter_callback(self, callback: Callable[[AdapterLoaded], object]) -> None:
        """Implement `Executor`."""
        self._worker.register_adapter_callback(callback)

    def shutdown(self) -> None:
        """Implement `Executor`."""
        if self._wave is not None:
            self._wave.shutdown()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._results.shutdown(wait=True)
        self._worker.shutdown()


class _UniProcStep:
    """Implementation of `StepHandle`."""

    __slots__ = (
        *("_computed", "_drafts", "_failure", "_forward", "_grammar", "_lock", "_results"),
        *("_sampled", "_thread", "_wanted", "_worker"),
    )

    def __init__(
        self,
        worker: Worker,
        thread: ThreadPoolExecutor,
        results: ThreadPoolExecutor,
        work: SchedulerOutput,
    ) -> None:
        self._worker, self._thread, self._results = worker, thread, results
        self._sampled: Future[ModelRunnerOutput] = Future()
        self._drafts: SimpleQueue[Drafts | BaseException] = SimpleQueue()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        """Lock of the next three attributes."""
        self._computed = self._wanted = False
        self._grammar: GrammarOutput | None = None
        self._forward = thread.submit(self._execute, work)

    def _execute(self, work: SchedulerOutput) -> None:
        try:
            self._worker.execute_model(work, self._drafts.put)
        except BaseException as error:
            self._failure = error
            self._drafts.put(error)
        with self._lock:
            self._computed = True
            wanted = self._wanted
        if wanted:
            self._sample()

    def drafts(self) -> Drafts:
        """Implement `StepHandle`. Call this once."""
        drafts = self._drafts.get()
        if isinstance(drafts, BaseException):
            raise drafts
        return drafts

    def sample(self, grammar: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        with self._lock:
            self._wanted, self._grammar = True, grammar
            computed = self._computed
        if computed:  # otherwise the thread samples by itself, which avoids a slow handover
            self._thread.submit(self._sample)
        return self._sampled

    def _sample(self) -> None:
        try:
            pending = self._worker.sample_tokens(self._grammar)  # also for a step that failed
            if self._failure is not None:
                raise self._failure
            on_their_way = not pending.ready()
        except BaseException as error:
            self._sampled.set_exception(self._worker.cause(self._failure or error))
            return

        def resolve() -> None:
            try:
                self._sampled.set_result(pending.get())
            except BaseException as error:
                self._sampled.set_exception(self._worker.cause(error))

        if on_their_way:
            self._results.submit(resolve)
        else:
            resolve()
