"""Relay of a machine, if the engines that divide the experts of a model are on several machines.

The ranks of a machine meet in its memory (`ExpertExchange`). The relay is the last rank there, and
stands for the ranks of the other machines. While its machine's ranks wait between the two barriers
of a meeting, it exchanges rows:

1. before the experts: the tokens of this machine's engines for those of the others;
2. after the experts: the results for the others' tokens for those of its own.

The relay of the first machine, the *head*, listens. The others connect to it, and it passes on what
they have for each other. Every relay knows the experts of all tokens, and so which machine computes
which row. So messages have rows without indices, and their sizes are checked.

Connections are encrypted with CurveZMQ under the cluster's key. They belong to one generation of
engines: a relay of another generation is ignored. A broken connection is never replaced, since
messages may be lost: the generation ends. A node monitors its connection. The head learns of a lost
machine as of every lost node (`fleet/cluster.py`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from octavo.errors import EngineDeadError, EngineStoppedError
from octavo.layers.expert_exchange import ExpertExchange, MixtureRows, MixtureSizes
from octavo.plan.setup import Machine
from octavo.system.distributed import Rank
from octavo.worker.expert_group import LOST_MACHINE, ExpertGroup

logger = logging.getLogger(__name__)

LISTEN_SECONDS = 20.0
"""Time for the head's relay to listen: that of the last generation may just be ending."""
_ALIVE_SECONDS = 0.5
_GONE_SECONDS = 8.0
"""Interval of heartbeats, and time without one after which a connection is broken."""
_LOOK_SECONDS = 0.1
"""Interval of checks for the end."""
# Kinds of messages: a node's machine; all machines are connected; a step has begun; rows.
_HELLO, _WELCOME, _BEGIN, _ROWS = b"h", b"w", b"b", b"r"
_NUMBER_NBYTES = 8
# Most bytes of a message without rows.
_SMALL_NBYTES = 1024


class _Hello(msgspec.Struct):
    """First message of a node's relay."""

    generation: bytes
    first_engine: int
    num_engines: int


class RowCopier:
    """Reads and writes a mixture's rows as messages.

    Args:
        exchange: exchange of the ranks, attached to their memory.
        sizes: sizes of the mixture.
    """

    def __init__(self, exchange: ExpertExchange, sizes: MixtureSizes) -> None:
        self._rows: MixtureRows = exchange.rows(sizes)
        self._size, self._sizes = exchange.slot_size, sizes
        ranks, per_engine = exchange.rank.size, exchange.per_engine
        self._engine_of = np.empty(sizes.experts, np.int64)
        """Engine that has each expert."""
        for rank in range(ranks):
            self._engine_of[list(Rank(rank, ranks).experts(sizes.experts))] = rank // per_engine

    @property
    def largest(self) -> int:
        """Most bytes of a message."""
        rows = self._rows
        slots = sum(it.nbytes for it in (rows.counts, rows.x, rows.ids, rows.factors))
        return max(slots, rows.results.nbytes)

    def read_tokens(self, engines: Sequence[int]) -> bytes:
        """Return the tokens in the slots of engines: the counts, and the tokens of each slot."""
        rows, parts = self._rows, [self._rows.counts[list(engines)].tobytes()]
        for engine in engines:
            begin = engine * self._size
            slot = slice(begin, begin + int(rows.counts[engine]))
            parts += [part[slot].tobytes() for part in (rows.x, rows.ids, rows.factors)]
        return b"".join(parts)

    def write_tokens(self, engines: Sequence[int], data: bytes) -> None:
        """Write tokens to the slots of engines; see `read_tokens`.

        Raises:
            EngineDeadError: the message is invalid.
        """
        rows, at = self._rows, 4 * len(engines)
        if len(data) < at:
            raise EngineDeadError(f"a machine sent {len(data)} bytes instead of {at} or more")
        counts = np.frombuffer(data, np.int32, len(engines))
        if counts.min() < 0 or counts.max() > self._size:
            raise EngineDeadError(
                f"a machine sent {counts.min()} to {counts.max()} tokens for {self._size} places"
            )
        token = rows.x[0].nbytes + rows.ids[0].nbytes + rows.factors[0].nbytes
        _check_size(data, at + int(counts.sum()) * token)
        for engine, count in zip(engines, counts.tolist(), strict=True):
            begin = engine * self._size
            for part in (rows.x, rows.ids, rows.factors):
                slot = part[begin : begin + count]
                numbers = np.frombuffer(data, part.dtype, slot.size, at)
                if part is rows.ids and count:
                    self._check_experts(int(numbers.min()), int(numbers.max()))
                slot[:] = numbers.reshape(slot.shape)
                at += slot.nbytes
        rows.counts[list(engines)] = counts

    def _check_experts(self, first: int, last: int) -> None:
        if first < 0 or last >= self._sizes.experts:
            raise EngineDeadError(
                f"a machine sent experts {first} to {last} of {self._sizes.experts}"
            )

    def read_results(self, owners: Sequence[int], engines: Sequence[int]) -> bytes:
        """Return results of the engines `owners` for the tokens of `engines`."""
        return self._rows.results[self._places(owners, engines)].tobytes()

    def write_results(self, owners: Sequence[int], engines: Sequence[int], data: bytes) -> None:
        """Write results of the engines `owners` for the tokens of `engines`.

        Raises:
            EngineDeadError: the message is invalid.
        """
        results, places = self._rows.results, self._places(owners, engines)
        _check_size(data, len(places) * results.shape[1])
        results[places] = np.frombuffer(data, np.uint8).reshape(len(places), results.shape[1])

    def _places(self, owners: Sequence[int], engines: Sequence[int]) -> NDArray[np.int64]:
        """Return the places of pairs in the results, in ascending order.

        Pairs are sorted as by `Experts::sort` in csrc/experts.cpp: by expert, then by token.
        """
        counts, top_k = self._rows.counts, self._sizes.top_k
        slots = [
            self._rows.ids[i * self._size : i * self._size + int(n)].ravel()
            for i, n in enumerate(counts)
        ]
        experts = np.concatenate(slots)
        order = np.argsort(experts, kind="stable")
        engine_of = np.repeat(np.arange(len(counts)), counts * top_k)[order]
        owner = self._engine_of[experts[order]]
        found = np.isin(engine_of, list(engines)) & np.isin(owner, list(owners))
        return np.flatnonzero(found)


class ExpertRelay:
    """Relay of this machine: a thread that is the last rank of the machine's group.

    Args:
        machine: this machine.
        path: file with the memory of the machine's group; a rank has made it.
        exchange: exchange of the ranks.

    Raises:
        OSError: the memory cannot be opened.
    """

    def __init__(self, machine: Machine, path: str, exchange: ExpertExchange) -> None:
        self._exchange = exchange.for_relay()
        self._group = ExpertGroup(path, self._exchange, lost=LOST_MACHINE)
        self._copiers = [RowCopier(self._exchange, sizes) for sizes in exchange.mixtures]
        largest = max((copier.largest for copier in self._copiers), default=0)
        self._link = (_HeadLink if machine.first_engine == 0 else _NodeLink)(
            machine,
            num_engines=exchange.num_engines,
            most_nbytes=largest + _SMALL_NBYTES,
            per_step=2 * len(self._copiers),
            announce=self._group.announce,
        )
        self._thread = threading.Thread(target=self._run, name="octavo-experts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End this machine's generation, and the connections. May be called twice."""
        self._link.stop()
        self._group.end()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._link.wait_for_machines()
            while True:
                while not self._group.wait_for_step():
                    self._link.check()
                self._group.run(self._step)
        except EngineStoppedError:
            pass  # the machine's ranks end, too
        except EngineDeadError as error:
            logger.info("the exchange with other machines ends: %s", error)
        except Exception:
            logger.exception("the exchange with other machines failed")
        finally:
            self._group.end()
            self._link.close()

    def _step(self) -> None:
        for copier in self._copiers:
            self._exchange.join(partial(self._link.exchange, _read_tokens, _write_tokens, copier))
            self._exchange.join(partial(self._link.exchange, _read_results, _write_results, copier))


@dataclass
class _Peer:
    """Another machine, as this one sees it."""

    name: bytes
    """Name of its socket; empty: the head."""
    near: list[int]
    """Engines whose rows this machine sends to it."""
    far: list[int]
    """Engines whose rows it sends."""
    num_heard: int = 0
    """Number of its messages with rows."""


def _read_tokens(copier: RowCopier, peer: _Peer) -> bytes:
    return copier.read_tokens(peer.near)


def _write_tokens(copier: RowCopier, peer: _Peer, data: bytes) -> None:
    copier.write_tokens(peer.far, data)


def _read_results(copier: RowCopier, peer: _Peer) -> bytes:
    return copier.read_results(peer.near, peer.far)


def _write_results(copier: RowCopier, peer: _Peer, data: bytes) -> None:
    copier.write_results(peer.far, peer.near, data)


class _Link(ABC):
    """Connections of a machine, with a thread that owns their socket.

    Args:
        machine: this machine.
        num_engines: number of engines on all machines.
        most_nbytes: most bytes of a message.
        per_step: number of exchanges in a step.
        announce: called with the number of a step that another machine has begun.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        num_engines: int,
        most_nbytes: int,
        per_step: int,
        announce: Callable[[int], object],
    ) -> None:
        self._machine, self._num_engines = machine, num_engines
        self._per_step, self._announce = per_step, announce
        self._num_exchanges = 0
        self._inbox: queue.SimpleQueue[tuple[_Peer, bytes]] = queue.SimpleQueue()
        self._met, self._ended = threading.Event(), threading.Event()
        self._failure = "the relay was closed"
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._make_socket()
        self._socket.setsockopt(zmq.MAXMSGSIZE, most_nbytes)
        self._outbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._sender: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        for socket in (self._outbox, self._sender, self._socket):
            socket.set_hwm(0)  # the exchanges bound the messages in transit
            socket.setsockopt(zmq.LINGER, 0)
        self._outbox.bind("inproc://outbox")
        self._sender.connect("inproc://outbox")
        self._thread = threading.Thread(target=self._run, name="octavo-expert-link", daemon=True)
        self._thread.start()

    def wait_for_machines(self) -> None:
        """Wait until all machines of the generation are connected.

        Raises:
            EngineDeadError: a connection failed.
        """
        while not self._met.wait(_LOOK_SECONDS):
            self.check()

    def check(self) -> None:
        """Raise an `EngineDeadError` if a connection has failed, or the link is closed."""
        if self._ended.is_set():
            raise EngineDeadError(self._failure)

    @abstractmethod
    def exchange(
        self,
        read: Callable[[RowCopier, _Peer], bytes],
        write: Callable[[RowCopier, _Peer, bytes], None],
        copier: RowCopier,
    ) -> None:
        """Exchange rows with all other machines.

        Args:
            read: returns the rows for another machine.
            write: writes the rows of another machine.
            copier: passed to both.

        Raises:
            EngineDeadError: a connection failed, or a message is invalid.
        """

    def stop(self) -> None:
        """Request the end. Any thread may call it."""
        self._ended.set()

    def close(self) -> None:
        """End the connections; for the thread that exchanges rows."""
        self._ended.set()
        self._thread.join()
        self._sender.close()
        self._context.destroy(linger=0)

    @abstractmethod
    def _make_socket(self) -> zmq.Socket[bytes]:
        """Return the socket; the thread opens it."""

    @abstractmethod
    def _open(self) -> None:
        """Listen, or begin to connect."""

    @abstractmethod
    def _take(self, frames: list[bytes]) -> None:
        """Process a message of the socket.

        Raises:
            EngineDeadError: the message is invalid.
        """

    def _look(self) -> None:
        """Look after the connection."""

    def _receive(self) -> tuple[_Peer, bytes]:
        """Wait for the rows of another machine."""
        while True:
            try:
                return self._inbox.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self.check()

    def _send(self, peer: _Peer, kind: bytes, number: int, data: bytes = b"") -> None:
        """Send a message; for the thread that exchanges rows."""
        try:
            self._sender.send_multipart(_message(peer, kind, number, data), zmq.NOBLOCK)
        except zmq.ZMQError:
            raise EngineDeadError(self._failure) from None

    def _take_rows(self, peer: _Peer, number: int, data: bytes) -> None:
        peer.num_heard += 1
        if number != peer.num_heard or number > self._num_exchanges + 1:
            raise EngineDeadError("another machine sent rows that are not the next ones")
        self._inbox.put((peer, data))

    def _run(self) -> None:
        try:
            self._open()
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._outbox, zmq.POLLIN)
            while not self._ended.is_set():
                ready = dict(poller.poll(int(1000 * _LOOK_SECONDS)))
                self._look()
                for frames in _read_all(self._outbox, ready):
                    self._socket.send_multipart(frames)
                for frames in _read_all(self._socket, ready):
                    self._take(frames)
        except EngineDeadError as error:
            self._failure = str(error)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._ended.set()
            self._socket.disable_monitor()
            self._socket.close()
            self._outbox.close()


class _HeadLink(_Link):
    """The head's link: it listens, and passes on what the nodes have for each other."""

    def _make_socket(self) -> zmq.Socket[bytes]:
        self._peers: dict[bytes, _Peer] = {}
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey = self._machine.secret
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # for a node that connects again
        _set_options(socket)
        return socket

    def _open(self) -> None:
        end = time.monotonic() + LISTEN_SECONDS
        while True:
            try:
                self._socket.bind(self._machine.address)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > end:
                    raise EngineDeadError(
                        f"cannot listen at {self._machine.address} ({error.strerror})"
                    ) from None
                time.sleep(_LOOK_SECONDS)
            else:
                return

    def exchange(
        self,
        read: Callable[[RowCopier, _Peer], bytes],
        write: Callable[[RowCopier, _Peer, bytes], None],
        copier: RowCopier,
    ) -> None:
        self._num_exchanges += 1
        step, place = divmod(self._num_exchanges - 1, self._per_step)
        if place == 0:
            for peer in self._peers.values():
                self._send(peer, _BEGIN, step + 1)
        for _ in self._peers:  # each sends only the rows of this exchange
            peer, data = self._receive()
            write(copier, peer, data)
        for peer in self._peers.values():
            self._send(peer, _ROWS, self._num_exchanges, read(copier, peer))

    def _take(self, frames: list[bytes]) -> None:
        name, *rest = frames
        peer = self._peers.get(name)
        try:
            kind, number, data = rest
        except ValueError:
            return
        if kind == _HELLO:
            self._greet(name, data)
        elif kind == _ROWS and peer is not None:
            step, place = divmod(_number(number) - 1, self._per_step)
            if place == 0:
                self._announce(step + 1)
                for other in self._peers.values():
                    if other is not peer:
                        self._socket.send_multipart(_message(other, _BEGIN, step + 1))
            self._take_rows(peer, _number(number), data)

    def _greet(self, name: bytes, data: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(data, type=_Hello)
        except msgspec.DecodeError:
            return
        if hello.generation != self._machine.generation:
            return  # its engines are ended, or those of this machine
        if name not in self._peers and not self._met.is_set():
            far = [*range(hello.first_engine, hello.first_engine + hello.num_engines)]
            taken = {*range(self._machine.num_engines)}.union(
                *(p.far for p in self._peers.values())
            )
            if not far or taken & {*far} or far[-1] >= self._num_engines:
                logger.warning("another machine names engines %s, which are not its own", far)
                return
            near = [i for i in range(self._num_engines) if i not in far]
            self._peers[name] = _Peer(name, near, far)
            if len(taken) + len(far) == self._num_engines:
                self._met.set()
        if self._met.is_set():
            for peer in self._peers.values():
                self._socket.send_multipart(_message(peer, _WELCOME))


class _NodeLink(_Link):
    """The link of another machine: it connects to the head."""

    def _make_socket(self) -> zmq.Socket[bytes]:
        machine = self._machine
        near = [*range(machine.first_engine, machine.first_engine + machine.num_engines)]
        self._head = _Peer(b"", near, [i for i in range(self._num_engines) if i not in near])
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = machine.public, machine.secret
        socket.curve_serverkey = machine.public
        _set_options(socket)
        return socket

    def _open(self) -> None:
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        self._socket.connect(self._machine.address)

    def _look(self) -> None:
        from zmq.utils.monitor import recv_monitor_message  # brings asyncio; few engines need it

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._met.is_set():
                machine = self._machine
                hello = _Hello(machine.generation, machine.first_engine, machine.num_engines)
                data = msgspec.msgpack.encode(hello)
                self._socket.send_multipart(_message(self._head, _HELLO, 0, data))
            elif self._met.is_set():
                raise EngineDeadError("the connection to the head's engines broke")

    def exchange(
        self,
        read: Callable[[RowCopier, _Peer], bytes],
        write: Callable[[RowCopier, _Peer, bytes], None],
        copier: RowCopier,
    ) -> None:
        self._num_exchanges += 1
        self._send(self._head, _ROWS, self._num_exchanges, read(copier, self._head))
        head, data = self._receive()
        write(copier, head, data)

    def _take(self, frames: list[bytes]) -> None:
        kind, number, data = frames
        if kind == _WELCOME:
            self._met.set()
        elif kind == _BEGIN:
            self._announce(_number(number))
        elif kind == _ROWS:
            self._take_rows(self._head, _number(number), data)


def _set_options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * _ALIVE_SECONDS))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * _GONE_SECONDS))


def _message(peer: _Peer, kind: bytes, number: int = 0, data: bytes = b"") -> list[bytes]:
    """Return the frames of a message; those for a node begin with its name."""
    frames = [kind, number.to_bytes(_NUMBER_NBYTES, "little"), data]
    return [peer.name, *frames] if peer.name else frames


def _number(data: bytes) -> int:
    return int.from_bytes(data[:_NUMBER_NBYTES], "little")


def _read_all(
    socket: zmq.Socket[bytes], ready: dict[zmq.Socket[bytes], int]
) -> Iterator[list[bytes]]:
    """Return the messages that a socket has received."""
    while socket in ready:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _check_size(data: bytes, nbytes: int) -> None:
    if len(data) != nbytes:
        raise EngineDeadError(f"a machine sent {len(data)} bytes of rows instead of {nbytes}")
