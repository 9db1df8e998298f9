"""Publishes KV events to whoever subscribes, with vLLM's messages.

PUB: (topic, number, batch), numbered from 0 on, 8 bytes, big-endian. Who has missed some asks the
replay socket (ROUTER) with the first number it wants, and gets (number, batch) for each that is
still there, then -1 with nothing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
import time
from collections import deque

import msgspec
import zmq

from octavo.config import KVEventsConfig
from octavo.errors import ConfigError
from octavo.kv_cache.events import AllBlocksCleared, AnyKVEvent, KVEventBatch

logger = logging.getLogger(__name__)

_NUMBER_NBYTES = 8
_END = (-1).to_bytes(_NUMBER_NBYTES, "big", signed=True)
_POLL_SECONDS = 0.1
_END_SECONDS = 1.0
# What is kept for replays takes no more, however many batches may be kept.
_MOST_KEPT_NBYTES = 2**26


class KVEventPublisher:
    """Sends what it is given from a thread of its own; the engine never waits for it.

    Args:
        config: where, and how much is kept.
        rank: the engine's among several: ports of TCP are counted from the given one on.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, rank: int | None) -> None:
        self._config, self._rank = config, rank
        self._queue: queue.Queue[list[AnyKVEvent] | None] = queue.Queue(config.max_queue_size)
        self._num_lost = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        """Numbers and payloads of the last batches, for replays."""
        self._kept_nbytes = 0
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self._events = self._bind(zmq.PUB, "endpoint", config.endpoint)
            self._replay = None
            if config.replay_endpoint is not None:
                self._replay = self._bind(zmq.ROUTER, "replay_endpoint", config.replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="octavo-kv-events", daemon=True)
        self._thread.start()
        self.publish([AllBlocksCleared()])

    def publish(self, events: list[AnyKVEvent]) -> None:
        """Has events sent; if nobody comes to send them the oldest wait, and these are lost."""
        try:
            self._queue.put_nowait(events)
        except queue.Full:
            self._num_lost += 1
            if self._num_lost & (self._num_lost - 1) == 0:
                logger.warning("KV events were lost: they cannot be sent as fast as they come")

    def close(self) -> None:
        """Sends what is left, and lets go of the sockets. May be called twice."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(_END_SECONDS)

    def _bind(self, kind: int, name: str, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(self._config.hwm)
        where = endpoint_of(endpoint, self._rank)
        try:
            socket.bind(where)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {name}={where!r} cannot be listened on ({error.strerror}); "
                "choose an address of this machine and a free port, such as tcp://127.0.0.1:5557."
            ) from None
        if where.startswith("tcp://") and not where.startswith(("tcp://127.", "tcp://localhost")):
            logger.warning(
                "KV events, with the tokens of all prompts, can be read by who can reach %s", where
            )
        return socket

    def _run(self) -> None:
        topic = self._config.topic.encode()
        while True:
            try:
                events = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._serve_replays()
                continue
            if events is None:
                break
            batch = KVEventBatch(time.time(), events, self._rank)
            payload = self._encoder.encode(batch)
            number = self._number.to_bytes(_NUMBER_NBYTES, "big")
            self._events.send_multipart([topic, number, payload])
            if self._replay is not None:
                self._keep(payload)
            self._number += 1
            self._serve_replays()
        self._context.destroy(linger=200)

    def _keep(self, payload: bytes) -> None:
        self._kept.append((self._number, payload))
        self._kept_nbytes += len(payload)
        while len(self._kept) > self._config.buffer_steps or self._kept_nbytes > _MOST_KEPT_NBYTES:
            self._kept_nbytes -= len(self._kept.popleft()[1])

    def _serve_replays(self) -> None:
        """Answers those who have missed something."""
        while self._replay is not None and self._replay.poll(0):
            client, *frames = self._replay.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != _NUMBER_NBYTES:
                continue  # it is no question
            first = int.from_bytes(frames[1], "big", signed=True)
            for number, payload in self._kept:
                if number >= first:
                    answer = number.to_bytes(_NUMBER_NBYTES, "big")
                    self._replay.send_multipart([client, b"", answer, payload])
            self._replay.send_multipart([client, b"", _END, b""])


def endpoint_of(endpoint: str, rank: int | None) -> str:
    """Where an engine publishes: so many ports of TCP behind the given one, or under a longer name.

    Args:
        endpoint: as ZMQ writes it.
        rank: the engine's; None: there is only one.
    """
    if not rank:
        return endpoint
    if (found := re.fullmatch(r"(tcp://.*:)(\d+)", endpoint)) is not None:
        return f"{found[1]}{int(found[2]) + rank}"
    return f"{endpoint}_dp{rank}"
