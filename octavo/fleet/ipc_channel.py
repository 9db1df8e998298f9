"""Channel to an engine process on this machine."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import zmq
import zmq.asyncio

# Interval of attempts to connect to a process that does not listen yet.
_RECONNECT_MS = 5


class IpcChannel:
    """Implementation of `Channel` by two Unix sockets.

    Args:
        input_address: address where the process receives messages.
        output_address: address where it sends messages.
        pid: process id; `receive` then returns at once when the process ends, on Linux. None: the
            process is not a child of this one.

    Raises:
        OSError: the system lacks resources for sockets.
    """

    def __init__(self, input_address: str, output_address: str, pid: int | None = None) -> None:
        self._context = zmq.asyncio.Context()
        try:
            self._input = self._context.socket(zmq.PUSH)
            self._output = self._context.socket(zmq.PULL)
            self._input.set_hwm(0)  # requests may queue up while the process starts
            self._input.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            self._input.connect(input_address)
            self._output.bind(output_address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from error
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._output, zmq.POLLIN)
        self._end: int | None = None
        """Descriptor that is readable when the process has ended."""
        if pid is not None and sys.platform == "linux":
            try:
                self._end = os.pidfd_open(pid)
                self._poller.register(self._end, zmq.POLLIN)
            except OSError as error:
                # The process has been reaped, or a sandbox forbids the call: the end is then
                # noticed by the caller's own checks.
                if error.errno not in (errno.ESRCH, errno.ENOSYS, errno.EPERM):
                    self._context.destroy(linger=0)
                    raise

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return bool(self._context.closed)

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Implement `Channel`."""
        await self._input.send_multipart([kind, payload])

    async def receive(self, seconds: float) -> tuple[bytes, bytes] | None:
        """Implement `Channel`."""
        if self._output not in dict(await self._poller.poll(int(seconds * 1000))):
            return None
        kind, payload = await self._output.recv_multipart()
        return kind, payload

    def receive_nowait(self) -> tuple[bytes, bytes] | None:
        """Implement `Channel`."""
        try:
            # Without waiting, the result is a future that is done.
            received: Any = self._output.recv_multipart(zmq.NOBLOCK)
            kind, payload = received.result()
        except zmq.Again:
            return None
        return kind, payload

    def close(self) -> None:
        """Implement `Channel`."""
        end, self._end = self._end, None
        if end is not None:
            os.close(end)
        self._context.destroy(linger=0)
