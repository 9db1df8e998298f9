"""Processes under limits, which compute what data of strangers could make endless, huge or fatal.

Both sides are here. A `LimitedProcess` starts a module as a process when the first message is sent,
and starts another one when it has ended. The process calls `limit_memory` and `serve`: it answers
one message after the other, and its end is the end of its standard input, which is a socket. Too
much memory is an error that the process reports itself. Too much processor time ends it at any
point, in native code, too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

_LENGTH_BYTES = 8
_LARGE = 2**20
# Environment of the process: the pools of threads of BLAS libraries would reserve address space.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ProcessEndedError(Exception):
    """End of a process before its answer.

    Args:
        code: exit status, or minus the signal's number; -SIGPROF: too much processor time.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with status {code}")
        self.code = code


class LimitedProcess:
    """Process of a module, and the socket to it. Only one thread may use it at a time.

    Args:
        module: name of the module that `python -m` runs.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """Id of the process; None: none has been started, or it was ended."""
        return None if self._process is None else self._process.pid

    def exchange(
        self,
        message: Sequence[Buffer],
        arguments: Sequence[object],
        max_wait: float,
        max_answer: int = 2**63,
    ) -> memoryview:
        """Send a message and wait for its answer.

        A process that SIGKILL ends (which the kernel sends when the machine has no memory) is
        started once more.

        Args:
            message: parts of the message.
            arguments: arguments of the module, if the process must be started.
            max_wait: seconds to wait for the answer.
            max_answer: most bytes of an answer.

        Raises:
            TimeoutError: no answer arrived in time; the process was killed.
            ProcessEndedError: the process ended, or its answer was too long.
        """
        for last in (False, True):
            if self._stopped:
                raise ProcessEndedError(-signal.SIGKILL)
            connection = self._connect(arguments)
            connection.settimeout(max_wait)
            try:
                send(connection, *message)
                answer = receive(connection, max_answer)
            except TimeoutError:
                self.end()
                raise
            except OSError:
                answer = None
            if answer is not None:
                return answer
            code = self.end()
            if code != -signal.SIGKILL or last:
                break
        raise ProcessEndedError(code)

    def stop(self) -> None:
        """Kill the process, from any thread; this exchange and all later ones fail."""
        self._stopped, process = True, self._process
        if process is not None:
            process.kill()

    def end(self) -> int:
        """End the process; return its exit status, 0 if there is none."""
        if self._process is None or self._socket is None:
            return 0
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._process.kill()
        code = self._process.wait()
        self._process = self._socket = None
        return code

    def _connect(self, arguments: Sequence[object]) -> socket.socket:
        """Return the socket of a live process."""
        if self._process is not None and self._process.poll() is not None:
            self.end()
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module, *map(str, arguments)],
                    stdin=theirs.fileno(),
                    env=os.environ | _ONE_THREAD,
                    process_group=0,  # a Ctrl-C in the terminal is for the parent, from the start
                )
            # A thread always waits for the process, so it never stays a zombie.
            threading.Thread(target=self._process.wait, daemon=True).start()
        return self._socket


def limit_memory(max_nbytes: int) -> None:
    """Limit the address space of this process, and let only its parent stop it."""
    # The parent has started this process in a separate group, which a Ctrl-C in the terminal does
    # not reach while modules are imported.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_nbytes, max_nbytes))


def serve(
    answer: Callable[[memoryview], Sequence[Buffer]],
    on_memory_error: Callable[[], Sequence[Buffer]],
    max_seconds: float,
) -> None:
    """Answer messages from standard input until it ends.

    Args:
        answer: returns the parts of the answer to a message.
        on_memory_error: returns the parts of the answer if there was too little memory.
        max_seconds: processor time of one answer.
    """
    connection = socket.socket(fileno=sys.stdin.fileno())
    with contextlib.suppress(ConnectionError):  # the parent is gone, or waits no longer
        while (data := receive(connection)) is not None:
            # The timer's signal ends the process at any point.
            signal.setitimer(signal.ITIMER_PROF, max_seconds)
            try:
                parts = answer(data)
            except MemoryError:
                parts = on_memory_error()
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(connection, *parts)
            del data, parts  # the next message may need the memory


def send(connection: socket.socket, *parts: Buffer) -> None:
    """Send one message, which consists of all parts."""
    views = [memoryview(part).cast("B") for part in parts]
    connection.sendall(sum(view.nbytes for view in views).to_bytes(_LENGTH_BYTES, "little"))
    for view in views:
        connection.sendall(view)


def receive(connection: socket.socket, max_nbytes: int = 2**63) -> memoryview | None:
    """Return the next message; None at the end.

    Raises:
        TimeoutError: the socket has a timeout, and the message was not complete in that time.
        OSError: the message is longer than `max_nbytes`.
    """
    head = _receive_exactly(connection, _LENGTH_BYTES)
    if head is None:
        return None
    nbytes = int.from_bytes(head, "little")
    if nbytes > max_nbytes:
        raise OSError(f"a message of {nbytes} bytes")
    return _receive_exactly(connection, nbytes)


def _receive_exactly(connection: socket.socket, size: int) -> memoryview | None:
    timeout = connection.gettimeout()
    deadline = None if timeout is None else time.monotonic() + timeout
    # A large bytearray would be filled with zeros while other threads cannot run.
    view, got = memoryview(bytearray(size) if size < _LARGE else mmap.mmap(-1, size)), 0
    while got < size:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        count = connection.recv_into(view[got:])
        if not count:
            return None
        got += count
    return view
