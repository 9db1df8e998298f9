"""Child processes of a server with several front ends: start, watch and end them.

Each child reads its setup from standard input, which stays open for later messages; its end means
that the first process has ended. The child sends heartbeats on a dedicated pipe, and its last
message there is the reason why it cannot continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import TypeVar

import msgspec

from octavo.errors import OctavoError, make_error, signal_name
from octavo.system.device import is_stopped

_T = TypeVar("_T")

# Interval of the heartbeats.
_BEAT_SECONDS = 0.5
_BEAT = b"\0"
"""Heartbeat; no failure begins with this byte."""
# Interval of the checks that a process lives.
LOOK_SECONDS = 0.1
# A shorter silence may be chance.
_LEAST_SILENCE = 2.0
# Maximum time of the imports, in addition to the limit of silence.
_START_SECONDS = 60.0
# A shorter stop is no reason to kill a process.
_STOPPED_SECONDS = 0.5
_LENGTH_NBYTES = 4


class _Failure(msgspec.Struct):
    kind: str
    message: str


class Child:
    """Child process, as the first process sees it.

    Args:
        module: module that it runs.
        descriptors: file descriptors that it inherits.

    Raises:
        OSError: the system cannot start another process.
    """

    def __init__(self, module: str, descriptors: tuple[int, ...] = ()) -> None:
        self._pulse, self.pulse = os.pipe()
        """`pulse`: the descriptor that the process writes to, see `beat`."""
        os.set_blocking(self._pulse, False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                pass_fds=[self.pulse, *descriptors],
                process_group=0,  # a Ctrl-C in the terminal is for the first process
            )
        except OSError:
            os.close(self._pulse)
            raise
        finally:
            os.close(self.pulse)
        self.pid = self._process.pid
        self.has_begun = False
        """True if it has sent a heartbeat."""
        self._said = b""

    def tell(self, data: bytes) -> None:
        """Write to its standard input; do nothing if it has ended or is about to."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def tell_message(self, message: object) -> None:
        """Write a message for `read_message`."""
        data = msgspec.msgpack.encode(message)
        self.tell(len(data).to_bytes(_LENGTH_NBYTES, "little") + data)

    async def watch(self, limit: float) -> str:
        """Wait until the process has ended, or was silent for `limit` seconds, at least two.

        Time is counted in naps, so that a sleeping machine is no reason to kill the process.

        Returns:
            A description of the end.

        Raises:
            OctavoError: the failure that the process reported.
        """
        limit = max(limit, _LEAST_SILENCE)
        silent, stopped = -_START_SECONDS, 0.0
        while (status := self._process.poll()) is None:
            await asyncio.sleep(LOOK_SECONDS)
            silent += LOOK_SECONDS
            if self._hear():
                silent, self.has_begun = 0.0, True
            self._raise_failure()
            if silent >= limit:
                return f"has sent no heartbeat for {silent:.1f} s and was killed"
            stopped = stopped + LOOK_SECONDS if is_stopped(self.pid) else 0.0
            if stopped >= _STOPPED_SECONDS:
                return "was stopped by a signal such as SIGSTOP, and killed"
        self._hear()
        self._raise_failure()
        if status < 0:
            return f"was killed by {signal_name(-status)}"
        return f"ended with status {status}"

    def _hear(self) -> bool:
        """Read heartbeats and the failure; return True if data arrived."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._pulse, 2**16)
        self._said += data if self._said else data.lstrip(_BEAT)
        return bool(data)

    def _raise_failure(self) -> None:
        if self._said:
            with contextlib.suppress(msgspec.DecodeError):  # the rest will follow
                failure = msgspec.msgpack.decode(self._said, type=_Failure)
                raise make_error(failure.kind, failure.message)

    async def end(self, timeout: float) -> int:
        """Close its input, wait for its end, and kill it after `timeout`; return its status."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        left = timeout
        while self._process.poll() is None and left > 0:
            await asyncio.sleep(LOOK_SECONDS)
            left -= LOOK_SECONDS
        self.kill()
        return self._process.wait()

    def kill(self) -> int:
        """Kill the process; return its status."""
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """Close the descriptors of a process that has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._pulse)


class Parent:
    """First process, as a child process sees it.

    Args:
        pulse: descriptor of `Child`.
    """

    def __init__(self, pulse: int) -> None:
        self._pulse = pulse

    async def beat(self) -> None:
        """Send heartbeats while the event loop runs."""
        while True:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._pulse, _BEAT)
            await asyncio.sleep(_BEAT_SECONDS)

    def tell_failure(self, error: OctavoError) -> None:
        """Report why this process cannot continue; nothing may call `beat` after it."""
        failure = _Failure(type(error).__name__, str(error))
        with contextlib.suppress(OSError):
            os.write(self._pulse, msgspec.msgpack.encode(failure))


def read_message(kind: type[_T]) -> _T | None:
    """Return a message of `Child.tell_message` without reading further; None at the end."""
    size = int.from_bytes(_read(_LENGTH_NBYTES), "little")
    data = _read(size)
    return msgspec.msgpack.decode(data, type=kind) if data else None


def _read(size: int) -> bytes:
    """Read without a buffer, as the lock of a buffer would outlive the thread that reads."""
    data = b""
    while len(data) < size and (part := os.read(sys.stdin.fileno(), size - len(data))):
        data += part
    return data
