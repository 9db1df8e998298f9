"""A queue of messages in shared memory: one process writes, several read all of it.

What vLLM's `shm_broadcast.MessageQueue` is for, on one host. The messages lie in a ring of equal
chunks, in memory without a name (memfd): processes are sent its descriptor, and it is gone with the
last of them. A message that is longer than a chunk takes several. For each reader two eventfds say
who may touch a chunk: `filled` counts those that were written for it and `free` those that it has
read. Both are the kernel's, which orders what is written before and read after them on any kind of
processor, and who waits for one sleeps. Messages are bytes: what they mean is their users' affair,
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
# Seconds that a reader looks again and again before it sleeps: waking up takes about as long.
SPIN_SECONDS = 50e-6

# A chunk begins with its length and this bit in a little-endian number of 4 bytes.
_HEADER_NBYTES = 4
_LAST = 1 << 31


class QueueClosedError(Exception):
    """`close` was called at this end of the queue, or a write was broken off."""


class QueueHandle(msgspec.Struct, frozen=True, array_like=True):
    """A queue, as descriptors of this process."""

    memory: int
    readers: list[tuple[int, int]]
    """(filled, free) of each."""
    num_chunks: int
    chunk_nbytes: int

    @property
    def descriptors(self) -> list[int]:
        """What a process must have to use it."""
        return [self.memory, *(fd for pair in self.readers for fd in pair)]

    def for_reader(self, index: int) -> QueueHandle:
        """The same with nothing but one of its readers."""
        return msgspec.structs.replace(self, readers=[self.readers[index]])

    def received(self, numbers: dict[int, int]) -> QueueHandle:
        """The same in a process that was sent the descriptors: there they have other numbers."""
        readers = [(numbers[filled], numbers[free]) for filled, free in self.readers]
        return msgspec.structs.replace(self, memory=numbers[self.memory], readers=readers)

    def close(self) -> None:
        """Lets go of the descriptors, once nobody in this process uses them any more."""
        for fd in self.descriptors:
            os.close(fd)


def make_queue(
    num_readers: int, *, num_chunks: int = NUM_CHUNKS, chunk_nbytes: int = CHUNK_NBYTES
) -> QueueHandle:
    """Makes an empty queue.

    Args:
        num_readers: each of them gets every message.
        num_chunks: how far, in chunks, the writer can be ahead of the slowest reader.
        chunk_nbytes: of a chunk, its header of 4 bytes included.

    Raises:
        OSError: the system has no room for it.
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
    """What both ends have: the memory, a place in it, and a way to stop who waits."""

    def __init__(self, handle: QueueHandle) -> None:
        self._num_chunks, self._chunk_nbytes = handle.num_chunks, handle.chunk_nbytes
        self._memory = mmap.mmap(handle.memory, handle.num_chunks * handle.chunk_nbytes)
        self._next = 0  # chunk
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def close(self) -> None:
        """Has who waits at this end, now or later, get `QueueClosedError`. From any thread."""
        self._closed = True
        with contextlib.suppress(OSError):  # let go of already
            os.eventfd_write(self._stop, 1)

    def _release(self) -> None:
        self._closed = True
        if self._stop >= 0:
            stop, self._stop = self._stop, -1
            os.close(stop)
            self._memory.close()

    def _count(self, fd: int) -> int:
        """What an eventfd has counted since it was read last."""
        try:
            return os.eventfd_read(fd)
        except BlockingIOError:
            return 0

    def _sleep(self, fd: int, timeout: float | None) -> None:
        """Sleeps until an eventfd has counted something, for at most `timeout` seconds."""
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
    """The end of a queue that writes; there is one. Its threads take turns."""

    def __init__(self, handle: QueueHandle) -> None:
        super().__init__(handle)
        self._readers = handle.readers
        self._free = [0] * len(handle.readers)  # chunks that each has read, as far as is known
        self._lock = threading.Lock()

    def write(self, message: bytes) -> None:
        """Writes a message, of any length; waits while the slowest reader is a ring behind.

        Raises:
            QueueClosedError: see `close`. A write that was broken off, by Ctrl-C too, closes the
                queue: nobody could tell where the next message begins.
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
        """Lets go of the memory; waits for who writes, who should have been told by `close`."""
        with self._lock:
            self._release()


class QueueReader(_End):
    """One of the ends of a queue that read; for one thread.

    Args:
        handle: the queue; if it has several readers, `QueueHandle.for_reader` chooses.
    """

    def __init__(self, handle: QueueHandle) -> None:
        super().__init__(handle)
        ((self.filled, self._free_again),) = handle.readers
        self._filled = 0  # chunks that may be read, as far as is known
        self._parts: list[bytes] = []

    def try_read(self) -> bytes | None:
        """The next message; None: it is not there yet, or not all of it."""
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
        """The next message; waits for it.

        Args:
            timeout: seconds to wait; None: no limit.
            spin: seconds after which the wait becomes a sleep, which takes no processor time.

        Raises:
            QueueClosedError: see `close`; what has not been read stays unread.
            TimeoutError: no message came in time.
        """
        if self._closed:
            raise QueueClosedError
        begin = time.monotonic()
        while (message := self.try_read()) is None:
            waited = time.monotonic() - begin
            if timeout is not None and waited > timeout:
                raise TimeoutError(f"no message came within {timeout} s")
            if waited >= spin:
                self._sleep(self.filled, None if timeout is None else timeout - waited)
        return message

    def release(self) -> None:
        """Lets go of the memory, once nobody reads any more."""
        self._release()
