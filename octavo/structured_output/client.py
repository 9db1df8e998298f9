"""Engine's side of the grammar processes: start, message and kill them.

`process.py` is the processes' side and explains the design. A `GrammarHelper` is the process that
has loaded one grammar library. It forks a `GrammarProcess` for each grammar of each tenant.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Literal
from weakref import finalize

import msgspec

from octavo.messages import GrammarSpec
from octavo.system.device import private_memory, process_seconds

_LENGTH_BYTES = 8
_MOST_MESSAGE_NBYTES = 2**26
_FORK, _WAIT = b"f", b"w"
# The helper answers in milliseconds, unless the machine is very busy.
_HELPER_SECONDS = 10.0
PROCESS_NBYTES = 4 * 2**20
"""Memory that a forked process needs in addition to its grammars."""


class HelperSetup(msgspec.Struct):
    """Settings of a helper: the first message to it."""

    backend: str
    """Name of the backend."""
    folder: str
    """Folder of the tokenizer."""
    vocab_size: int
    """Width of the logits."""
    eos_token_ids: list[int]
    """Stop tokens of the model."""
    max_nbytes: int
    """Address space that compiling and matching one grammar may add."""
    tokenizer_mode: Literal["auto", "mistral"] = "auto"
    """Setting `tokenizer_mode`; see `Tokenizer.from_folder`."""


class Loaded(msgspec.Struct):
    """First answer of a helper: it is ready, or failed."""

    error: str | None = None
    error_kind: str | None = None
    """Name of the error's class in `octavo.errors`."""


class Compile(msgspec.Struct, tag=True):
    """Request to compile a grammar."""

    grammar: int
    """The grammar's number in the process."""
    spec: GrammarSpec


class Compiled(msgspec.Struct, tag=True):
    """Answer to `Compile`."""

    grammar: int
    error: str | None = None
    """Reason for which the grammar is rejected."""
    stop_token_ids: list[int] = []


class Feed(msgspec.Struct, tag=True):
    """Request to start a request that already has output."""

    key: int
    grammar: int
    token_ids: list[int]


class Fed(msgspec.Struct, tag=True):
    """Answer to `Feed`."""

    key: int
    num_accepted: int
    """Number of accepted tokens."""
    error: str | None = None


class MatchJob(msgspec.Struct, array_like=True):
    """One request's part of a step."""

    key: int
    grammar: int
    token_ids: list[int]
    """Output tokens that the process does not know yet."""
    drafts: list[int]
    num_forced: int
    """Number of requested forced tokens, counted from the last of `token_ids`."""


class Match(msgspec.Struct, array_like=True):
    """Requests of a step that share a grammar process."""

    jobs: list[MatchJob]
    ended: list[int]
    """Keys of requests that have ended."""


class Matched(msgspec.Struct, array_like=True):
    """Answer to a `MatchJob`. Rows of bitmasks follow all answers of a `Match`."""

    error: str | None
    seconds: float
    """Processor time."""
    forced: list[int]


class GrammarProcess:
    """Process that holds compiled grammars and matches them for the requests of one tenant.

    The compiler's thread uses `jobs`, the engine's thread uses `steps`.

    Attributes:
        num_grammars: number of grammars that were sent to it.
        live: keys of the requests that use it.
        known: keys that were sent to the process; only the engine's thread uses them.
        reason: reason for which Octavo killed it; None if Octavo did not.
    """

    def __init__(
        self,
        helper: GrammarHelper,
        tenant: str | None,
        pid: int,
        jobs: socket.socket,
        steps: socket.socket,
    ) -> None:
        self.helper, self.tenant, self.pid = helper, tenant, pid
        self.jobs, self.steps = jobs, steps
        self.num_grammars = 0
        self.stop_token_ids: frozenset[int] = frozenset()
        self.live: set[int] = set()
        self.known: set[int] = set()
        self.reason: str | None = None
        self.status: int | None = None
        """Exit status, as `subprocess` gives it; None if the process is alive or not reaped yet."""
        self._lock = threading.Lock()
        self._first_nbytes = private_memory(pid)
        # Two threads use the sockets; each may still use its socket when the other has finished.
        for end in (jobs, steps):
            finalize(self, end.close)

    @property
    def nbytes(self) -> int:
        """Estimate of its private memory: the growth since the fork, plus a constant."""
        return PROCESS_NBYTES + max(0, private_memory(self.pid) - self._first_nbytes)

    @property
    def seconds(self) -> float | None:
        """Processor time so far; None: unknown."""
        return process_seconds(self.pid)

    def kill(self, reason: str) -> None:
        """Kill the process.

        Args:
            reason: sentence about the grammar, which its requests receive.
        """
        with self._lock:
            if self.status is None:
                self.reason = self.reason or reason
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def close(self) -> int:
        """End the process and return its exit status, or -9 if the helper has ended."""
        with self._lock:
            if self.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self.status = self.helper.wait(self.pid)
                # The other thread may be about to use its socket, so no socket is closed.
                for end in (self.jobs, self.steps):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
            return self.status


class GrammarHelper:
    """Process that has loaded a grammar library and the tokenizer.

    Args:
        command: its command line.
        setup: settings of the helper.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, command: Sequence[str], setup: HelperSetup) -> None:
        # No library may start threads: a process with several cannot be forked safely.
        single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(single, "1")}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        # A thread always waits for the process, so it never stays a zombie.
        threading.Thread(target=self._process.wait, daemon=True).start()
        self._lock = threading.Lock()
        self._broken = False
        send(self.socket, msgspec.msgpack.encode(setup))

    @property
    def is_alive(self) -> bool:
        """True if the process is alive and answers."""
        return not self._broken and self._process.poll() is None

    def read_loaded(self) -> Loaded:
        """Wait for the helper's first answer and return it."""
        with contextlib.suppress(OSError):
            data = receive(self.socket)
            if data is not None:
                self.socket.settimeout(_HELPER_SECONDS)
                return msgspec.msgpack.decode(data, type=Loaded)
        return Loaded(f"the helper process ended with status {self._process.wait()}")

    def fork(self, tenant: str | None) -> GrammarProcess:
        """Return a new process, which waits for a grammar.

        Args:
            tenant: the only tenant with requests that may use it.

        Raises:
            OSError: the helper has ended, or the system cannot start another process.
        """
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        try:
            with theirs[0], theirs[1], self._lock:
                broken, self._broken = self._broken, True
                socket.send_fds(self.socket, [_FORK], [end.fileno() for end in theirs])
                self._broken = broken
                pid = self._read_number()
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            return GrammarProcess(self, tenant, pid, *ours)
        except OSError:
            for end in ours:
                end.close()
            raise

    def wait(self, pid: int) -> int:
        """Return the exit status of a forked process; wait for its end."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(_WAIT + pid.to_bytes(_LENGTH_BYTES, "little"))
            return self._read_number()
        return -signal.SIGKILL  # the end of the helper kills its processes

    def close(self) -> None:
        """End the helper and all its processes."""
        self._broken = True
        self._process.kill()
        self._process.wait()
        self.socket.close()

    def _read_number(self) -> int:
        """Return a number that the helper sends.

        Raises:
            OSError: the helper has ended, or does not answer.
        """
        broken, self._broken = self._broken, True
        data = None if broken else _receive_exactly(self.socket, _LENGTH_BYTES)
        if data is None:
            raise ConnectionError("the grammar helper has ended")
        self._broken = False
        return int.from_bytes(data, "little", signed=True)


def send(connection: socket.socket, message: bytes, rows: bytes | memoryview = b"") -> None:
    """Send a message, and rows of bitmasks after it, in one call."""
    connection.sendall(b"".join((len(message).to_bytes(_LENGTH_BYTES, "little"), message, rows)))


def receive(connection: socket.socket) -> bytes | None:
    """Return the next message; None at the end.

    Raises:
        TimeoutError: the socket has a timeout, and no whole message arrived in that time.
        DecodeError: the message's header claims more bytes than the maximum.
    """
    head = _receive_exactly(connection, _LENGTH_BYTES)
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > _MOST_MESSAGE_NBYTES:
        raise msgspec.DecodeError(f"a message of {size} bytes")
    return _receive_exactly(connection, size)


def receive_into(connection: socket.socket, view: memoryview) -> bool:
    """Fill a buffer of bytes; return False if the connection ends before it is full.

    Raises:
        TimeoutError: the socket has a timeout, and the bytes did not arrive in that time.
    """
    timeout = connection.gettimeout()
    deadline = None if timeout is None else time.monotonic() + timeout
    got = connection.recv_into(view)
    if got in (0, len(view)):  # at once, as in nearly all calls
        return got == len(view)
    try:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        while got < len(view):
            count = connection.recv_into(view[got:])
            if not count:
                return False
            got += count
            if deadline is not None and got < len(view):
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
    finally:
        if deadline is not None:
            connection.settimeout(timeout)
    return True


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    return bytes(data) if receive_into(connection, memoryview(data)) else None
