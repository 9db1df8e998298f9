"""Worker in a separate process: see `MultiprocExecutor`.

The process receives its setup on standard input, a socket that also passes descriptors. It keeps
reading there: end of file makes it end. When the parent process ends, the system kills this
process, whatever it does.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo.errors import OctavoError, StepLostError, UnsupportedError
from octavo.executor.base import find_method, import_class
from octavo.executor.message_queue import QueueClosedError, QueueReader, QueueWriter
from octavo.executor.worker_messages import (
    LENGTH_NBYTES,
    MAX_DESCRIPTORS,
    UNENCODABLE,
    WARM,
    Call,
    Died,
    Drafted,
    Execute,
    Failure,
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
from octavo.plan.setup import WorkerSetup
from octavo.platforms.registry import get_platform
from octavo.system.device import SWITCH_INTERVAL, signal_at_parents_end
from octavo.system.distributed import Rank
from octavo.system.logs import setup_logging

if TYPE_CHECKING:
    from octavo.worker.model_runner import PendingOutput
    from octavo.worker.worker import Worker

logger = logging.getLogger(__name__)

# Time for a worker to end in order when requested.
_GRACE_SECONDS = 2.0


def main() -> None:
    """Run a worker until its input ends; the first argument is the pid of the parent process."""
    _die_with_parent(int(sys.argv[1]))
    # The parent decides when to stop; a Ctrl-C in the terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.argv[2:] == [WARM]:
        _import_class("octavo.worker.worker.Worker")
    inputs = socket.socket(fileno=sys.stdin.fileno())
    if (setup := _receive_setup(inputs)) is None:
        return  # a spare that was not needed
    steps, loaded = QueueReader(setup.steps), threading.Event()
    threading.Thread(target=_end_with_input, args=(inputs, steps, loaded), daemon=True).start()
    setup_logging(setup.log_level, setup.log_format, **{**setup.log_fields, "rank": setup.rank})
    sys.setswitchinterval(SWITCH_INTERVAL)
    pipe = _Pipe(setup.pipe)
    results = None if setup.results is None else QueueWriter(setup.results)
    number, group = setup.rank, setup.group
    fine = serve(setup.setup, setup.worker_cls, number, group, steps, results, pipe, loaded.set)
    # Threads that wait for standard input or a device must not keep a finished process alive.
    os._exit(0 if fine else 1)


class Steps(Protocol):
    """Source of a worker's messages."""

    def read(self) -> bytes:
        """Wait for the next message, and return it.

        Raises:
            QueueClosedError: the queue has ended.
        """
        ...


class Results(Protocol):
    """Destination of the results of steps."""

    def write(self, data: bytes, /) -> None:
        """Send an encoded message."""
        ...


class Rare(Protocol):
    """Destination of rare messages. Any thread may use it."""

    def write(self, message: FromWorker) -> None:
        """Send a message."""
        ...

    def write_encoded(self, data: bytes) -> None:
        """Send an encoded message."""
        ...


def serve(
    setup: SetupMessage,
    worker_cls: str,
    number: int,
    group: int | None,
    steps: Steps,
    results: Results | None,
    pipe: Rare,
    loaded: Callable[[], object] = lambda: None,
) -> bool:
    """Make a worker and process its messages until they end.

    Args:
        setup: parameters of the worker.
        worker_cls: class of the worker as module.name.
        number: index of the worker among all.
        group: the descriptor of the workers' memory.
        steps: source of the messages.
        results: destination of results, for the rank that answers.
        pipe: receives `Ready`, answers of calls, and errors that end the worker.
        loaded: called when the worker can end in order.

    Returns:
        True if the worker ended on request.
    """
    try:
        plain = setup.complete(Rank.of(number, setup.config.device), group)
        found = _import_class(worker_cls)
        worker: Worker = found(plain, get_platform(plain.config.device.device))
        if setup.config.cache.kv_transfer_config is not None:
            worker.register_transfer_callback(lambda output: pipe.write(Transferred(output)))
        if setup.config.lora.enable_lora:
            worker.register_adapter_callback(lambda loaded: pipe.write(ReadAdapter(loaded)))
        gc.freeze()  # excludes the present objects from collections
        loaded()
        pipe.write(Ready())
        _Loop(plain, worker, steps, results, pipe).run()
        worker.shutdown()
    except OctavoError as error:
        pipe.write(Died(Failure.of(error)))
        return False
    except BaseException as error:
        logger.exception("the worker failed")
        pipe.write(Died(Failure.of(error)))
        return False
    return True


class _Pipe:
    """Pipe of rare messages to the executor. Any thread may use it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()

    def write(self, message: FromWorker) -> None:
        """Send a message."""
        self.write_encoded(msgspec.msgpack.encode(message))

    def write_encoded(self, data: bytes) -> None:
        """Send an encoded message."""
        view = memoryview(len(data).to_bytes(LENGTH_NBYTES, "little") + data)
        with self._lock:
            while view:
                view = view[os.write(self._fd, view) :]


class _Loop:
    """Loop that processes the executor's messages in order."""

    def __init__(
        self,
        setup: WorkerSetup,
        worker: Worker,
        steps: Steps,
        results: Results | None,
        pipe: Rare,
    ) -> None:
        self._setup, self._worker = setup, worker
        self._steps, self._results, self._pipe = steps, results, pipe
        self._encoder = msgspec.msgpack.Encoder()
        self._failure: Exception | None = None
        """Exception of the forward pass of the current step."""
        self._late = ThreadPoolExecutor(1, "octavo-results")
        """Thread that waits for tokens from a device; the next step begins meanwhile."""

    def run(self) -> None:
        """Run until the queue is closed."""
        decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
        while True:
            try:
                data = self._steps.read()
            except QueueClosedError:
                return
            match decoder.decode(data):
                case Execute() as message:
                    self._execute(message)
                case Sample() as message:
                    self._sample(message)
                case Call() as message:
                    self._call(message)

    def _execute(self, message: Execute) -> None:
        drafting = any(request.num_drafts for request in message.work.scheduled_reqs)

        def announce(drafts: dict[str, list[int]], failure: Failure | None = None) -> None:
            nonlocal drafting
            if drafting:
                drafting = False
                self._answer(Drafted(message.step, drafts, failure))

        try:
            self._worker.execute_model(message.work, announce)
        except Exception as error:
            self._failure = error
            announce({}, Failure.of(error))

    def _sample(self, message: Sample) -> None:
        failure, self._failure = self._failure, None
        try:
            # Also releases a step that failed.
            pending = self._worker.sample_tokens(message.grammar)
            if failure is not None:
                raise failure
            ready = pending.ready()
        except Exception as error:
            self._fail(message.step, failure or error)
            return
        if ready:
            self._finish(message.step, pending)
        else:
            self._late.submit(self._finish, message.step, pending)

    def _finish(self, step: int, pending: PendingOutput) -> None:
        try:
            output = pending.get()
        except Exception as error:
            self._fail(step, error)
        else:
            self._answer(Sampled(step, output))

    def _fail(self, step: int, error: Exception) -> None:
        if isinstance(error, StepLostError) and self._results is None:
            return  # all ranks have lost the step, and one of them reports it
        message = StepFailed(step, Failure.of(self._worker.cause(error)))
        if self._results is None:
            self._pipe.write(message)
        else:
            self._answer(message)

    def _answer(self, message: FromWorker) -> None:
        """Send a message that every worker has, and one of them reports."""
        if self._results is not None:
            self._results.write(self._encoder.encode(message))

    def _call(self, call: Call) -> None:
        try:
            value = self._find(call.method)(*call.args, **call.kwargs)
            try:
                data = msgspec.msgpack.encode(Returned(call.call_id, value))
            except UNENCODABLE as error:
                raise UnsupportedError(
                    f"The result of {call.method} cannot be sent between processes ({error}); "
                    "return plain values, or set distributed_executor_backend=uni."
                ) from error
        except Exception as error:
            data = msgspec.msgpack.encode(Returned(call.call_id, failure=Failure.of(error)))
        self._pipe.write_encoded(data)

    def _find(self, method: str) -> Callable[..., Any]:
        if method == "initialize_kv_cache":
            return self._initialize_kv_cache
        return find_method(self._worker, method)

    def _initialize_kv_cache(self, num_blocks: int, block_size: int, num_states: int) -> None:
        groups = self._setup.kv_cache_groups
        self._worker.initialize_kv_cache(KVCacheConfig(num_blocks, block_size, groups, num_states))


def _die_with_parent(pid: int) -> None:
    """Have the system kill this process when the thread that started it ends."""
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != pid:  # the parent ended before
        os._exit(1)


def _import_class(path: str) -> Any:
    gc.disable()  # the imports create 200,000 permanent objects
    try:
        return import_class(path)
    finally:
        gc.enable()


def _receive_setup(inputs: socket.socket) -> WorkerProcessSetup | None:
    """Wait for the setup and the descriptors; return None if the input ends without them."""
    head, descriptors, _, _ = socket.recv_fds(inputs, LENGTH_NBYTES, MAX_DESCRIPTORS)
    if len(head) < LENGTH_NBYTES:
        return None
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < size:
        if not (more := inputs.recv(size - len(data))):
            return None
        data += more
    return msgspec.msgpack.decode(data, type=WorkerProcessSetup).received(descriptors)


def _end_with_input(inputs: socket.socket, steps: QueueReader, loaded: threading.Event) -> None:
    """End the process when standard input ends."""
    while inputs.recv(1):
        pass
    if not loaded.is_set():
        os._exit(1)  # nothing needs an orderly end yet
    steps.close()
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
