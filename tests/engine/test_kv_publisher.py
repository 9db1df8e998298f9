"""KV events as subscribers receive them, over real sockets."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from octavo import LLM, SamplingParams
from octavo.config import KVEventsConfig
from octavo.engine import kv_publisher
from octavo.engine.kv_publisher import KVEventPublisher, endpoint_of
from octavo.errors import ConfigError
from octavo.kv_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventLog,
)
from tests.e2e.harness import free_port
from tests.kv_cache.test_events import Subscriber

LOG = KVEventLog(0, 16, "CPU")
END = (-1).to_bytes(8, "big", signed=True)


@pytest.fixture
def context():
    """Return a context that opens sockets."""
    context, opened = zmq.Context(), []

    def open_socket(kind):
        opened.append(context.socket(kind))
        return opened[-1]

    yield SimpleNamespace(socket=open_socket)
    context.destroy(linger=0)


def make_config(tmp_path, **more):
    fields = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    return KVEventsConfig(enable_kv_cache_events=True, topic="kv", **fields | more)


def subscribe(context, endpoint):
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.subscribe(b"kv")
    socket.connect(endpoint)
    return socket


def receive(socket):
    topic, number, payload = socket.recv_multipart()
    assert topic == b"kv"
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=KVEventBatch)


def ask(context, endpoint, *frames):
    """Return all answers to a question."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(endpoint)
    socket.send_multipart(frames)
    found = []
    while True:
        empty, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == END:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), payload))


def test_who_is_late_asks_for_what_was_missed(tmp_path, context):
    config = make_config(tmp_path, buffer_steps=3)
    publisher = KVEventPublisher(config, 2, LOG)
    try:
        endpoint = config.endpoint + "_dp2"
        socket = subscribe(context, endpoint)
        while not socket.poll(100):  # a subscription takes a while to arrive
            publisher.publish([AllBlocksCleared()])
        publisher.publish([BlockRemoved([b"last"])])
        last, batch = receive(socket)
        while batch.events == [AllBlocksCleared()]:
            last, batch = receive(socket)
        for i in range(4):
            publisher.publish([BlockRemoved([bytes([i])])])
        numbers, batches = zip(*(receive(socket) for _ in range(4)), strict=True)
        assert numbers == tuple(range(last + 1, last + 5))
        assert batches[0].events == [BlockRemoved([b"\0"])]
        assert batches[0].data_parallel_rank == 2
        assert abs(batches[0].ts - time.time()) < 60
        question = config.replay_endpoint + "_dp2"
        kept = ask(context, question, b"", (0).to_bytes(8, "big"))
        assert [number for number, _ in kept] == [last + 2, last + 3, last + 4]
        assert msgspec.msgpack.decode(kept[0][1], type=KVEventBatch) == batches[1]
        assert [n for n, _ in ask(context, question, b"", numbers[-1].to_bytes(8, "big"))] == [
            last + 4
        ]
        assert ask(context, question, b"", (10**6).to_bytes(8, "big")) == []
        # A message that is no question is not answered, and does no harm.
        socket = context.socket(zmq.DEALER)
        socket.connect(question)
        for frames in ([b""], [b"", b"x"], [b"", b"", b"", b""], [b"\xff" * 9]):
            socket.send_multipart(frames)
        assert len(ask(context, question, b"", (0).to_bytes(8, "big"))) == 3
    finally:
        publisher.close()
        publisher.close()


def test_what_is_kept_is_bounded(tmp_path, context, monkeypatch):
    monkeypatch.setattr(kv_publisher, "_MOST_KEPT_NBYTES", 400)
    config = make_config(tmp_path)
    publisher = KVEventPublisher(config, None, LOG)
    for i in range(9):
        publisher.publish([BlockRemoved([bytes([i]) * 100])])
    kept = []
    while not kept or kept[-1][0] < 9:
        kept = ask(context, config.replay_endpoint, b"", (0).to_bytes(8, "big"))
    assert [number for number, _ in kept] == [7, 8, 9]
    publisher.close()


class RawReader:
    """Reader of ZMTP 3.0, by hand: it sends arbitrary data, and reads nothing of a PUB."""

    def __init__(self, path, kind):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(str(path))
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(55, b"\0"))
        self.read(64)
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        self.socket.sendall(bytes([4, len(ready)]) + ready)
        self.read(self.read(2)[1])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.socket.close()

    def read_to_end(self, least=None):
        """Return the number of bytes before the end, or, after `least` bytes, before a pause."""
        count = 0
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            while part := self.socket.recv(2**20):
                count += len(part)
                if least is not None and count >= least:
                    self.socket.settimeout(1.0)
        return count

    def read(self, size):
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            assert part
            data += part
        return data


@pytest.mark.parametrize(("path", "kind"), [("replay", b"DEALER"), ("events", b"SUB")])
def test_a_frame_that_claims_to_be_long_ends_the_connection(tmp_path, path, kind):
    publisher = KVEventPublisher(make_config(tmp_path), None, LOG)
    with RawReader(tmp_path / path, kind) as reader:
        reader.socket.sendall(b"\x02" + (2**20).to_bytes(8, "big") + b"a" * 1000)
        with contextlib.suppress(ConnectionResetError):
            assert reader.socket.recv(1) == b""
    publisher.close()


def test_readers_that_do_not_read_are_dropped_and_others_go_on(
    tmp_path, context, monkeypatch, caplog
):
    monkeypatch.setattr(kv_publisher, "_MOST_UNSENT_NBYTES", 2**20)
    monkeypatch.setattr(kv_publisher, "_MOST_KEPT_NBYTES", 2**18)
    config = make_config(tmp_path)
    publisher = KVEventPublisher(config, None, LOG)
    good = subscribe(context, config.endpoint)
    with RawReader(tmp_path / "events", b"SUB") as slow:
        slow.socket.sendall(b"\x00\x01\x01")  # all topics
        while not good.poll(100):  # a subscription takes a while to arrive
            publisher.publish([AllBlocksCleared()])
        num_sent = largest = 0
        while "all readers of KV events are disconnected" not in caplog.text:
            publisher.publish([BlockRemoved([bytes(2**16)])])
            num_sent += 1
            while good.poll(5):
                receive(good)
            largest = max(largest, publisher._unsent_nbytes)
            assert num_sent < 1000
        assert largest < 2**20 + 2 * 2**16
        slow.read_to_end()
    while not good.poll(100):  # it connects again by itself
        publisher.publish([AllBlocksCleared()])
    number, _ = receive(good)
    missed = ask(context, config.replay_endpoint, b"", (number - 2).to_bytes(8, "big"))
    assert [number for number, _ in missed][:2] == [number - 2, number - 1]
    publisher.close()


def test_a_client_that_asks_and_does_not_read_gets_no_more_than_a_queue(
    tmp_path, context, monkeypatch
):
    monkeypatch.setattr(kv_publisher, "_QUESTIONS_AT_ONCE", 1000)
    monkeypatch.setattr(kv_publisher, "_POLL_SECONDS", 0.005)
    config = make_config(tmp_path, buffer_steps=50)
    publisher = KVEventPublisher(config, None, LOG)
    for _ in range(50):
        publisher.publish([BlockRemoved([bytes(2**14)])])
    question = b"", (0).to_bytes(8, "big")
    while len(ask(context, config.replay_endpoint, *question)) < 50:
        pass  # an answer before all are kept would be shorter
    with RawReader(tmp_path / "replay", b"DEALER") as slow:
        for _ in range(40):
            slow.socket.sendall(b"\x01\x00\x00\x08" + bytes(8))
        for _ in range(40):  # in turn, so that afterwards all have been used
            whole = ask(context, config.replay_endpoint, *question)
        assert len(whole) == 50
        least = 2 * 50 * 2**14
        assert least <= slow.read_to_end(least) < 10 * 50 * 2**14
    publisher.close()


def test_nobody_waits_for_what_cannot_be_sent(tmp_path, monkeypatch, caplog):
    go_on = threading.Event()
    monkeypatch.setattr(KVEventPublisher, "_run", lambda self: go_on.wait(60))
    publisher = KVEventPublisher(make_config(tmp_path, max_queue_size=2), None, LOG)
    for _ in range(5):
        publisher.publish([AllBlocksCleared()])
    assert publisher._num_lost == 4
    assert caplog.text.count("KV events were lost") == 3  # at 1, 2 and 4
    go_on.set()
    publisher.close()
    publisher._context.destroy(linger=0)


def test_where_an_engine_publishes():
    assert endpoint_of("tcp://127.0.0.1:5557", None) == "tcp://127.0.0.1:5557"
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of("ipc:///tmp/x", 1) == "ipc:///tmp/x_dp1"


def test_a_port_that_is_taken_is_refused(tmp_path):
    config = make_config(tmp_path, endpoint=f"tcp://127.0.0.1:{free_port()}")
    publisher = KVEventPublisher(config, None, LOG)
    with pytest.raises(ConfigError, match=r"kv_events_config: endpoint='tcp://127.*in use"):
        KVEventPublisher(config, None, LOG)
    publisher.close()
    KVEventPublisher(config, None, LOG).close()


def test_who_may_read_is_said(tmp_path, caplog):
    KVEventPublisher(make_config(tmp_path), None, LOG).close()
    assert "can be read" not in caplog.text
    config = make_config(tmp_path, endpoint=f"tcp://*:{free_port()}")
    KVEventPublisher(config, None, LOG).close()
    assert "can read KV events with the tokens of all prompts" in caplog.text


def test_events_of_a_model(tmp_path, context):
    config = {
        "enable_kv_cache_events": True,
        "topic": "kv",
        "endpoint": f"ipc://{tmp_path}/events",
    }
    socket = subscribe(context, config["endpoint"])
    subscriber = Subscriber()
    settings = {"max_model_len": 256, "num_gpu_blocks_override": 24, "kv_events_config": config}
    with LLM("octavo/stories", **settings) as llm:
        while not socket.poll(100):  # a subscription takes a while to arrive
            assert llm.reset_prefix_cache()
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        prompts = [{"prompt_token_ids": [5 + i] * 50} for i in range(12)]
        llm.generate(prompts, params, use_tqdm=False)
        pool = llm.llm_engine.client.core.scheduler.kv_cache_manager.pool
        known, seen = set(pool.cached_blocks(0)), []
        while subscriber.known != known:
            _, batch = receive(socket)
            seen += batch.events
            subscriber.take(batch.events)
        stored = next(event for event in seen if isinstance(event, BlockStored))
        assert stored.token_ids == [5] * 48
        assert (stored.medium, stored.block_size) == ("CPU", 16)
        assert any(isinstance(event, BlockRemoved) for event in seen), "there are too few blocks"
        assert llm.reset_prefix_cache()
        while batch.events != [AllBlocksCleared()]:  # earlier events
            _, batch = receive(socket)
