"""Message queue in shared memory: one process writes, several processes read every message.

It replaces vLLM's `shm_broadcast.MessageQueue` on one host. The messages are in a ring of equal
chunks, in anonymous memory (memfd): processes receive its descriptor, and the memory is freed with
the last of them. A message longer than a chunk uses several. Each reader has two eventfds: `filled`
counts the chunks written for it, `free` the chunks that it has read. The kernel orders memory
accesses before and after them on every processor, and a waiting process sleeps. Messages are bytes,
and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import threading
import time

import msgspec

NUM_CHUNKS = 64
CHUNK_NBYTES = 64 * 1024
# Seconds that a reader spins before it sleeps: waking up takes about as long.
SPIN_SECONDS = 50e-6

# A chunk begins with its length and this bit in a 4-byte little-endian number.
_HEADER_NBYTES = 4
_LAST = 1 << 31


class QueueClosedError(Exception):
    """Error raised after `close` at this end of the queue, or after an interrupted write."""


class QueueHandle(msgspec.Struct, frozen=True, array_like=True):
    """Queue as descriptors of this process."""

    memory: int
    readers: list[tuple[int, int]]
    """Descriptors (filled, free) of each reader."""
    num_chunks: int
    chunk_nbytes: int

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that a process needs to use the queue."""
        return [self.memory, *(fd for pair in self.readers for fd in pair)]

    def for_reader(self, index: int) -> QueueHandle:
        """Return a handle with only one of the readers."""
        return msgspec.structs.replace(self, readers=[self.readers[index]])

    def received(self, numbers: dict[int, int]) -> QueueHandle:
        """Return the handle for a process that has received the descriptors under other numbers."""
        readers = [(numbers[filled], numbers[free]) for filled, free in self.readers]
        return msgspec.structs.replace(self, memory=numbers[self.memory], readers=readers)

    def close(self) -> None:
        """Close the descriptors, once no code of this process uses them."""
        for fd in self.descriptors:
            os.close(fd)


def make_queue(
    num_readers: int, *, num_chunks: int = NUM_CHUNKS, chunk_nbytes: int = CHUNK_NBYTES
) -> QueueHandle:
    """Make an empty queue.

    Args:
        num_readers: number of readers, which all receive every message.
        num_chunks: maximum lead, in chunks, of the writer over the slowest reader.
        chunk_nbytes: size of a chunk, including its header of 4 bytes.

    Raises:
        OSError: the system lacks memory or descriptors.
    """
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    with contextlib.ExitStack() as undo:

        def keep(fd: int) -> int:
            undo.callback(os.close, fd)
            return fd

        memory = keep(os.memfd_create("octavo-queue"))
        os.ftruncate(memory, num_chunks * chunk_nbytes)
        readers = [
            (keep(os.eventfd(0, flags)), keep(os.eventfd(num_chunks, flags)))
            for _ in range(num_readers)
        ]
        undo.pop_all()
    return QueueHandle(memory, readers, num_chunks, chunk_nbytes)


class _End:
    """Common part of both ends: the memory, a position in it, and a way to stop waiting."""

    def __init__(self, handle: QueueHandle) -> None:
        self._num_chunks, self._chunk_nbytes = handle.num_chunks, handle.chunk_nbytes
        self._memory = mmap.mmap(handle.memory, handle.num_chunks * handle.chunk_nbytes)
        self._next = 0  # chunk
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def close(self) -> None:
        """Raise `QueueClosedError` in present and future waits at this end. Thread-safe."""
        self._closed = True
        with contextlib.suppress(OSError):  # released already
            os.eventfd_write(self._stop, 1)

    def _release(self) -> None:
        self._closed = True
        if self._stop >= 0:
            stop, self._stop = self._stop, -1
            os.close(stop)
            self._memory.close()

    def _count(self, fd: int) -> int:
        """Return the count of an eventfd since the last read."""
        try:
            return os.eventfd_read(fd)
        except BlockingIOError:
            return 0

    def _sleep(self, fd: int, timeout: float | None) -> None:
        """Sleep until an eventfd has counted something, for at most `timeout` seconds."""
        if self._closed:
            raise QueueClosedError
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        if self._closed:
            raise QueueClosedError

    def _step(self) -> None:
        self._next = (self._next + 1) % self._num_chunks


class QueueWriter(_End):
    """Writing end of a queue; each queue has one. Its threads write one at a time."""

    def __init__(self, handle: QueueHandle) -> None:
        super().__init__(handle)
        self._readers = handle.readers
        self._free = [0] * len(handle.readers)  # chunks that each is known to have read
        self._lock = threading.Lock()

    def write(self, message: bytes) -> None:
        """Write a message of any length; wait while the slowest reader is a whole ring late.

        Raises:
            QueueClosedError: see `close`. An interrupted write, also by Ctrl-C, closes the queue:
                readers could not find the beginning of the next message.
        """
        room = self._chunk_nbytes - _HEADER_NBYTES
        view = memoryview(message)
        with self._lock:
            if self._closed:
                raise QueueClosedError
            try:
                for at in range(0, len(view) or 1, room):
                    self._write_chunk(view[at : at + room], last=at + room >= len(view))
            except BaseException:
                self.close()
                raise

    def _write_chunk(self, part: memoryview, *, last: bool) -> None:
        for index, (_, free) in enumerate(self._readers):
            while not self._free[index]:
                self._free[index] = self._count(free)
                if not self._free[index]:
                    self._sleep(free, None)
            self._free[index] -= 1
        begin = self._next * self._chunk_nbytes
        header = len(part) | (_LAST if last else 0)
        body = begin + _HEADER_NBYTES
        self._memory[begin:body] = header.to_bytes(_HEADER_NBYTES, "little")
        self._memory[body : body + len(part)] = part
        self._step()
        for filled, _ in self._readers:
            os.eventfd_write(filled, 1)

    def release(self) -> None:
        """Release the memory after waiting for writing threads; call `close` first."""
        with self._lock:
            self._release()


class QueueReader(_End):
    """Reading end of a queue; for one thread.

    Args:
        handle: the queue, with one reader; `QueueHandle.for_reader` selects it.
    """

    def __init__(self, handle: QueueHandle) -> None:
        super().__init__(handle)
        ((self.filled, self._free_again),) = handle.readers
        self._filled = 0  # chunks known to be readable
        self._parts: list[bytes] = []

    def try_read(self) -> bytes | None:
        """Return the next message, or None if it has not arrived completely."""
        while True:
            if not self._filled:
                self._filled = self._count(self.filled)
                if not self._filled:
                    return None
            self._filled -= 1
            begin = self._next * self._chunk_nbytes
            body = begin + _HEADER_NBYTES
            header = int.from_bytes(self._memory[begin:body], "little")
            self._parts.append(self._memory[body : body + (header & ~_LAST)])
            self._step()
            os.eventfd_write(self._free_again, 1)
            if header & _LAST:
                parts, self._parts = self._parts, []
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def read(self, timeout: float | None = None, *, spin: float = SPIN_SECONDS) -> bytes:
        """Wait for the next message and return it.

        Args:
            timeout: seconds to wait; None: no limit.
            spin: seconds after which the wait becomes a sleep, which uses no processor time.

        Raises:
            QueueClosedError: see `close`; unread messages stay unread.
            TimeoutError: no message arrived in time.
        """
        if self._closed:
            raise QueueClosedError
        begin = time.monotonic()
        while (message := self.try_read()) is None:
            waited = time.monotonic() - begin
            if timeout is not None and waited > timeout:
                raise TimeoutError(f"no message arrived within {timeout} s")
            if waited >= spin:
                self._sleep(self.filled, None if timeout is None else timeout - waited)
        return message

    def release(self) -> None:
        """Release the memory, once no thread reads."""
        self._release()
