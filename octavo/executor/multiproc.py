"""Workers in separate processes on this machine, like vLLM's `MultiprocExecutor`.

The submitting thread writes a step to shared memory at once, and every worker reads it there. Rank
0 writes the result to a separate queue. One thread starts the processes and watches them: results,
messages in their pipes, their ends, and stop signals.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from octavo.errors import (
    EngineDeadError,
    EngineStoppedError,
    OctavoError,
    StepLostError,
    UnsupportedError,
    signal_name,
)
from octavo.executor.base import Executor, Wave
from octavo.executor.message_queue import QueueClosedError, QueueReader, QueueWriter, make_queue
from octavo.executor.worker_messages import (
    LENGTH_NBYTES,
    UNENCODABLE,
    WARM,
    Call,
    Died,
    Drafted,
    Execute,
    FromWorker,
    ReadAdapter,
    Ready,
    Returned,
    Sample,
    Sampled,
    SetupMessage,
    StepFailed,
    ToWorker,
    Transferred,
    WorkerProcessSetup,
)
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
from octavo.system.device import is_stopped
from octavo.system.distributed import GroupMemory, Rank
from octavo.system.logs import current_logging
from octavo.worker.expert_group import LOST, ExpertWave, make_wave
from octavo.worker.platform import Platform

logger = logging.getLogger(__name__)

T = TypeVar("T")
Drafts = dict[str, list[int]]

# Interval of checks for stopped workers; a stop counts if two checks see it.
_CHECK_SECONDS = 0.25
_END_SECONDS = 5.0


class MultiprocExecutor(Executor):
    """Executor that runs each rank's worker in a separate process.

    Args:
        setup: parameters of the workers; each reads the models' specs from their folders again.
        platform: the device's platform; each worker makes its own from the settings.
        worker_cls: class of the workers as module.name; its constructor is that of `Worker`.

    Raises:
        ConfigError, ModelError: a worker cannot start; see `Worker`.
        EngineDeadError: a worker dies meanwhile.
        OSError: the system lacks resources for the processes.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        platform: Platform,
        *,
        worker_cls: str = "octavo.worker.worker.Worker",
    ) -> None:
        self.max_in_flight = setup.max_in_flight
        rank, memory = setup.rank, self._make_memory(setup)
        try:
            group = self._make_group(SetupMessage.of(setup), rank, worker_cls, memory)
        except BaseException:
            if memory is not None:
                os.close(memory)
            raise
        self._group = group
        # Ends the workers even if `shutdown` is never called.
        self._finalize = weakref.finalize(self, group.shutdown)
        self._wave: ExpertWave | None = None
        try:
            group.start()
            self._wave = make_wave(setup)
            if self._wave is not None and setup.rank.num_stages > 1:
                self._wave.watch_stages(group.lose)
        except BaseException:
            self.shutdown()
            raise

    @property
    def wave(self) -> Wave | None:
        """Implement `Executor`."""
        return self._wave

    def _make_memory(self, setup: WorkerSetup) -> int | None:
        """Return the descriptor of the workers' shared memory; None for a single worker."""
        if setup.rank.world_size == 1:
            return None
        return GroupMemory.create(setup.group_nbytes, setup.rank.num_stages)

    def _make_group(
        self, setup: SetupMessage, rank: Rank, worker_cls: str, memory: int | None
    ) -> WorkerGroup:
        return _ProcessGroup(setup, rank, worker_cls, memory)

    def measure_memory(self) -> MemoryBudget:
        """Implement `Executor`; return the budget of the worker with the least memory left."""
        answers: list[Any] = self.collective_rpc("measure_memory")
        found = [msgspec.convert(answer, MemoryBudget) for answer in answers]
        return min(found, key=lambda it: it.available - sum(item.nbytes for item in it.items))

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Implement `Executor`."""
        sizes = kv_cache.num_blocks, kv_cache.block_size, kv_cache.num_states
        self.collective_rpc("initialize_kv_cache", args=sizes)

    def execute(self, work: SchedulerOutput) -> _Step:
        """Implement `Executor`."""
        return self._group.execute(work)

    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Implement `Executor`; arguments and results are plain values of msgpack."""
        if callable(method):
            raise UnsupportedError(
                "A function cannot be sent to workers in other processes "
                f"(distributed_executor_backend={self._group.kind}); name a method of the worker, "
                "or set distributed_executor_backend=uni."
            )
        return self._group.call(method, timeout, list(args), dict(kwargs or {}))

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._group.workers]

    def register_failure_callback(self, callback: Callable[[Exception], object]) -> None:
        """Implement `Executor`."""
        self._group.register(callback)

    def register_transfer_callback(self, callback: Callable[[KVConnectorOutput], object]) -> None:
        """Implement `Executor`."""
        self._group.register_transfers(callback)

    def register_adapter_callback(self, callback: Callable[[AdapterLoaded], object]) -> None:
        """Implement `Executor`."""
        self._group.on_adapter = callback

    def shutdown(self) -> None:
        """Implement `Executor`."""
        if self._wave is not None:
            self._wave.shutdown()
        self._finalize()


class _Step:
    """Implementation of `StepHandle`."""

    __slots__ = ("_group", "_number", "drafted", "sampled")

    def __init__(self, group: WorkerGroup, number: int, *, drafting: bool) -> None:
        self._group, self._number = group, number
        self.drafted: Future[Drafts] = Future()
        """Drafts; workers only send them for steps with placeholders of drafts."""
        self.sampled: Future[ModelRunnerOutput] = Future()
        if not drafting:
            self.drafted.set_result({})

    def drafts(self) -> Drafts:
        return self.drafted.result()

    def sample(self, grammar: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        self._group.write(Sample(self._number, grammar))
        return self.sampled


class _Process:
    """Process that waits for its setup. It ends with the thread that started it.

    Args:
        warm: True to import slow modules meanwhile.

    Raises:
        OSError: the system lacks resources for the process.
    """

    def __init__(self, *, warm: bool = False) -> None:
        self.inputs, theirs = socket.socketpair()
        try:
            command = [sys.executable, "-m", "octavo.executor.worker_process", str(os.getpid())]
            self.popen = subprocess.Popen(
                [*command, *([WARM] if warm else [])],
                stdin=theirs.fileno(),
                process_group=0,  # a Ctrl-C in the terminal is for the parent
            )
        except BaseException:
            self.inputs.close()
            raise
        finally:
            theirs.close()

    def start(self, setup: WorkerProcessSetup) -> None:
        """Send the setup, so that the process loads the model. Call this once."""
        data = msgspec.msgpack.encode(setup)
        # If the child has died already, the watching thread finds its end.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            size = len(data).to_bytes(LENGTH_NBYTES, "little")
            socket.send_fds(self.inputs, [size], setup.descriptors)
            self.inputs.sendall(data)

    def kill(self) -> None:
        """Kill the process, whatever it does, and release its resources."""
        self.popen.kill()
        self.popen.wait()
        self.inputs.close()


_spares: list[_Process] = []


def make_spares(count: int) -> None:
    """Start spare processes, so that later executors need not wait for a start.

    Call this in a thread that lives as long as this process.

    Raises:
        OSError: the system lacks resources for them.
    """
    _spares.extend(_Process(warm=True) for _ in range(count))


def _take_process() -> _Process:
    """Return a spare process, or start one."""
    while _spares:
        process = _spares.pop()
        if process.popen.poll() is None and not is_stopped(process.popen.pid):
            return process
        process.kill()
    return _Process()


class _Worker:
    """Worker's process, and the pipe for its rare messages."""

    def __init__(self, rank: int, process: _Process, pipe: int) -> None:
        self.rank, self.pipe = rank, pipe
        self.process, self.inputs = process.popen, process.inputs
        self.pid = self.process.pid
        self.ready: Future[None] = Future()
        self.pidfd = os.pidfd_open(self.process.pid)
        self.stopped = False
        """True if the last check found it stopped."""
        self._received = b""
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        os.set_blocking(pipe, False)

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self.process.pid})"

    def receive(self) -> tuple[list[FromWorker], bool]:
        """Return the new messages, and True if the pipe is still open."""
        opened = True
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 2**16):
                self._received += data
            opened = False
        messages: list[FromWorker] = []
        while len(self._received) >= LENGTH_NBYTES:
            size = int.from_bytes(self._received[:LENGTH_NBYTES], "little") + LENGTH_NBYTES
            if len(self._received) < size:
                break
            messages.append(self._decoder.decode(self._received[LENGTH_NBYTES:size]))
            self._received = self._received[size:]
        return messages, opened

    def describe_exit(self) -> str:
        """Describe the end of the process, after it."""
        code = self.process.wait()
        if code >= 0:
            return f"{self} ended with status {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"{self} was killed by {signal_name(-code)}{hint}"

    def close(self) -> None:
        """Close the descriptors, after the end of the process."""
        os.close(self.pipe)
        os.close(self.pidfd)


class WorkerGroup(ABC):
    """Workers, their unanswered messages, and the thread that watches them.

    It has no reference to the executor, which may be garbage-collected without `shutdown`.
    """

    kind: str
    """Value of `distributed_executor_backend`."""

    def __init__(
        self, setup: SetupMessage, rank: Rank, worker_cls: str, memory: int | None
    ) -> None:
        self._setup, self._world_size, self._worker_cls = setup, rank.world_size, worker_cls
        self._teller = rank.world_size - rank.size
        """Rank that samples; it reports the results of all."""
        self._memory, self._num_stages = memory, rank.num_stages
        """Descriptor of the workers' shared memory, in addition to the queues."""
        self.workers: list[Any] = []
        """Workers by rank; each has `rank`, `pid` and `ready`, and a text that names it."""
        self._encoder = msgspec.msgpack.Encoder()
        self._started: Future[None] = Future()
        self._lock = threading.Lock()
        """Lock of the attributes below."""
        self._failure: Exception | None = None
        self._ending = False
        self._callbacks: list[Callable[[Exception], object]] = []
        self._on_transfer: Callable[[KVConnectorOutput], object] = lambda output: None
        self.on_adapter: Callable[[AdapterLoaded], object] = lambda loaded: None
        """Callback of `Executor.register_adapter_callback`."""
        self._steps: dict[int, _Step] = {}
        self._num_steps = 0
        self._calls: dict[int, list[Future[Any]]] = {}
        self._call_ids = itertools.count()
        # The system ends the processes that this thread starts together with it.
        self._thread = threading.Thread(target=self._watch, name="octavo-workers", daemon=True)

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers: request their end, and kill them after some seconds."""

    def _end_waiting(self) -> None:
        """Wake workers that wait for each other, so that each can end independently."""
        if self._memory is not None:
            GroupMemory.end(self._memory, self._num_stages)

    @abstractmethod
    def _watch(self) -> None:
        """Run the thread: start the workers, resolve `_started`, and process their messages."""

    @abstractmethod
    def _send(self, data: bytes) -> None:
        """Send a message to all workers.

        Raises:
            QueueClosedError: the workers have ended.
        """

    @abstractmethod
    def _kill(self) -> None:
        """Kill the workers at once."""

    def start(self) -> None:
        """Start the processes; return when all of them are ready."""
        self._thread.start()
        self._started.result()
        for worker in self.workers:
            worker.ready.result()

    def execute(self, work: SchedulerOutput) -> _Step:
        """Submit a step."""
        drafting = any(request.num_drafts for request in work.scheduled_reqs)
        with self._lock:
            self._num_steps = number = self._num_steps + 1
            self._steps[number] = step = _Step(self, number, drafting=drafting)
        self.write(Execute(number, work))
        return step

    def call(
        self, method: str, timeout: float | None, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call a method of each worker."""
        futures: list[Future[Any]] = [Future() for _ in range(self._world_size)]
        call_id = next(self._call_ids)
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._calls[call_id] = futures
        try:
            self.write(Call(call_id, method, args, kwargs))
            return [
                future.result(None if end is None else max(0.0, end - time.monotonic()))
                for future in futures
            ]
        finally:
            with self._lock:
                del self._calls[call_id]

    def write(self, message: ToWorker) -> None:
        """Send a message to all workers.

        Raises:
            EngineDeadError: the workers have ended.
            UnsupportedError: the message cannot be encoded.
        """
        try:
            data = self._encoder.encode(message)
        except UNENCODABLE as error:
            raise UnsupportedError(
                f"This cannot be sent to workers in other processes ({error}); pass plain values, "
                "or set distributed_executor_backend=uni."
            ) from error
        try:
            self._send(data)
        except QueueClosedError:
            raise self._failure or EngineDeadError("The workers have been shut down.") from None

    def register(self, callback: Callable[[Exception], object]) -> None:
        """Implement `Executor.register_failure_callback`."""
        with self._lock:
            self._callbacks.append(callback)
            failure = self._failure
        if failure is not None:
            callback(failure)

    def register_transfers(self, callback: Callable[[KVConnectorOutput], object]) -> None:
        """Implement `Executor.register_transfer_callback`."""
        self._on_transfer = callback

    def _take(self, worker: Any, message: FromWorker) -> None:
        """Process a worker's message."""
        if self._failure is not None:
            return
        match message:
            case Sampled(step=number, output=output):
                self._pop(number).sampled.set_result(output)
            case Drafted(step=number, drafts=drafts, failure=failure):
                drafted = self._steps[number].drafted
                if failure is None:
                    drafted.set_result(drafts)
                else:
                    drafted.set_exception(failure.to_exception())
            case StepFailed(step=number, failure=failure) if (
                self._world_size == 1 or failure.kind == StepLostError.__name__
            ):
                self._pop(number).sampled.set_exception(failure.to_exception())
            case StepFailed(failure=failure) if failure.kind == EngineStoppedError.__name__:
                self._fail(f"{worker} ended: {failure.message}", EngineStoppedError)
            case StepFailed(step=number, failure=failure):
                # It is unknown if the other workers computed the step or wait for this one.
                self._fail(f"{worker} failed in step {number}: {failure}")
            case Ready():
                worker.ready.set_result(None)
            case Transferred(output=output):
                self._on_transfer(output)
            case ReadAdapter(loaded=loaded):
                self.on_adapter(loaded)
            case Died(failure=failure):
                if worker.ready.done():
                    self._fail(f"{worker} failed: {failure}")
                else:
                    error = failure.to_exception()
                    if not isinstance(error, OctavoError):
                        error = EngineDeadError(f"{worker} could not start: {failure}")
                    self._give_up(error)
            case Returned(call_id=call_id, value=value, failure=failure):
                with self._lock:
                    futures = self._calls.get(call_id)
                if futures is None:
                    return  # the caller has timed out
                if failure is None:
                    futures[worker.rank].set_result(value)
                else:
                    futures[worker.rank].set_exception(failure.to_exception())

    def lose(self) -> None:
        """Fail the engine, since its stages cannot go on after the death of another engine."""
        self._fail(LOST, EngineStoppedError)

    def _pop(self, number: int) -> _Step:
        with self._lock:
            return self._steps.pop(number)

    def _fail(self, what: str, kind: type[EngineDeadError] = EngineDeadError) -> None:
        """Fail the engine: notify all waiting callers once, and kill the other workers."""
        if self._num_steps:
            what += f"; the last submitted step was {self._num_steps}"
        self._give_up(kind(what))

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            if self._ending or self._failure is not None:
                return
            self._failure = error
            callbacks = list(self._callbacks)
        self._kill()
        self._resolve_all(error)
        for callback in callbacks:
            callback(error)

    def _resolve_all(self, error: Exception) -> None:
        """Fail all futures that wait for workers."""
        with self._lock:
            steps = list(self._steps.values())
            self._steps.clear()
            futures: list[Future[Any]] = [it for call in self._calls.values() for it in call]
        futures += [worker.ready for worker in self.workers]
        futures += [future for step in steps for future in (step.drafted, step.sampled)]
        for future in futures:
            if not future.done():
                future.set_exception(error)


class _ProcessGroup(WorkerGroup):
    """Workers in processes, which communicate by shared memory."""

    kind = "mp"
    workers: list[_Worker]

    def __init__(
        self, setup: SetupMessage, rank: Rank, worker_cls: str, memory: int | None
    ) -> None:
        super().__init__(setup, rank, worker_cls, memory)
        with contextlib.ExitStack() as undo:
            self._step_queue = make_queue(rank.world_size)
            undo.callback(self._step_queue.close)
            self._result_queue = make_queue(1)
            undo.pop_all()
        self._writer = QueueWriter(self._step_queue)
        self._results = QueueReader(self._result_queue)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def shutdown(self) -> None:
        with self._lock:
            self._ending = True
        self._writer.close()
        self._end_waiting()
        if self._thread.ident is not None:
            with contextlib.suppress(BaseException):
                self._started.result()  # the list of workers is complete
        end = time.monotonic() + _END_SECONDS
        for worker in self.workers:
            worker.inputs.close()
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._resolve_all(EngineDeadError("The workers have been shut down."))
        for worker in self.workers:
            worker.close()
        self._writer.release()
        self._results.release()
        for queue in (self._step_queue, self._result_queue):
            queue.close()
        os.close(self._wake)
        if self._memory is not None:
            os.close(self._memory)

    def _watch(self) -> None:
        try:
            for rank in range(self._world_size):
                self.workers.append(self._launch(rank))
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            self._watch_workers()
        except Exception as error:  # such as a message that cannot be decoded
            logger.exception("watching the workers failed")
            self._fail(f"watching the workers failed ({type(error).__name__}: {error})")

    def _launch(self, rank: int) -> _Worker:
        steps = self._step_queue.for_reader(rank)
        results = self._result_queue if rank == self._teller else None
        process = _take_process()
        try:
            pipe, end = os.pipe()
        except BaseException:
            process.kill()
            raise
        try:
            worker = _Worker(rank, process, pipe)
            level, log_format, log_fields = current_logging()
            process.start(
                WorkerProcessSetup(
                    self._setup,
                    self._worker_cls,
                    rank,
                    steps,
                    results,
                    end,
                    self._memory,
                    level,
                    log_format,
                    log_fields,
                )
            )
        except BaseException:
            process.kill()
            os.close(pipe)
            raise
        finally:
            os.close(end)
        return worker

    def _watch_workers(self) -> None:
        poll = select.poll()
        for fd in (self._wake, self._results.filled):
            poll.register(fd, select.POLLIN)
        pipes = {worker.pipe: worker for worker in self.workers}
        for worker in self.workers:
            poll.register(worker.pipe, select.POLLIN)
            poll.register(worker.pidfd, select.POLLIN)
        decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        checked = time.monotonic()
        while self._failure is None:
            ready = {fd for fd, _ in poll.poll(1000 * _CHECK_SECONDS)}
            if self._wake in ready:
                return
            while (data := self._results.try_read()) is not None:
                self._take(self.workers[self._teller], decoder.decode(data))
            for fd in ready & pipes.keys():
                messages, opened = pipes[fd].receive()
                for message in messages:
                    self._take(pipes[fd], message)
                if not opened:
                    poll.unregister(fd)
            for worker in self.workers:
                if worker.pidfd in ready:
                    poll.unregister(worker.pidfd)
                    for message in worker.receive()[0]:
                        self._take(worker, message)
                    self._fail(worker.describe_exit())
            if time.monotonic() - checked >= _CHECK_SECONDS:
                checked = time.monotonic()
                self._check_stopped()

    def _check_stopped(self) -> None:
        for worker in self.workers:
            stopped = is_stopped(worker.process.pid)
            if stopped and worker.stopped:
                self._fail(
                    f"{worker} is stopped by a signal such as SIGSTOP, and was killed",
                    EngineStoppedError,
                )
            worker.stopped = stopped

    def _send(self, data: bytes) -> None:
        self._writer.write(data)

    def _kill(self) -> None:
        self._writer.close()
        for worker in self.workers:
            worker.process.kill()
