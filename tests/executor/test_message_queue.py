"""Queue in shared memory: every reader reads every message, in order and whole."""

import os
import random
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo.executor.message_queue import (
    QueueClosedError,
    QueueReader,
    QueueWriter,
    make_queue,
)

CHUNK, NUM_CHUNKS = 16, 5
ROOM = CHUNK - 4


class Queue:
    """Both ends of a queue, and its open resources."""

    def __init__(self, num_readers, **sizes):
        self.handle = make_queue(num_readers, **sizes)
        self.writer = QueueWriter(self.handle)
        self.readers = [QueueReader(self.handle.for_reader(i)) for i in range(num_readers)]

    def release(self):
        for end in (self.writer, *self.readers):
            end.release()
        self.handle.close()


@pytest.fixture
def make():
    before, queues = set(os.listdir("/proc/self/fd")), []

    def make(*args, **kwargs):
        queues.append(Queue(*args, **kwargs))
        return queues[-1]

    yield make
    for queue in queues:
        queue.release()
    assert set(os.listdir("/proc/self/fd")) == before


def num_chunks(message):
    return max(1, -(-len(message) // ROOM))


class Model(RuleBasedStateMachine):
    """Queue together with a list of messages for each reader."""

    def __init__(self):
        super().__init__()
        self.queue = None

    @initialize(num_readers=st.integers(1, 3))
    def start(self, num_readers):
        self.queue = Queue(num_readers, num_chunks=NUM_CHUNKS, chunk_nbytes=CHUNK)
        self.unread = [[] for _ in range(num_readers)]

    @rule(message=st.binary(max_size=NUM_CHUNKS * ROOM))
    def write(self, message):
        for reader, unread in zip(self.queue.readers, self.unread, strict=True):
            while sum(map(num_chunks, [message, *unread])) > NUM_CHUNKS:
                assert reader.try_read() == unread.pop(0)
        self.queue.writer.write(message)
        for unread in self.unread:
            unread.append(message)

    @precondition(lambda self: self.queue is not None)
    @rule(index=st.integers(0, 2))
    def read(self, index):
        index %= len(self.unread)
        expected = self.unread[index].pop(0) if self.unread[index] else None
        assert self.queue.readers[index].try_read() == expected

    def teardown(self):
        if self.queue is not None:
            self.queue.release()


TestModel = Model.TestCase
TestModel.settings = settings(deadline=None, max_examples=40)


@pytest.mark.parametrize("slow", [0, 1])
def test_the_writer_waits_for_the_slowest_reader(slow, make):
    queue, written = make(2, num_chunks=NUM_CHUNKS, chunk_nbytes=CHUNK), []

    def write():
        for i in range(3 * NUM_CHUNKS):
            queue.writer.write(b"%d" % i)
            written.append(i)

    thread = threading.Thread(target=write)
    thread.start()
    fast = queue.readers[1 - slow]
    for i in range(NUM_CHUNKS):
        assert fast.read(60) == b"%d" % i
    while len(written) < NUM_CHUNKS:  # the writer notes it a moment later
        time.sleep(0.001)
    with pytest.raises(TimeoutError):
        fast.read(0.05)
    assert len(written) == NUM_CHUNKS
    for i in range(3 * NUM_CHUNKS):
        assert queue.readers[slow].read(60) == b"%d" % i
        if i >= NUM_CHUNKS:
            assert fast.read(60) == b"%d" % i
    thread.join(60)
    assert not thread.is_alive()


def test_a_message_larger_than_the_ring(make):
    queue = make(2, num_chunks=NUM_CHUNKS, chunk_nbytes=CHUNK)
    message = random.Random(0).randbytes(50 * NUM_CHUNKS * CHUNK + 3)
    thread = threading.Thread(target=queue.writer.write, args=(message,))
    thread.start()
    others = []
    reading = threading.Thread(target=lambda: others.append(queue.readers[1].read(60)))
    reading.start()
    assert queue.readers[0].read(60) == message
    thread.join(60)
    reading.join(60)
    assert others == [message]


def test_threads_that_write_take_turns(make):
    queue, messages = make(1, num_chunks=NUM_CHUNKS, chunk_nbytes=CHUNK), set()
    texts = [letter * 40 for letter in (b"a", b"b", b"c")]

    def write(text):
        for _ in range(20):
            queue.writer.write(text)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for _ in range(60):
        messages.add(queue.readers[0].read(60))
    for thread in threads:
        thread.join(60)
    assert messages == set(texts)


def test_close_wakes_who_waits_and_holds_from_then_on(make):
    queue, errors = make(1, num_chunks=1, chunk_nbytes=CHUNK), []

    def call(method, *args):
        try:
            method(*args)
        except QueueClosedError as error:
            errors.append(error)

    reading = threading.Thread(target=call, args=(queue.readers[0].read,))
    reading.start()
    time.sleep(0.05)
    queue.readers[0].close()
    reading.join(60)
    queue.writer.write(b"")
    writing = threading.Thread(target=call, args=(queue.writer.write, b"more"))
    writing.start()
    time.sleep(0.05)
    queue.writer.close()
    writing.join(60)
    assert len(errors) == 2
    with pytest.raises(QueueClosedError):
        queue.writer.write(b"")
    with pytest.raises(QueueClosedError):
        queue.readers[0].read()


def test_a_write_that_is_broken_off_closes_the_queue(make, monkeypatch):
    queue, write = make(1), os.eventfd_write

    def interrupt(fd, count):
        monkeypatch.setattr(os, "eventfd_write", write)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "eventfd_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        queue.writer.write(b"half")
    with pytest.raises(QueueClosedError):
        queue.writer.write(b"nothing can follow")


def test_no_room_for_it_leaves_nothing_open(monkeypatch, make):
    def refuse(*_):
        raise OSError(28, "no room")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="no room"):
        make(1)


CHILD = """
import sys, msgspec, time
from octavo.executor.message_queue import QueueHandle, QueueReader, QueueWriter
requests, answers = msgspec.json.decode(sys.argv[1], type=list[QueueHandle])
reader, writer = QueueReader(requests), QueueWriter(answers)
while message := reader.read():
    writer.write(message[::-1])
begin = time.process_time()
reader.read()
writer.write(b"%f" % (time.process_time() - begin))
"""


def test_processes(make):
    """Two processes answer, and use no processor time while idle."""
    requests, answers = make(2), [make(1), make(1)]
    processes = []
    for i in range(2):
        handles = [requests.handle.for_reader(i), answers[i].handle]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", CHILD, msgspec.json.encode(handles).decode()],
                pass_fds=[fd for handle in handles for fd in handle.descriptors],
            )
        )
    rng = random.Random(0)
    try:
        for size in [1, 10, 5000, 70_000, 6_000_000, *rng.sample(range(1, 100_000), 50)]:
            message = rng.randbytes(size)
            requests.writer.write(message)
            for answer in answers:
                assert answer.readers[0].read(60) == message[::-1]
        requests.writer.write(b"")
        time.sleep(0.5)
        requests.writer.write(b"end")
        for answer in answers:
            assert float(answer.readers[0].read(60)) < 0.1
    finally:
        for process in processes:
            process.kill()
            process.wait()
