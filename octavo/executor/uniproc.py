"""One worker in this process, on a thread of its own.

The thread lets the engine core schedule the next step while this one computes: the native kernels
run without the interpreter lock, and a GPU computes by itself. Where a step's tokens are still on
their way from a GPU, a second thread waits for them, so that the worker can launch the next step.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from octavo.executor.base import Executor
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import ModelRunnerOutput, SchedulerOutput
from octavo.worker.memory import DeviceMemory, Scratch
from octavo.worker.scratch import measure_scratch
from octavo.worker.setup import WorkerSetup
from octavo.worker.worker import Worker


class UniProcExecutor(Executor):
    """Runs the worker on one thread; the thread's queue keeps the steps in order."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._thread = ThreadPoolExecutor(1, "octavo-worker")
        self._results = ThreadPoolExecutor(1, "octavo-results")
        try:
            self._worker = self._thread.submit(Worker, setup).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    @staticmethod
    def measure_scratch(setup: WorkerSetup) -> Scratch:
        """See `Executor`."""
        return measure_scratch(setup)

    def measure_memory(self) -> DeviceMemory:
        """See `Executor`."""
        return self._thread.submit(self._worker.measure_memory).result()

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """See `Executor`."""
        self._thread.submit(self._worker.initialize_kv_cache, kv_cache).result()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """See `Executor`."""
        return self._thread.submit(self._execute_model, scheduler_output)

    def _execute_model(self, scheduler_output: SchedulerOutput) -> None:
        try:
            self._worker.execute_model(scheduler_output)
        except Exception as error:
            cause = self._worker.cause(error)
            if cause is error:
                raise
            raise cause from error

    def sample_tokens(self) -> Future[ModelRunnerOutput]:
        """See `Executor`."""
        future: Future[ModelRunnerOutput] = Future()
        self._thread.submit(self._sample_tokens, future)
        return future

    def _sample_tokens(self, future: Future[ModelRunnerOutput]) -> None:
        def resolve() -> None:
            try:
                future.set_result(pending.get())
            except BaseException as error:
                future.set_exception(self._worker.cause(error))

        try:
            pending = self._worker.sample_tokens()
            if not pending.ready():
                self._results.submit(resolve)
                return
        except BaseException as error:
            future.set_exception(self._worker.cause(error))
            return
        resolve()

    def shutdown(self) -> None:
        """See `Executor`."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._results.shutdown(wait=True)
        self._worker.shutdown()
