"""Relay that mirrors the messages between a model's stages to the memories of several hosts.

Each host has a complete `GroupMemory`, and ranks only use that of their host. A stream consists of
a counter and the slots that it counts, from the host of the writer to that of the reader. A relay
sends a slot once its counter shows that the slot is written. The relay on the other side writes the
same bytes and then posts the same number. A relay only delays. So the order that protects unread
slots on one host also protects them on several.

Hosts connect by CurveZMQ, as nodes do (`fleet/cluster.py`). A broken connection is never replaced,
since its lost messages are unknown: both sides break their memories. Each side monitors the
connections that it made, but not incoming ones, which anyone can make.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq
import zmq.utils.monitor
from numpy.typing import NDArray

from octavo import _native
from octavo.errors import EngineDeadError
from octavo.plan.group_layout import HANDED_SLOTS, SLOT_HEAD_NBYTES, GroupLayout
from octavo.system.distributed import COUNTER_NBYTES, Counter, GroupMemory

CONNECT_SECONDS = 20.0
"""Seconds in which the hosts must connect."""
_ALIVE_SECONDS = 0.5
_GONE_SECONDS = 8.0
"""Interval of heartbeats, and time without one after which a host is gone; as for nodes."""
_LOOK_SECONDS = 0.25
"""Interval of checks for the end."""
# Size of each of a message's two numbers, stream and step.
_NUMBER_NBYTES = 8


@dataclass(frozen=True)
class RelayKey:
    """CurveZMQ key pair shared by the hosts of an engine, as Z85."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Stream:
    """Counter and its slots, from one host to another."""

    source: int
    target: int
    counter: int
    """Offset of the counter in the memory."""
    slots: int = 0
    """Offset of the slots, which are contiguous."""
    slot_nbytes: int = 0
    num_slots: int = 1
    has_head: bool = False
    """True if slots begin with their used size."""


def find_streams(layout: GroupLayout, hosts: Sequence[int]) -> list[Stream]:
    """Return all streams between hosts, in the same order on each host.

    Args:
        layout: layout of each host's memory.
        hosts: the index of each stage's host.
    """
    streams = []
    first, last = hosts[0], hosts[-1]
    rings = (
        (last, layout.tokens, layout.token_numbers),
        (first, layout.drafts, layout.draft_numbers),
    )
    for source, begin, numbers in rings:
        slots = begin + COUNTER_NBYTES
        for target in sorted({*hosts} - {source}):
            streams.append(Stream(source, target, begin, slots, 8 * numbers, layout.num_slots))
    for stage, (source, target) in enumerate(itertools.pairwise(hosts)):
        if source == target:
            continue
        for index in range(layout.rank.size):
            sent = layout.handed(stage, index)
            taken, slots = sent + COUNTER_NBYTES, sent + 2 * COUNTER_NBYTES
            size = layout.slot_nbytes
            streams.append(Stream(source, target, sent, slots, size, HANDED_SLOTS, has_head=True))
            streams.append(Stream(target, source, taken))
    return streams


class Relay:
    """End of all streams that begin or end on one host.

    Args:
        memory: memory of the host.
        streams: all streams; see `find_streams`.
        host: index of this host.
        key: key pair of all hosts.
        address: address to listen on, in ZMQ's notation; a port of `*` is chosen.
        on_failure: called once with the error, by a thread of the relay, after the memory is
            broken.

    Raises:
        OSError: the relay cannot listen on the address.
    """

    def __init__(
        self,
        memory: GroupMemory,
        streams: Sequence[Stream],
        host: int,
        key: RelayKey,
        address: str,
        on_failure: Callable[[EngineDeadError], object],
    ) -> None:
        self._memory, self._streams, self._host, self._key = memory, streams, host, key
        self._on_failure = on_failure
        self._names: dict[int, str] = {}
        self._failed = threading.Lock()
        """Lock acquired once, by the first failure or by `close`."""
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._context = zmq.Context()
        self._links: dict[int, _Link] = {}
        try:
            self._receiver = self._make_socket(zmq.PULL)
            self._receiver.curve_server = True
            self._receiver.bind(address)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        endpoint = self._receiver.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.decode()
        """Address of this relay."""

    def connect(self, others: Mapping[int, tuple[str, str]]) -> None:
        """Connect to the other hosts and begin to mirror; all hosts must do so concurrently.

        Args:
            others: name and address of each other host.

        Raises:
            EngineDeadError: a host cannot be reached, or has another key.
        """
        self._names = {number: name for number, (name, _) in others.items()}
        for number, (_, address) in others.items():
            socket = self._make_socket(zmq.PUSH)
            socket.curve_publickey, socket.curve_serverkey = self._key.public, self._key.public
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            self._links[number] = _Link(socket, socket.get_monitor_socket(events))
            socket.connect(address)
        end = time.monotonic() + CONNECT_SECONDS
        for number, link in self._links.items():
            if not link.wait_for_handshake(end):
                raise EngineDeadError(
                    f"{self._name(number)} cannot be reached at {others[number][1]} within "
                    f"{CONNECT_SECONDS:.0f} s"
                )
        runs: list[Callable[[], None]] = [self._receive]
        for number, stream in enumerate(self._streams):
            if stream.source == self._host:
                runs.append(_Sender(self, number, stream).run)
        for run in runs:
            thread = threading.Thread(target=self._guard, args=[run], name="octavo-relay")
            thread.daemon = True
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads and the connections: the other hosts break their memories.

        May be called twice.
        """
        if self._context.closed:
            return
        self._failed.acquire(blocking=False)
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for socket in (self._receiver, *(link.socket for link in self._links.values())):
            socket.disable_monitor()
            socket.close(linger=0)
        for monitor in [link.monitor for link in self._links.values()]:
            monitor.close(linger=0)
        self._context.destroy(linger=0)

    @property
    def memory(self) -> GroupMemory:
        """Memory of the host."""
        return self._memory

    @property
    def ended(self) -> bool:
        """True if mirroring has ended."""
        return self._ended.is_set()

    def send(self, target: int, number: int, step: int, data: NDArray[np.uint8]) -> None:
        """Send a slot. Any thread may call it."""
        head = b"".join(it.to_bytes(_NUMBER_NBYTES, "little") for it in (number, step))
        link = self._links[target]
        with link.lock:
            link.socket.send_multipart([head, data.tobytes()])

    def _make_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.curve_secretkey = self._key.secret
        socket.set_hwm(0)  # slots bound the messages in transit
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * _ALIVE_SECONDS))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * _GONE_SECONDS))
        return socket

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except EngineDeadError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EngineDeadError(f"a relay failed: {type(error).__name__}: {error}"))

    def _fail(self, error: EngineDeadError) -> None:
        if self._failed.acquire(blocking=False):
            self._ended.set()
            self._memory.break_()
            self._on_failure(error)

    def _name(self, number: int) -> str:
        return f"the host {self._names[number]}"

    def _receive(self) -> None:
        """Write received slots to the memory, and monitor the connections."""
        counters = [
            self._memory.counter(stream.counter) if stream.target == self._host else None
            for stream in self._streams
        ]
        steps = [0] * len(self._streams)
        poller = zmq.Poller()
        poller.register(self._receiver, zmq.POLLIN)
        monitors = {link.monitor: number for number, link in self._links.items()}
        for monitor in monitors:
            poller.register(monitor, zmq.POLLIN)
        while not self._ended.is_set():
            if self._memory.broken:
                raise EngineDeadError("a process of the group on this host failed")
            ready = dict(poller.poll(int(1000 * _LOOK_SECONDS)))
            for monitor, number in monitors.items():
                if monitor in ready:
                    raise EngineDeadError(f"the connection to {self._name(number)} broke")
            while self._receiver in ready:
                try:
                    head, data = self._receiver.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                number = int.from_bytes(head[:_NUMBER_NBYTES], "little")
                step = int.from_bytes(head[_NUMBER_NBYTES:], "little")
                stream, counter = self._streams[number], counters[number]
                steps[number] += 1
                if counter is None or step != steps[number] or len(data) > stream.slot_nbytes:
                    raise EngineDeadError(
                        f"{self._name(stream.source)} sent step {step} of stream {number} with "
                        f"{len(data)} bytes, which is not the next one"
                    )
                begin = stream.slots + step % stream.num_slots * stream.slot_nbytes
                self._memory.data[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
                counter.post(step)


class _Link:
    """Connection to another host."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self.socket, self.monitor = socket, monitor
        self.lock = threading.Lock()
        """Lock of the socket."""

    def wait_for_handshake(self, end: float) -> bool:
        """Return True if the other host answers before the time `end`."""
        while (left := end - time.monotonic()) > 0 and self.monitor.poll(int(1000 * left)):
            message = zmq.utils.monitor.recv_monitor_message(self.monitor)
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
        return False


class _Sender:
    """Sender of the steps of a stream, in order.

    Args:
        relay: relay that it belongs to.
        number: index of the stream.
        stream: a stream that begins on this host.
    """

    def __init__(self, relay: Relay, number: int, stream: Stream) -> None:
        self._relay, self._number, self._stream = relay, number, stream
        self._counter: Counter = relay.memory.counter(stream.counter)

    def run(self) -> None:
        """Run until the relay ends."""
        step = 1
        while not self._relay.ended:
            if self._wait(step):
                self._relay.send(self._stream.target, self._number, step, self._slot(step))
                step += 1

    def _wait(self, step: int) -> bool:
        """Wait briefly for a step; return True if it is written.

        If the counter skips steps, they are sent like all others.
        """
        with contextlib.suppress(_native.GroupError):
            self._counter.wait(step, timeout=_LOOK_SECONDS)
            return True
        if self._relay.memory.broken:
            raise EngineDeadError("a process of the group on this host failed")
        return False

    def _slot(self, step: int) -> NDArray[np.uint8]:
        stream = self._stream
        begin = stream.slots + step % stream.num_slots * stream.slot_nbytes
        slot = self._relay.memory.data[begin : begin + stream.slot_nbytes]
        if not stream.has_head:
            return slot
        return slot[: SLOT_HEAD_NBYTES + int(slot[:8].view(np.int64)[0])]
