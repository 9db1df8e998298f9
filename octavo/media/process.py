"""Helper processes in which libraries read untrusted files: the code of both sides.

Libraries that decode sounds and pictures are native code. A file may make them compute for hours,
use all memory, crash, or open other files and addresses. So only a helper process loads them. It
runs one job at a time within limits of memory, processor time and output. After its start it can
open no file and no socket (RLIMIT_NOFILE). A job that breaks a limit, or crashes the process, fails
alone: the next one gets a new process.

A *module of jobs* imports the library, and has

    JOBS: Mapping[str, Job]

with the functions that the process offers by name. A function `prepare(text)` may import what
depends on a text that the process is started with. The module must import all that its jobs need,
since nothing can be imported later; also text encodings such as `encodings.latin_1`. A module of
jobs is imported by helper processes only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import OctavoError, QueueFullError, RequestError, UnsupportedError, make_error
from octavo.system.limited_process import (
    Buffer,
    LimitedProcess,
    ProcessEndedError,
    limit_memory,
    serve,
)

Array: TypeAlias = NDArray[Any]
T = TypeVar("T")
NUM_PROCESSES = 2 if len(os.sched_getaffinity(0)) <= 2 else 3
"""Most helper processes of a module of jobs. A sender may use all but one of them, which the
others have; so it also leaves one of two cores to them."""
Result: TypeAlias = tuple[Any, list[Array]]
"""Value and arrays of a job."""
Job: TypeAlias = Callable[[Any, list[memoryview]], tuple[Any, Sequence[Array]]]
"""Function of a helper process: (arguments, files) -> (value, arrays).

Arguments and value are of msgpack's types: None, bool, int, float, str, bytes, list, dict. An error
of the file is a RequestError, whose message describes the file; its field is added later.
"""

_HEAD_BYTES = 4
# Added niceness (the nice value of POSIX) of a job that takes more than some seconds of processor
# time: beside a busy engine it gets a third of the time of a thread of the engine, so a flood of
# files delays texts little, and small files do not wait.
_NICENESS, _QUICK_SECONDS = 5, 0.02
# Bytes of an answer besides its arrays.
_MOST_VALUE_NBYTES = 2**22
_MOST_FILES = 32
# A job that waits for a busy machine, which has more urgent work, may take longer than one that
# computes: seconds, and multiple of the limit of the processor time.
_PATIENCE, _WAIT_FACTOR = 10.0, 12.0


@dataclass(frozen=True)
class Limits:
    """Limits of one job."""

    seconds: float
    """Processor time."""
    nbytes: int
    """Address space of the process, which needs some 200 MiB of it when idle."""
    output_nbytes: int
    """Bytes of all arrays of an answer."""


class _Request(msgspec.Struct):
    job: str
    arguments: Any
    sizes: list[int]
    """Bytes of each file; they follow in this order."""


class _Answer(msgspec.Struct):
    value: Any = None
    arrays: list[tuple[str, list[int]]] = []
    """Dtype and shape of each array; the arrays follow in this order."""
    error: str | None = None
    error_kind: str | None = None
    """Name of the error's class in `octavo.errors`."""


class MediaProcesses:
    """Helper processes of one module of jobs; each starts when it is first needed.

    Args:
        module: name of the module of jobs.
        extra: optional dependencies of Octavo that it needs: `octavo[extra]`.
        limits: limits of each job.
        num_processes: most processes; more jobs wait for their turn.
        prepared: the text for the module's function `prepare`; None: it is not called.
    """

    def __init__(
        self,
        module: str,
        extra: str,
        limits: Limits,
        num_processes: int = NUM_PROCESSES,
        prepared: str | None = None,
    ) -> None:
        self.num_processes = num_processes
        """Most processes."""
        self._module, self._extra, self._limits = module, extra, limits
        self._prepared = [] if prepared is None else [prepared]
        self._closed = False
        self._threads = ThreadPoolExecutor(num_processes, f"octavo-{extra}")
        self._idle: queue.SimpleQueue[LimitedProcess] = queue.SimpleQueue()
        self._all = [LimitedProcess("octavo.media.process") for _ in range(num_processes)]
        for process in reversed(self._all):
            self._idle.put(process)

    def submit(
        self,
        job: str,
        files: Sequence[Buffer],
        arguments: Any = None,
        *,
        param: str,
        make: Callable[[Result], T],
    ) -> Future[T]:
        """Start a job. A canceled one that waits for its turn is dropped, with its files.

        Args:
            job: name of the job in `JOBS`.
            files: contents of the files.
            arguments: see `Job`.
            param: field of the request that has the files, for errors.
            make: makes the future's result from the job's, on a thread.

        The future's errors:
            RequestError: a file is wrong, or breaks a limit.
            QueueFullError: the machine has too little memory now.
            UnsupportedError: the library is not installed.
        """
        waiting = list(files)
        future = self._threads.submit(lambda: make(self._run(job, waiting, arguments, param)))
        # The executor keeps canceled jobs until their turn.
        future.add_done_callback(lambda _: waiting.clear())
        return future

    def close(self) -> None:
        """End the processes and their jobs; cancel jobs that wait."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.stop()
        self._threads.shutdown()
        for process in self._all:
            process.end()

    def _run(self, job: str, files: Sequence[Buffer], arguments: Any, param: str) -> Result:
        head = _encode_head(_Request(job, arguments, [len(memoryview(file)) for file in files]))
        process = self._idle.get()
        limits = self._limits
        max_wait = _PATIENCE + _WAIT_FACTOR * limits.seconds
        try:
            data = process.exchange(
                [*head, *files],
                [
                    *(self._module, self._extra),
                    *(limits.seconds, limits.nbytes, limits.output_nbytes),
                    *self._prepared,
                ],
                max_wait=max_wait,
                max_answer=limits.output_nbytes + _MOST_VALUE_NBYTES,
            )
        except TimeoutError:
            raise RequestError(
                f"{param} was given up: it was not read within {max_wait:g} s.",
                param,
            ) from None
        except ProcessEndedError as error:
            if self._closed:
                raise RequestError(f"{param} was not read: Octavo stops.", param) from None
            if error.code == -signal.SIGKILL:  # twice, which no file can cause
                raise QueueFullError(
                    f"{param} was not read: the system ended the process that read it, probably "
                    "since the machine has too little memory now; try again later."
                ) from None
            raise RequestError(_why_ended(error.code, param, limits), param) from None
        finally:
            self._idle.put(process)
        answer, body = _split_head(data, _Answer)
        if answer.error is not None:
            failure = make_error(answer.error_kind, answer.error)
            if isinstance(failure, RequestError):
                failure.param = param
            raise failure
        return answer.value, _split_arrays(answer.arrays, body)


def _why_ended(code: int, param: str, limits: Limits) -> str:
    if code == -signal.SIGPROF:
        return (
            f"{param} was given up: reading it takes more than {limits.seconds:g} s of processor "
            "time; send a smaller file."
        )
    return f"{param} cannot be read: the process that read it ended with status {code}."


def _encode_head(head: msgspec.Struct) -> list[bytes]:
    data = msgspec.msgpack.encode(head)
    return [len(data).to_bytes(_HEAD_BYTES, "little"), data]


def _split_head(data: memoryview, kind: type[Any]) -> tuple[Any, memoryview]:
    end = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "little")
    return msgspec.msgpack.decode(data[_HEAD_BYTES:end], type=kind), data[end:]


def _split_arrays(described: list[tuple[str, list[int]]], body: memoryview) -> list[Array]:
    arrays, begin = [], 0
    for dtype, shape in described:
        nbytes = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(body[begin : begin + nbytes], dtype).reshape(shape)
        arrays.append(array)
        begin += nbytes
    return arrays


def main() -> None:
    """Run jobs.

    Arguments: module of jobs, extra, seconds, bytes and output of the limits, text to prepare.
    """
    module, extra = sys.argv[1:3]
    limits = Limits(float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    limit_memory(limits.nbytes)
    try:
        imported = importlib.import_module(module)
        for text in sys.argv[6:]:
            imported.prepare(text)
        jobs: dict[str, Job] = imported.JOBS
    except ImportError as error:
        _refuse(extra, error)
        return
    _write_no_more_messages()
    _open_no_more_files()

    def answer(data: memoryview) -> list[Buffer]:
        request, body = _split_head(data, _Request)
        try:
            return _run_nicely(lambda: _do(jobs[request.job], request, body, limits))
        except OctavoError as error:
            return _failure(error)
        except MemoryError:
            raise
        except Exception as error:  # libraries raise anything
            return _failure(
                RequestError(f"The file cannot be read: {type(error).__name__}: {str(error)[:300]}")
            )

    def too_large() -> list[Buffer]:
        return _failure(
            RequestError(
                "The file was given up: reading it takes more than "
                f"{limits.nbytes // 2**20} MiB of memory; send a smaller one."
            )
        )

    serve(answer, too_large, limits.seconds)


def _run_nicely(function: Callable[[], T]) -> T:
    """Return the result of a function, which gets `_NICENESS` after `_QUICK_SECONDS`.

    Each call has a thread of its own, since niceness cannot be lowered again.
    """
    ended: Future[T] = Future()

    def work(ended: Future[T]) -> None:
        # The other thread waits for this signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGVTALRM])
        try:
            ended.set_result(function())
        except BaseException as error:
            ended.set_exception(error)
            del ended  # else the error keeps itself alive, and the memory of the job

    def make_nice(*_: object) -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, niceness)

    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    signal.signal(signal.SIGVTALRM, make_nice)
    thread.start()
    signal.setitimer(signal.ITIMER_VIRTUAL, _QUICK_SECONDS)
    try:
        return ended.result()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        del ended  # as in `work`


def _do(job: Job, request: _Request, body: memoryview, limits: Limits) -> list[Buffer]:
    files, begin = [], 0
    for size in request.sizes:
        files.append(body[begin : begin + size])
        begin += size
    value, arrays = job(request.arguments, files)
    nbytes = sum(array.nbytes for array in arrays)
    if nbytes > limits.output_nbytes:
        raise RequestError(
            f"The file was given up: its content has {nbytes} bytes, more than the limit of "
            f"{limits.output_nbytes}; send a smaller one."
        )
    described = [(array.dtype.str, list(array.shape)) for array in arrays]
    head = _encode_head(_Answer(value, described))
    # A memoryview of an empty array has no bytes to cast.
    return [*head, *(np.ascontiguousarray(a).data for a in arrays if a.size)]


def _failure(error: OctavoError) -> list[Buffer]:
    # A message may quote text that UTF-8 cannot express.
    message = str(error).encode("utf-8", "replace").decode()
    return [*_encode_head(_Answer(error=message, error_kind=type(error).__name__))]


def _refuse(extra: str, error: ImportError) -> None:
    """Answer every job with the error that the library is missing."""

    def answer(_: memoryview) -> list[Buffer]:
        return _failure(
            UnsupportedError(
                f"Such files cannot be read here ({error}); install octavo[{extra}], or leave them "
                "out."
            )
        )

    serve(answer, lambda: answer(memoryview(b"")), 1.0)


def _write_no_more_messages() -> None:
    """Drop what native decoders write about files to standard error, the log of the server."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stderr.fileno())


def _open_no_more_files() -> None:
    """Make every later attempt to open a file or a socket fail."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_FILES, _MOST_FILES))
    with contextlib.suppress(OSError):  # until all descriptors below the limit are in use
        while True:
            os.dup(0)


if __name__ == "__main__":
    main()
