"""How engines on other machines are reached: one port of the head node, for who has the key.

A node (`node.py`) joins, and starts engine processes as it is told; each of these connects to the
same port by itself, once for what it is asked and once for what it says. Everything is encrypted
with CurveZMQ under one key pair that is made from the cluster's key. The handshake needs its public
half, which is never sent, so nobody without the key gets a message through. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import AI_PASSIVE, SOCK_STREAM, getaddrinfo
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.monitor
from zmq.utils import z85

from octavo import __version__
from octavo.engine.head import ENGINE_IN, HELLO, set_limits
from octavo.engine.wire import CoreProcessSetup, CoreReady, ReachedBy
from octavo.errors import ConfigError, NodeMissingError
from octavo.fleet.core_launcher import CoreLauncher

logger = logging.getLogger(__name__)

# Kinds of message between a node and its head, beside those of `wire.py` with engines.
JOIN, ALIVE, EXITED, LEAVE = b"j", b"a", b"e", b"l"
WELCOME, REFUSED, FORGOTTEN, LAUNCH, KILL, STOP, SPARE = (b"w", b"r", b"f", b"s", b"k", b"x", b"p")
NODE = b"N"
"""The name of a node's socket begins with it."""

ALIVE_SECONDS = 0.5
"""Between two signs of life. One that cannot be sent, since the connection is closed, tells that
the other side is gone; so does an engine's message."""
GONE_SECONDS = 8.0
"""Without one, after which the other side is gone."""
_MIN_KEY_CHARS = 32
# What a node may take to tell how an engine has ended.
_EXIT_SECONDS = 0.3
_T = TypeVar("_T")


class Join(msgspec.Struct):
    """A node's first message."""

    version: str
    model: str
    """See `identity.model_hash`."""
    data_parallel_size: int
    start_rank: int
    num_engines: int
    host: str
    """What people call the machine."""


class Launch(msgspec.Struct):
    """Start an engine process."""

    launch_id: bytes
    setup: CoreProcessSetup


class Kill(msgspec.Struct):
    """End one at once."""

    launch_id: bytes
    reason: str


class Exited(msgspec.Struct):
    """One has ended."""

    launch_id: bytes
    how: str
    was_stopped: bool = False
    """Whether a signal such as SIGSTOP had held it."""


@dataclass(frozen=True)
class ClusterKey:
    """What the machines of a cluster have in common: a CurveZMQ key pair, as Z85."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def from_file(cls, path: str) -> ClusterKey:
        """The pair that is made from a file's text.

        Raises:
            ConfigError: it cannot be read, others may read it, or it is too short to be a secret.
        """
        how = f"make one by `(umask 077; openssl rand -hex 32 > {path})`, the same for all machines"
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(2**16).strip()
        except OSError as error:
            raise ConfigError(
                f"cluster_key_file={path!r} cannot be read ({error.strerror}); {how}."
            ) from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"cluster_key_file={path!r} can be read by others; restrict it by `chmod 600`."
            )
        if len(text) < _MIN_KEY_CHARS:
            raise ConfigError(
                f"cluster_key_file={path!r} has {len(text)} characters, and a secret of at least "
                f"{_MIN_KEY_CHARS} is needed; {how}."
            )
        secret = z85.encode(hashlib.sha256(b"octavo cluster key\0" + text).digest())
        return cls(zmq.curve_public(secret), secret)


def tcp_address(host: str, port: int) -> str:
    """As ZMQ writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@dataclass(eq=False)
class _Node:
    """A node that has joined."""

    name: bytes
    host: str
    ranks: range
    heard: float
    """When it gave the last sign of life, by `time.monotonic`."""
    launches: set[bytes] = field(default_factory=set)


class Hub:
    """The head node's port: knows the nodes, and carries what engines there are asked and say.

    May be made before there is an event loop; all else belongs to one.

    Args:
        host: name or address to listen on.
        port: of TCP.
        key: the cluster's.
        model: see `Join`.
        size: engines in all.
        local: those of them that are on this machine, the first ones.
        on_join: is told of the ranks of each node that joins.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: ClusterKey,
        *,
        model: str,
        size: int,
        local: int,
        on_join: Callable[[range], None],
    ) -> None:
        self._model, self._size, self._local = model, size, local
        self._on_join = on_join
        self._key = key
        self._nodes: dict[bytes, _Node] = {}
        self._asked: dict[bytes, float] = {}
        """When nodes asked for engines that others have, while it is open whether these live."""
        self._processes: dict[bytes, RemoteProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey = key.secret
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who comes back is not kept out by its ghost
        set_limits(socket)
        try:
            # ZMQ itself listens on numbers only.
            found = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)
            socket.bind(tcp_address(str(found[0][4][0]), port))
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"data_parallel_address={host!r}, data_parallel_rpc_port={port}: cannot listen "
                f"there ({error.strerror}); choose an address of this machine and a free port."
            ) from None
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.decode()
        """Where it listens, as ZMQ writes it."""
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )

    def attach(self) -> None:
        """Begins to listen, in the running event loop; later calls do nothing."""
        if not self._tasks:
            loop = asyncio.get_running_loop()
            coroutines = self._receive(), self._look_after_nodes(), self._watch_handshakes()
            self._tasks = [loop.create_task(coroutine) for coroutine in coroutines]

    def has(self, rank: int) -> bool:
        """Whether there is a node for an engine."""
        return any(rank in node.ranks for node in self._nodes.values())

    def launch(self, rank: int, setup: CoreProcessSetup) -> RemoteProcess:
        """Has a node start an engine process.

        Raises:
            NodeMissingError: there is no such node.
        """
        node = next((n for n in self._nodes.values() if rank in n.ranks), None)
        if node is None:
            raise NodeMissingError(f"no node has joined for engine {rank}")
        launch_id = os.urandom(16)
        reached = ReachedBy("", self._key.public, self._key.secret, launch_id)
        setup = msgspec.structs.replace(setup, reached_by=reached)
        process = RemoteProcess(self, node.name, node.host, launch_id)
        self._processes[launch_id] = process
        node.launches.add(launch_id)
        self.tell(node.name, LAUNCH, Launch(launch_id, setup))
        return process

    def tell(self, name: bytes, kind: bytes, message: object = None) -> None:
        """Sends to a node or an engine; to one that is gone, which is found otherwise, nothing."""
        self.send(name, [kind, msgspec.msgpack.encode(message)])

    def send(self, name: bytes, frames: list[bytes]) -> None:
        """Sends frames at once, or with the next turn of the event loop."""
        if not self._context.closed:
            sent = asyncio.ensure_future(self._socket.send_multipart([name, *frames]))
            sent.add_done_callback(partial(self._note_sent, name))

    def _note_sent(self, name: bytes, sent: asyncio.Future[Any]) -> None:
        """A message has been sent, or could not be."""
        if sent.cancelled() or (error := sent.exception()) is None:
            return
        node, process = self._nodes.get(name), self._processes.get(name[1:])
        if node is not None:
            self._lose(node, "has closed the connection")
        elif process is not None:
            # Its node may know more.
            asyncio.get_running_loop().call_later(
                _EXIT_SECONDS, process.end, "the engine has closed the connection"
            )
        elif not isinstance(error, zmq.ZMQError):
            raise error

    def make_spare(self, rank: int) -> None:
        """Has the node of an engine keep a warm interpreter ready."""
        for node in self._nodes.values():
            if rank in node.ranks:
                self.tell(node.name, SPARE)

    def forget(self, launch_id: bytes) -> None:
        """A process is of no interest any more."""
        process = self._processes.pop(launch_id, None)
        if process is not None and (node := self._nodes.get(process.node)) is not None:
            node.launches.discard(launch_id)

    async def shutdown(self) -> None:
        """Sends the nodes home."""
        for node in self._nodes.values():
            self.tell(node.name, LEAVE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.close()

    def close(self) -> None:
        """`shutdown` for callers without an event loop: nodes find out. May be called twice."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._socket.close()
            self._monitor.close()
            self._context.destroy(linger=500)

    async def _receive(self) -> None:
        while True:
            name, *frames = await self._socket.recv_multipart()
            try:
                if name[:1] == NODE:
                    self._hear_node(name, *frames)
                else:
                    process = self._processes.get(name[1:])
                    if process is not None:
                        process.take(frames)
            except (msgspec.DecodeError, ValueError, TypeError):
                logger.warning("a node or an engine sent what is no message; it is ignored")

    def _hear_node(self, name: bytes, kind: bytes, payload: bytes) -> None:
        node = self._nodes.get(name)
        if kind == JOIN:
            self._admit(name, _decode(payload, Join))
        elif node is None:
            self.tell(name, FORGOTTEN)
        elif kind == ALIVE:
            node.heard = time.monotonic()
        elif kind == EXITED:
            exited = _decode(payload, Exited)
            process = self._processes.get(exited.launch_id)
            if process is not None:
                process.was_stopped = exited.was_stopped
                process.end(exited.how)
        elif kind == LEAVE:
            self._lose(node, "was stopped")

    def _admit(self, name: bytes, join: Join) -> None:
        if name in self._nodes:  # the first welcome was lost
            self.tell(name, WELCOME)
            return
        ranks = range(join.start_rank, join.start_rank + join.num_engines)
        why = None
        if join.version != __version__:
            why = f"it runs Octavo {join.version}, the head node {__version__}"
        elif join.model != self._model:
            why = "its model has other files than the head node's"
        elif join.data_parallel_size != self._size:
            why = (
                f"it says data_parallel_size={join.data_parallel_size}, the head node {self._size}"
            )
        elif not ranks or ranks[0] < self._local or ranks[-1] >= self._size:
            why = (
                f"its engines are {_span(ranks)}, and those of nodes are "
                f"{_span(range(self._local, self._size))}: see --data-parallel-start-rank and "
                "--data-parallel-size-local"
            )
        elif holders := [node for node in self._nodes.values() if set(node.ranks) & set(ranks)]:
            # One that has died may not have been missed yet, and this one is to take its place.
            asked = self._asked.setdefault(name, time.monotonic())
            if any(node.heard <= asked for node in holders):
                return  # it asks again
            taken = min(set(holders[0].ranks) & set(ranks))
            why = f"engine {taken} is another node's already"
        self._asked.pop(name, None)
        if why is not None:
            logger.warning("the node %s was refused: %s", join.host, why)
            self.tell(name, REFUSED, why)
            return
        logger.info("the node %s has joined, for engines %s", join.host, _span(ranks))
        self._nodes[name] = _Node(name, join.host, ranks, time.monotonic())
        self.tell(name, WELCOME)
        self._on_join(ranks)

    async def _look_after_nodes(self) -> None:
        # Counted in naps, so that a head that slept does not take all nodes for dead.
        while True:
            before = time.monotonic()
            await asyncio.sleep(ALIVE_SECONDS)
            overslept = time.monotonic() - before - ALIVE_SECONDS
            for node in list(self._nodes.values()):
                if overslept > ALIVE_SECONDS:
                    node.heard += overslept
                silent = time.monotonic() - node.heard
                if silent > GONE_SECONDS:
                    self._lose(node, f"has not been heard for {silent:.0f} s")
                else:
                    self.tell(node.name, ALIVE)

    def _lose(self, node: _Node, why: str) -> None:
        logger.warning("the node %s %s", node.host, why)
        del self._nodes[node.name]
        self.tell(node.name, FORGOTTEN)
        for launch_id in list(node.launches):
            self._processes[launch_id].end(f"the node {node.host} {why}")

    async def _watch_handshakes(self) -> None:
        count = 0
        while True:
            await zmq.utils.monitor.recv_monitor_message(self._monitor)
            count += 1
            if count & (count - 1) == 0:  # they try again and again
                logger.warning(
                    "somebody tried to join the cluster without its key (another "
                    "cluster_key_file?), and was turned away (times: %d)",
                    count,
                )


class RemoteProcess:
    """An engine process on another machine; see `CoreProcess`.

    Args:
        hub: how it is reached.
        node: name of its node.
        host: what people call that.
        launch_id: its number.
    """

    pid = -1
    """What it is there says nothing here."""

    def __init__(self, hub: Hub, node: bytes, host: str, launch_id: bytes) -> None:
        self.node, self._host = node, host
        self._hub, self._launch_id = hub, launch_id
        self._ended: str | None = None
        self.was_stopped = False
        """See `EngineProcess`."""
        self._unsent: list[tuple[bytes, bytes]] | None = []
        """Until it is there; None: it is."""
        self._said: deque[tuple[bytes, bytes]] = deque()
        self._news = asyncio.Event()
        self._num_sent = self._num_heard = 0
        self.closed = False
        """See `Channel`."""

    def open_channel(self) -> RemoteProcess:
        """See `CoreProcess`."""
        self._hub.attach()
        return self

    def describe_exit(self) -> str | None:
        """See `CoreProcess`."""
        return self._ended

    def kill(self, reason: str) -> None:
        """See `CoreProcess`; what does not answer is given up all the same."""
        if self._ended is None:
            self._hub.tell(self.node, KILL, Kill(self._launch_id, reason))
            self.end(f"{reason} and was killed")

    def kill_if_stopped(self, nap: float, limit: float) -> None:
        """See `CoreProcess`: its node looks."""

    def shutdown(self, timeout: float = 5.0) -> None:
        """See `CoreProcess`; returns at once."""

    def take(self, frames: list[bytes]) -> None:
        """What it has sent."""
        if frames[0] == HELLO:
            waiting, self._unsent = self._unsent, None
            for kind, payload in waiting or ():
                self._send(kind, payload)
            return
        kind, number, payload = frames
        self._num_heard += 1
        if int.from_bytes(number, "little") != self._num_heard:
            self.kill("messages of the engine were lost when its connection broke, so it ended")
            return
        self._said.append((kind, payload))
        self._news.set()

    def end(self, how: str) -> None:
        """It has ended, or is out of reach for good."""
        if self._ended is None:
            self._ended = f"{how} (on {self._host})" if self._host not in how else how
            self._news.set()

    async def send(self, kind: bytes, payload: bytes) -> None:
        """See `Channel`: waits for nothing."""
        if self._unsent is not None:
            self._unsent.append((kind, payload))
        else:
            self._send(kind, payload)

    async def receive(self, seconds: float) -> tuple[bytes, bytes] | None:
        """See `Channel`."""
        if not self._said and self._ended is None:
            self._news.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                return None
        return self.receive_nowait()

    def receive_nowait(self) -> tuple[bytes, bytes] | None:
        """See `Channel`."""
        return self._said.popleft() if self._said else None

    def close(self) -> None:
        """See `Channel`: the node ends the process."""
        if self._ended is None:
            self._hub.tell(self.node, STOP, self._launch_id)
            self.end("the engine was stopped")
        self._said.clear()
        self.closed = True
        self._hub.forget(self._launch_id)

    def _send(self, kind: bytes, payload: bytes) -> None:
        self._num_sent += 1
        number = self._num_sent.to_bytes(8, "little")
        self._hub.send(ENGINE_IN + self._launch_id, [kind, number, payload])


class RemoteLauncher:
    """See `CoreLauncher`: starts the processes of an engine on whatever node is there for it.

    Args:
        hub: knows the nodes.
        launcher: knows the settings.
        rank: the engine's number.
    """

    def __init__(self, hub: Hub, launcher: CoreLauncher, rank: int) -> None:
        self._hub, self._launcher, self._rank = hub, launcher, rank

    def launch(self, ready: CoreReady | None, engine_index: int = 0) -> RemoteProcess:
        """See `CoreLauncher`."""
        return self._hub.launch(self._rank, self._launcher.make_setup(ready, engine_index))

    def make_spare(self) -> None:
        """See `CoreLauncher`."""
        self._hub.make_spare(self._rank)

    def shutdown(self) -> None:
        """See `CoreLauncher`: the node is sent home by the hub."""


def _decode(payload: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(payload, type=kind)


def _span(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1}"
