"""Publisher of KV events to subscribers, with vLLM's messages.

The PUB socket sends (topic, number, batch). Numbers start at 0 and have 8 bytes, big-endian. A
subscriber that has missed batches sends the first missing number to the replay socket (ROUTER). The
replies are (number, batch) for each kept batch, then -1 with an empty batch.

All queues share one copy of each batch. When unread batches of slow readers fill
`_MOST_UNSENT_NBYTES`, the publisher reopens both sockets, which disconnects all readers. Active
readers connect again and request the missing batches.
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
from octavo.kv_cache.events import AllBlocksCleared, AnyKVEvent, KVEventBatch, KVEventLog
from octavo.messages import EngineCoreOutputs
from octavo.scheduler.listener import StepListener

logger = logging.getLogger(__name__)

_NUMBER_NBYTES = 8
_END = (-1).to_bytes(_NUMBER_NBYTES, "big", signed=True)
_POLL_SECONDS = 0.1
_END_SECONDS = 1.0
# Limit of the batches kept for replays, in addition to the limit of their number.
_MOST_KEPT_NBYTES = 2**26
# Limit of the batches that are not kept but wait in the queues of readers.
_MOST_UNSENT_NBYTES = 2**26
# Subscriptions and replay requests are shorter. libzmq allocates the length that a frame states.
_MOST_QUESTION_NBYTES = 4096
# Largest number of queued replay requests of one client.
_MOST_QUESTIONS = 16
# Largest number of replay requests to answer before sending the next events.
_QUESTIONS_AT_ONCE = 4
# An address is free again once the I/O thread has closed the old socket.
_BIND_SECONDS = 2.0
_BIND_PAUSE = 0.01


class KVEventPublisher(StepListener):
    """Listener that publishes events on a dedicated thread; the engine never waits for it.

    Args:
        config: addresses, and sizes of queues.
        rank: number of the engine among several; added to TCP ports.
        log: events of the engine's prefix cache; published after each step.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, rank: int | None, log: KVEventLog) -> None:
        self._config, self._rank, self.log = config, rank, log
        self._queue: queue.Queue[list[AnyKVEvent] | None] = queue.Queue(config.max_queue_size)
        self._num_lost = 0
        self._kept: deque[tuple[int, zmq.Frame]] = deque()
        """Numbers and payloads of the last batches, for replays."""
        self._kept_nbytes = 0
        self._unsent: deque[tuple[zmq.MessageTracker, int]] = deque()
        """Trackers and sizes of the batches that are not kept but may still be in a queue."""
        self._unsent_nbytes = 0
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self._open()
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="octavo-kv-events", daemon=True)
        self._thread.start()
        self.publish([AllBlocksCleared()])

    def on_outputs(self, outputs: EngineCoreOutputs, is_idle: bool) -> None:
        """Publish the events of the step."""
        if events := self.log.take():
            self.publish(events)

    def on_reset(self) -> None:
        """Publish the events of the reset."""
        if events := self.log.take():
            self.publish(events)

    def publish(self, events: list[AnyKVEvent]) -> None:
        """Queue events for sending; when the queue is full, drop them."""
        try:
            self._queue.put_nowait(events)
        except queue.Full:
            self._num_lost += 1
            if self._num_lost & (self._num_lost - 1) == 0:
                logger.warning("KV events were lost: they arrive faster than they can be sent")

    def close(self) -> None:
        """Send the queued events and close the sockets. A second call is harmless."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(_END_SECONDS)

    def _open(self) -> None:
        """Open the sockets.

        Raises:
            ConfigError: an address cannot be used.
        """
        config = self._config
        self._events = self._bind(zmq.PUB, "endpoint", config.endpoint, config.hwm)
        self._replay = None
        if config.replay_endpoint is not None:
            # libzmq counts in halves of this, so that a whole answer always fits.
            size = 2 * (config.buffer_steps + 1)
            self._replay = self._bind(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, size)
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error

    def _bind(self, kind: int, name: str, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.RCVHWM, _MOST_QUESTIONS)
        socket.setsockopt(zmq.SNDTIMEO, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_QUESTION_NBYTES)
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
                "any client that can reach %s can read KV events with the tokens of all prompts",
                where,
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
            payload = zmq.Frame(self._encoder.encode(batch), track=True, copy=False)
            number = self._number.to_bytes(_NUMBER_NBYTES, "big")
            self._events.send_multipart([topic, number, payload], copy=False)
            self._keep(payload)
            del payload
            self._number += 1
            if self._readers_are_slow() and not self._open_anew():
                return
            self._serve_replays()
        self._context.destroy(linger=200)

    def _keep(self, payload: zmq.Frame) -> None:
        most = 0 if self._replay is None else self._config.buffer_steps
        self._kept.append((self._number, payload))
        self._kept_nbytes += len(payload)
        while len(self._kept) > most or self._kept_nbytes > _MOST_KEPT_NBYTES:
            _, oldest = self._kept.popleft()
            self._kept_nbytes -= len(oldest)
            assert isinstance(oldest.tracker, zmq.MessageTracker)
            self._unsent.append((oldest.tracker, len(oldest)))
            self._unsent_nbytes += len(oldest)

    def _readers_are_slow(self) -> bool:
        """Return True if the batches that wait only in queues exceed their limit."""
        while self._unsent and self._unsent[0][0].done:
            self._unsent_nbytes -= self._unsent.popleft()[1]
        if self._unsent_nbytes > _MOST_UNSENT_NBYTES:
            self._unsent = deque(item for item in self._unsent if not item[0].done)
            self._unsent_nbytes = sum(size for _, size in self._unsent)
        return self._unsent_nbytes > _MOST_UNSENT_NBYTES

    def _open_anew(self) -> bool:
        """Reopen the sockets, which disconnects all readers; return True on success."""
        logger.warning(
            "all readers of KV events are disconnected: slow ones have not read %d MiB; active "
            "ones connect again and can request missed events from the replay socket",
            _MOST_UNSENT_NBYTES >> 20,
        )
        end = time.monotonic() + _BIND_SECONDS
        while True:
            self._events.close(linger=0)
            if self._replay is not None:
                self._replay.close(linger=0)
            try:
                self._open()
            except ConfigError as error:
                if time.monotonic() > end:
                    logger.error("no more KV events are sent: %s", error)
                    self._context.destroy(linger=0)
                    return False
                time.sleep(_BIND_PAUSE)
            else:
                self._unsent.clear()
                self._unsent_nbytes = 0
                return True

    def _serve_replays(self) -> None:
        """Answer some of the replay requests."""
        for _ in range(_QUESTIONS_AT_ONCE):
            if self._replay is None or not self._replay.poll(0):
                return
            client, *frames = self._replay.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != _NUMBER_NBYTES:
                continue  # not a replay request
            first = int.from_bytes(frames[1], "big", signed=True)
            # A client that does not read receives at most the capacity of its queue.
            with contextlib.suppress(zmq.ZMQError):
                for number, payload in self._kept:
                    if number >= first:
                        answer = number.to_bytes(_NUMBER_NBYTES, "big")
                        self._replay.send_multipart([client, b"", answer, payload], copy=False)
                self._replay.send_multipart([client, b"", _END, b""])


def endpoint_of(endpoint: str, rank: int | None) -> str:
    """Return the address of an engine: the TCP port plus the rank, or a name with the rank.

    Args:
        endpoint: the configured address, in ZMQ's form.
        rank: the engine's number; None: the only engine.
    """
    if not rank:
        return endpoint
    if (found := re.fullmatch(r"(tcp://.*:)(\d+)", endpoint)) is not None:
        return f"{found[1]}{int(found[2]) + rank}"
    return f"{endpoint}_dp{rank}"
