"""Connection of engines on other machines: one port of the head node, protected by a key.

A node (`node.py`) joins, and starts engine processes on request. Each of these connects to the same
port itself, once for its requests and once for its outputs. Everything is encrypted with CurveZMQ
under one key pair that is derived from the cluster's key. The handshake needs its public half,
which is never sent, so messages without the key are dropped. Nothing is unpickled.
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
from socket import AI_PASSIVE, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.monitor
from zmq.utils import z85

from octavo import __version__
from octavo.engine.core_messages import CoreProcessSetup, CoreReady, ReachedBy
from octavo.engine.head import ENGINE_IN, HELLO, set_limits
from octavo.errors import ConfigError, NodeMissingError
from octavo.fleet.core_launcher import CoreLauncher

logger = logging.getLogger(__name__)

# Kinds of messages between a node and its head, besides those with engines (`core_messages.py`).
JOIN, ALIVE, EXITED, LEAVE = b"j", b"a", b"e", b"l"
WELCOME, REFUSED, FORGOTTEN, LAUNCH, KILL, STOP, SPARE = (b"w", b"r", b"f", b"s", b"k", b"x", b"p")
NODE = b"N"
"""Prefix of the names of nodes' sockets."""

ALIVE_SECONDS = 0.5
"""Interval of heartbeats. If one cannot be sent, as the connection is closed, the other side
has ended; the same applies to an engine's message."""
GONE_SECONDS = 8.0
"""Time without a heartbeat after which the other side counts as dead."""
_MIN_KEY_CHARS = 32
# Time for a node to report how an engine has ended.
_EXIT_SECONDS = 0.3
_T = TypeVar("_T")


class Join(msgspec.Struct):
    """First message of a node."""

    version: str
    model: str
    """Hash of the model, see `identity.model_hash`."""
    data_parallel_size: int
    start_rank: int
    num_engines: int
    host: str
    """Host name of the machine."""


class Launch(msgspec.Struct):
    """Request to start an engine process."""

    launch_id: bytes
    setup: CoreProcessSetup


class Kill(msgspec.Struct):
    """Request to kill an engine process at once."""

    launch_id: bytes
    reason: str


class Exited(msgspec.Struct):
    """Notification that an engine process has ended."""

    launch_id: bytes
    how: str
    was_stopped: bool = False
    """True if a signal such as SIGSTOP had stopped it."""


@dataclass(frozen=True)
class ClusterKey:
    """CurveZMQ key pair shared by the machines of a cluster, as Z85."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def from_file(cls, path: str) -> ClusterKey:
        """Derive the pair from a file's text.

        Raises:
            ConfigError: the file cannot be read, is readable by other users, or is too short for a
                secret.
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
    """Return the address in ZMQ's notation."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@dataclass(eq=False)
class _Node:
    """Node that has joined."""

    name: bytes
    host: str
    ranks: range
    heard: float
    """Time of the last heartbeat, by `time.monotonic`."""
    launches: set[bytes] = field(default_factory=set)


class Hub:
    """Port of the head node: keeps track of the nodes, and transfers the messages of their engines.

    It may be created before there is an event loop; all other methods need one.

    Args:
        host: name or address to listen on.
        port: TCP port.
        key: the cluster's key.
        model: hash of the model, see `Join`.
        size: total number of engines.
        local: number of engines on this machine, the first ones.
        on_join: called with the ranks of each node that joins.

    Raises:
        ConfigError: the hub cannot listen on the address.
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
        """Times of nodes' requests for engines of other nodes, until it is known if those are
        alive."""
        self._processes: dict[bytes, RemoteProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()
        self._socket = router = self._context.socket(zmq.ROUTER)
        router.curve_server = True
        router.curve_secretkey = key.secret
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # for nodes that return early
        set_limits(router)
        self._reserved: socket | None = None
        try:
            # ZMQ itself only listens on numeric addresses.
            found = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)
            self._family, self._host = found[0][0], str(found[0][4][0])
            router.bind(tcp_address(self._host, port))
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"data_parallel_address={host!r}, data_parallel_rpc_port={port}: cannot listen "
                f"there ({error.strerror}); choose an address of this machine and a free port."
            ) from None
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.decode()
        """Address of the hub, in ZMQ's notation."""
        self._monitor = router.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )

    def reserve_next_port(self) -> str:
        """Reserve the port after the hub's for processes of this machine; return its address.

        It is bound without listening. So others cannot have it, and each process may listen there.

        Raises:
            ConfigError: the port is taken, or no port is free.
        """
        port = int(self.address.rpartition(":")[2]) + 1
        reserved = socket(self._family, SOCK_STREAM)
        try:
            reserved.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            reserved.bind((self._host, port))
        except (OSError, OverflowError) as error:
            reserved.close()
            raise ConfigError(
                f"data_parallel_rpc_port={port - 1}: engines that divide experts need the port "
                f"after it, too, and {port} cannot be used ({error}); choose another one."
            ) from None
        self._reserved = reserved
        return tcp_address(self._host, port)

    def attach(self) -> None:
        """Start to listen in the running event loop; later calls do nothing."""
        if not self._tasks:
            loop = asyncio.get_running_loop()
            coroutines = self._receive(), self._look_after_nodes(), self._watch_handshakes()
            self._tasks = [loop.create_task(coroutine) for coroutine in coroutines]

    def has(self, rank: int) -> bool:
        """Return True if a node has joined for an engine."""
        return any(rank in node.ranks for node in self._nodes.values())

    def launch(self, rank: int, setup: CoreProcessSetup) -> RemoteProcess:
        """Have a node start an engine process.

        Raises:
            NodeMissingError: no node has joined for the engine.
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
        """Send a message to a node or an engine; messages to an ended one are dropped."""
        self.send(name, [kind, msgspec.msgpack.encode(message)])

    def send(self, name: bytes, frames: list[bytes]) -> None:
        """Send frames at once, or in the next turn of the event loop."""
        if not self._context.closed:
            sent = asyncio.ensure_future(self._socket.send_multipart([name, *frames]))
            sent.add_done_callback(partial(self._note_sent, name))

    def _note_sent(self, name: bytes, sent: asyncio.Future[Any]) -> None:
        """Handle the result of sending a message."""
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
        """Have the node of an engine keep a warm interpreter ready."""
        for node in self._nodes.values():
            if rank in node.ranks:
                self.tell(node.name, SPARE)

    def forget(self, launch_id: bytes) -> None:
        """Drop a process that is no longer needed."""
        process = self._processes.pop(launch_id, None)
        if process is not None and (node := self._nodes.get(process.node)) is not None:
            node.launches.discard(launch_id)

    async def shutdown(self) -> None:
        """Request the end of the nodes, and close the port."""
        for node in self._nodes.values():
            self.tell(node.name, LEAVE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.close()

    def close(self) -> None:
        """Shut down without an event loop: nodes notice the closed port. May be called twice."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._socket.close()
            self._monitor.close()
            self._context.destroy(linger=500)
        if self._reserved is not None:
            self._reserved.close()

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
                logger.warning("a node or an engine sent an invalid message; it is ignored")

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
        if name in self._nodes:  # the first WELCOME was lost
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
            # A holder may have died unnoticed, and this node may replace it.
            asked = self._asked.setdefault(name, time.monotonic())
            if any(node.heard <= asked for node in holders):
                return  # the node repeats its request
            taken = min(set(holders[0].ranks) & set(ranks))
            why = f"engine {taken} is another node's already"
        self._asked.pop(name, None)
        if why is not None:
            logger.warning("rejected the node %s: %s", join.host, why)
            self.tell(name, REFUSED, why)
            return
        logger.info("the node %s has joined, for engines %s", join.host, _span(ranks))
        self._nodes[name] = _Node(name, join.host, ranks, time.monotonic())
        self.tell(name, WELCOME)
        self._on_join(ranks)

    async def _look_after_nodes(self) -> None:
        # Time is counted in sleep intervals, so that suspending the head does not make nodes look
        # dead.
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
            if count & (count - 1) == 0:  # nodes retry continually
                logger.warning(
                    "rejected a connection without the cluster's key (another cluster_key_file?; "
                    "times: %d)",
                    count,
                )


class RemoteProcess:
    """Engine process on another machine; implements `EngineProcess`.

    Args:
        hub: connection to the node.
        node: name of its node's socket.
        host: host name of the node.
        launch_id: id of the process.
    """

    pid = -1
    """Always -1: its process id on the other machine is meaningless here."""

    def __init__(self, hub: Hub, node: bytes, host: str, launch_id: bytes) -> None:
        self.node, self._host = node, host
        self._hub, self._launch_id = hub, launch_id
        self._ended: str | None = None
        self.was_stopped = False
        """True if a signal such as SIGSTOP had stopped it, or it was killed as a victim."""
        self._unsent: list[tuple[bytes, bytes]] | None = []
        """Messages to send once it is connected; None: it is connected."""
        self._said: deque[tuple[bytes, bytes]] = deque()
        self._news = asyncio.Event()
        self._num_sent = self._num_heard = 0
        self.closed = False
        """True after `close`."""

    def open_channel(self) -> RemoteProcess:
        """Implement `EngineProcess`."""
        self._hub.attach()
        return self

    def describe_exit(self) -> str | None:
        """Implement `EngineProcess`."""
        return self._ended

    def kill(self, reason: str, *, is_victim: bool = False) -> None:
        """Implement `EngineProcess`; drop the process even if the node does not answer."""
        if self._ended is None:
            self.was_stopped = self.was_stopped or is_victim
            self._hub.tell(self.node, KILL, Kill(self._launch_id, reason))
            self.end(f"{reason} and was killed")

    def kill_if_stopped(self, nap: float, limit: float) -> None:
        """Do nothing: the node checks for stopped processes."""

    def shutdown(self, timeout: float = 5.0) -> None:
        """Do nothing: the node ends the process."""

    def take(self, frames: list[bytes]) -> None:
        """Process a message that the engine has sent."""
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
        """Record the end of the process, or of its connection."""
        if self._ended is None:
            self._ended = f"{how} (on {self._host})" if self._host not in how else how
            self._news.set()

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Implement `Channel`, without waiting."""
        if self._unsent is not None:
            self._unsent.append((kind, payload))
        else:
            self._send(kind, payload)

    async def receive(self, seconds: float) -> tuple[bytes, bytes] | None:
        """Implement `Channel`."""
        if not self._said and self._ended is None:
            self._news.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                return None
        return self.receive_nowait()

    def receive_nowait(self) -> tuple[bytes, bytes] | None:
        """Implement `Channel`."""
        return self._said.popleft() if self._said else None

    def close(self) -> None:
        """Implement `Channel`: the node ends the process."""
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
    """Launcher of an engine's processes on the node that has joined for it.

    Args:
        hub: connection to the nodes.
        launcher: launcher with the settings.
        rank: index of the engine.
    """

    def __init__(self, hub: Hub, launcher: CoreLauncher, rank: int) -> None:
        self._hub, self._launcher, self._rank = hub, launcher, rank

    def launch(self, ready: CoreReady | None, engine_index: int = 0) -> RemoteProcess:
        """Implement `CoreLauncher`."""
        process = self._hub.launch(self._rank, self._launcher.make_setup(ready, engine_index))
        self._launcher.note_launch(engine_index)
        return process

    def make_spare(self) -> None:
        """Implement `CoreLauncher`."""
        self._hub.make_spare(self._rank)

    def shutdown(self) -> None:
        """Do nothing: the hub requests the node's end."""


def _decode(payload: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(payload, type=kind)


def _span(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1}"
