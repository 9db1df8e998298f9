"""One worker in this process, on a thread of its own.

The thread lets the engine core schedule the next step while this one computes: the native kernels
run without the interpreter lock.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from octavo.executor.base import Executor
from octavo.messages import ModelRunnerOutput, SchedulerOutput
from octavo.worker.setup import WorkerSetup
from octavo.worker.worker import Worker


class UniProcExecutor(Executor):
    """Runs the worker on one thread; the thread's queue keeps the steps in order."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._thread = ThreadPoolExecutor(1, "octavo-worker")
        try:
            self._worker = self._thread.submit(Worker, setup).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """See `Executor`."""
        return self._thread.submit(self._worker.execute_model, scheduler_output)

    def sample_tokens(self) -> Future[ModelRunnerOutput]:
        """See `Executor`."""
        return self._thread.submit(self._worker.sample_tokens)

    def shutdown(self) -> None:
        """See `Executor`."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker.shutdown()
