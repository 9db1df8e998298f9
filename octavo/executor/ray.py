"""Workers in actors of a Ray cluster, like vLLM's `RayDistributedExecutor`.

Each worker is an actor with a bundle of a placement group. The messages have the same encoding as
between processes of one machine (`worker_messages.py`): Ray pickles only bytes. An actor has a
thread for the worker; one call passes it a message, another waits for its messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import ray
import zmq
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from octavo.errors import ConfigError, EngineDeadError, EngineStoppedError
from octavo.executor.message_queue import QueueClosedError
from octavo.executor.multiproc import MultiprocExecutor, WorkerGroup
from octavo.executor.ray_session import SESSION
from octavo.executor.relay import Relay, RelayKey, find_streams
from octavo.executor.worker_messages import Died, Failure, FromWorker, SetupMessage
from octavo.executor.worker_process import serve
from octavo.plan.setup import WorkerSetup
from octavo.platforms.registry import get_platform
from octavo.system.device import SWITCH_INTERVAL
from octavo.system.distributed import GroupMemory, Rank
from octavo.system.logs import current_logging, setup_logging

logger = logging.getLogger(__name__)

# vLLM's name; it places workers in the same way.
_STRATEGY = "PACK"
_PLACEMENT_SECONDS = 10.0
# Interval of checks for a requested end or a stopped worker.
_CHECK_SECONDS = 0.25
_END_SECONDS = 5.0
_COPIED = ("OCTAVO_", "HF_", "HUGGING_FACE_", "NCCL_")
"""Prefixes of environment variables that workers receive from the executor."""


class RayExecutor(MultiprocExecutor):
    """Executor that runs each rank's worker in an actor; see `MultiprocExecutor`.

    It joins the cluster that this process is connected to, that RAY_ADDRESS names, or that runs on
    this machine; if none exists, it starts one on this machine.

    Raises:
        ConfigError: the cluster cannot be reached or lacks resources, or ranks that compute a stage
            together would be on several machines; see `MultiprocExecutor` for more.
    """

    def _make_memory(self, setup: WorkerSetup) -> int | None:
        # Stages may be on several nodes, each with its own memory.
        return None if setup.rank.num_stages > 1 else super()._make_memory(setup)

    def _make_group(
        self, setup: SetupMessage, rank: Rank, worker_cls: str, memory: int | None
    ) -> WorkerGroup:
        return _ActorGroup(setup, rank, worker_cls, memory)


class ActorSetup(msgspec.Struct):
    """First message to an actor."""

    setup: SetupMessage
    worker_cls: str
    """Class of the worker as module.name; its constructor is that of `Worker`."""
    rank: int
    """Index of the worker among all."""
    tells: bool
    """True for the worker that reports the results of steps."""
    group: tuple[int, int] | None
    """Process and descriptor of the workers' memory, if they compute one model together."""
    host: str
    """Host of the executor: see `_host`."""
    log_level: str
    log_format: str
    log_fields: dict[str, int]


class Place(msgspec.Struct):
    """Location of an actor."""

    pid: int
    host: str
    node: str
    """Host name of the node."""
    node_id: str
    """Ray's id of the node."""


class HostSetup(msgspec.Struct):
    """Message to the first actor of a node if stages may be on several nodes."""

    setup: SetupMessage
    rank: int
    """Rank of the actor."""
    hosts: list[int]
    """Index of each stage's node."""
    public: bytes
    secret: bytes
    """Secret key of the relays between the nodes, and `public` its public key, as Z85."""


class HostMemory(msgspec.Struct):
    """Memory of a node's workers, and its relay."""

    pid: int
    descriptor: int
    address: str
    """Address of the relay; "" if all stages are on this node."""


class WorkerActor:
    """Ray actor with a worker in a thread, and its incoming and outgoing messages."""

    def __init__(self) -> None:
        self._inbox = _Inbox()
        self._outbox = _Outbox()
        self._memory: tuple[int, int] | None = None
        """Descriptor and number of stages, if this actor owns the node's memory."""
        self._relay: Relay | None = None

    def place(self) -> bytes:
        """Return the actor's location, as an encoded `Place`."""
        node_id = ray.get_runtime_context().get_node_id()
        return msgspec.msgpack.encode(Place(os.getpid(), _host(), os.uname().nodename, node_id))

    def make_memory(self, data: bytes) -> bytes:
        """Make the memory of the node's workers, and the relay that mirrors it.

        Args:
            data: an encoded `HostSetup`.

        Returns:
            An encoded `HostMemory`.
        """
        host = msgspec.msgpack.decode(data, type=HostSetup)
        rank = Rank.of(host.rank, host.setup.config.device)
        setup = host.setup.complete(rank, None)
        descriptor = GroupMemory.create(setup.group_nbytes, rank.num_stages)
        self._memory, address = (descriptor, rank.num_stages), ""
        if len({*host.hosts}) > 1:
            self._relay = self._make_relay(host, setup, descriptor)
            address = self._relay.address
        return msgspec.msgpack.encode(HostMemory(os.getpid(), descriptor, address))

    def _make_relay(self, host: HostSetup, setup: WorkerSetup, descriptor: int) -> Relay:
        rank = setup.rank
        return Relay(
            GroupMemory(descriptor, setup.group_nbytes, rank),
            find_streams(setup.group_layout, host.hosts),
            host.hosts[rank.stage],
            RelayKey(host.public, host.secret),
            f"tcp://{ray.util.get_node_ip_address()}:*",
            lambda error: self._outbox.write(Died(Failure.of(error))),
        )

    def connect(self, data: bytes) -> bytes:
        """Connect the relay to those of the other nodes.

        Args:
            data: an encoded dict; see `Relay.connect`.

        Returns:
            An encoded error message, or "".
        """
        assert self._relay is not None
        try:
            self._relay.connect(msgspec.msgpack.decode(data, type=dict[int, tuple[str, str]]))
        except EngineDeadError as error:
            return msgspec.msgpack.encode(str(error))
        return msgspec.msgpack.encode("")

    def start(self, data: bytes) -> None:
        """Start the worker in a thread; `hear` returns its messages.

        Args:
            data: an encoded `ActorSetup`.
        """
        setup = msgspec.msgpack.decode(data, type=ActorSetup)
        threading.Thread(target=self._run, args=(setup,), name="octavo-worker", daemon=True).start()

    def tell(self, number: int, data: bytes) -> None:
        """Pass the worker a message, or the end.

        Args:
            number: index of the message, from 0; Ray may reorder calls.
            data: an encoded `ToWorker`; b"": the end.
        """
        self._inbox.put(number, data)
        if not data and self._memory is not None:
            GroupMemory.end(*self._memory)  # wakes workers that wait for each other

    def hear(self) -> bytes:
        """Wait for messages of the worker, and return them.

        Returns:
            An encoded list of `FromWorker`; null in it: the worker has ended.
        """
        return self._outbox.take()

    def _run(self, setup: ActorSetup) -> None:
        setup_logging(setup.log_level, setup.log_format, **{**setup.log_fields, "rank": setup.rank})
        sys.setswitchinterval(SWITCH_INTERVAL)
        outbox = self._outbox
        try:
            group = None if setup.group is None else _open_group(*setup.group, setup.host)
        except ConfigError as error:
            outbox.write(Died(Failure.of(error)))
        else:
            results = _Results(outbox) if setup.tells else None
            serve(setup.setup, setup.worker_cls, setup.rank, group, self._inbox, results, outbox)
        outbox.end()


class _Inbox:
    """Messages in the order of their numbers."""

    def __init__(self) -> None:
        self._early: dict[int, bytes] = {}
        self._next = 0
        self._changed = threading.Condition()

    def put(self, number: int, data: bytes) -> None:
        with self._changed:
            self._early[number] = data
            self._changed.notify()

    def read(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._next in self._early)
            data = self._early.pop(self._next)
            self._next += 1
        if not data:
            raise QueueClosedError
        return data


class _Outbox:
    """Queue of messages to the executor. Any thread may use it."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[msgspec.Raw | None] = queue.SimpleQueue()

    def write(self, message: FromWorker) -> None:
        self.write_encoded(msgspec.msgpack.encode(message))

    def write_encoded(self, data: bytes) -> None:
        self._messages.put(msgspec.Raw(data))

    def end(self) -> None:
        """Add the end of the messages."""
        self._messages.put(None)

    def take(self) -> bytes:
        """Wait for a message; return all present messages as an encoded list."""
        messages = [self._messages.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._messages.get_nowait())
        return msgspec.msgpack.encode(messages)


class _Results:
    """Implementation of `Results`."""

    def __init__(self, outbox: _Outbox) -> None:
        self.write = outbox.write_encoded


def _host() -> str:
    """Return an id of the machine and its container, equal for processes that see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _open_group(pid: int, descriptor: int, host: str) -> int:
    """Duplicate the memory descriptor of another process.

    Raises:
        ConfigError: the process is on another machine, or belongs to another user.
    """
    if host != _host():
        raise ConfigError(
            "Workers that compute one model together share memory, and Ray has placed one of them "
            f"on {os.uname().nodename}, which is not the engine's machine (or is in another "
            "container); lower tensor_parallel_size, or assign more CPUs to the engine's machine."
        )
    try:
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"A worker cannot open the memory that it is to share with the others ({error}): Ray's "
            "processes must run as the engine's user."
        ) from error


class _Actor:
    """Worker's actor, as seen by the executor."""

    def __init__(self, rank: int, handle: Any) -> None:
        self.rank, self.handle = rank, handle
        self.ready: Future[None] = Future()
        self.place = Place(0, "", "", "")
        """Location; empty until the actor has started."""
        self.stopped = False
        """True if the last check found it stopped."""

    def __str__(self) -> str:
        place = f" (pid {self.pid} on {self.place.node})" if self.pid else ""
        return f"worker {self.rank}{place}"

    @property
    def pid(self) -> int:
        """Process id on the actor's machine."""
        return self.place.pid

    def is_stopped(self) -> bool:
        """Return True if a signal such as SIGSTOP has stopped a worker of this machine."""
        if self.place.host != _host():
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended; Ray reports that
            return False
        return state == "T"


class _ActorGroup(WorkerGroup):
    """Workers in actors."""

    kind = "ray"
    workers: list[_Actor]

    def __init__(
        self, setup: SetupMessage, rank: Rank, worker_cls: str, memory: int | None
    ) -> None:
        super().__init__(setup, rank, worker_cls, memory)
        self._placement: PlacementGroup | None = None
        self._sending = threading.Lock()
        """Lock of the attributes below."""
        self._num_sent = 0
        self._closed = False

    def shutdown(self) -> None:
        with self._lock:
            self._ending = True
        self._end_waiting()
        if self._thread.ident is not None:
            self._thread.join()
        self._resolve_all(EngineDeadError("The workers have been shut down."))
        if self._memory is not None:
            os.close(self._memory)

    def _send(self, data: bytes) -> None:
        with self._sending:
            if self._closed:
                raise QueueClosedError
            for worker in self.workers:
                worker.handle.tell.remote(self._num_sent, data)
            self._num_sent += 1

    def _kill(self) -> None:
        """Implement `WorkerGroup`; the thread kills the workers next."""
        with self._sending:
            self._closed = True

    def _watch(self) -> None:
        try:
            SESSION.join()
        except BaseException as error:
            self._started.set_exception(error)
            return
        try:
            try:
                self._place()
                self._launch()
            except BaseException as error:
                self._started.set_exception(error)
                return
            self._started.set_result(None)
            try:
                self._listen()
            except Exception as error:  # such as a disconnection from Ray
                logger.exception("watching the workers failed")
                self._fail(f"watching the workers failed ({type(error).__name__}: {error})")
        finally:
            self._release()

    def _place(self) -> None:
        """Have Ray reserve the workers' resources.

        Raises:
            ConfigError: the cluster has not provided the resources in time.
            EngineDeadError: the workers are shut down meanwhile.
        """
        device = self._setup.config.device
        # A bundle is always on one node: with several stages, a bundle is a stage.
        several = self._num_stages > 1
        size, count = (
            (device.tensor_parallel_size, self._num_stages) if several else (1, self._world_size)
        )
        bundle: dict[str, float] = {"CPU": size * (device.num_threads or 1)}
        if get_platform(device.device).name == "cuda":
            bundle["GPU"] = size
        wanted = f"{count} x {bundle}"
        where = "in the cluster"
        if self._memory is not None:
            # The workers share memory with this process.
            own = ray.get_runtime_context().get_node_id()
            found = next(node for node in ray.nodes() if node["NodeID"] == own)
            bundle[f"node:{found['NodeManagerAddress']}"] = 0.001
            where = "on the engine's machine, since they share memory"
        self._placement = placement_group([bundle] * count, strategy=_STRATEGY)
        end = time.monotonic() + _PLACEMENT_SECONDS
        while not self._placement.wait(1):
            if self._ending:
                raise EngineDeadError("The workers have been shut down.")
            if time.monotonic() > end:
                kinds = [kind for kind in ("CPU", "GPU") if kind in bundle]
                has, free = ray.cluster_resources(), ray.available_resources()
                raise ConfigError(
                    f"distributed_executor_backend=ray needs {wanted} {where}, a bundle for each "
                    f"{'stage' if several else 'worker'} with the CPUs of num_threads, and did not "
                    "receive them in "
                    f"{_PLACEMENT_SECONDS:.0f} seconds. The cluster's {_count_nodes()} nodes have "
                    + ", ".join(f"{has.get(kind, 0):g} {kind}" for kind in kinds)
                    + ", and free are "
                    + ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in kinds)
                    + ". Lower tensor_parallel_size or num_threads, or add machines to the cluster."
                )

    def _launch(self) -> None:
        """Start the actors.

        Raises:
            EngineDeadError: an actor cannot start.
        """
        assert self._placement is not None
        bundle = self._placement.bundle_specs[0]
        size = self._world_size // self._placement.bundle_count
        variables = {k: v for k, v in os.environ.items() if k.startswith(_COPIED)}
        for rank in range(self._world_size):
            options = {
                "num_cpus": bundle["CPU"] / size,
                "num_gpus": bundle.get("GPU", 0) / size,
                "max_concurrency": 4,  # for `tell` and `hear` at the same time
                "max_restarts": 0,
                "max_task_retries": 0,
                "runtime_env": {"env_vars": variables},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank // size
                ),
            }
            self.workers.append(_Actor(rank, ray.remote(**options)(WorkerActor).remote()))
        for worker, data in self._gather([it.handle.place.remote() for it in self.workers]):
            worker.place = msgspec.msgpack.decode(data, type=Place)
        level, log_format, log_fields = current_logging()
        group = None if self._memory is None else (os.getpid(), self._memory)
        groups = [(group, _host())] * self._world_size
        if self._num_stages > 1:
            groups = self._make_memories()
        starts = []
        for worker in self.workers:
            setup = ActorSetup(
                self._setup,
                self._worker_cls,
                worker.rank,
                worker.rank == self._teller,
                *groups[worker.rank],
                level,
                log_format,
                log_fields,
            )
            starts.append(worker.handle.start.remote(msgspec.msgpack.encode(setup)))
        for _ in self._gather(starts):
            pass

    def _make_memories(self) -> list[tuple[tuple[int, int] | None, str]]:
        """Make memory on each node, and connect the nodes; return each worker's memory, by rank.

        Raises:
            EngineDeadError: a node cannot reach another one.
        """
        nodes = [worker.place.node_id for worker in self.workers]
        makers = {node: nodes.index(node) for node in nodes}  # by the node's first worker
        numbers = {node: number for number, node in enumerate(makers)}
        size = self._world_size // self._num_stages
        hosts = [numbers[node] for node in nodes[::size]]
        public, secret = zmq.curve_keypair()
        firsts = [self.workers[rank] for rank in makers.values()]
        refs = [
            worker.handle.make_memory.remote(
                msgspec.msgpack.encode(HostSetup(self._setup, worker.rank, hosts, public, secret))
            )
            for worker in firsts
        ]
        memories: dict[str, HostMemory] = {}
        for worker, data in self._gather(refs, firsts):
            memory = msgspec.msgpack.decode(data, type=HostMemory)
            memories[worker.place.node_id] = memory
        refs = []
        linked = firsts if len(firsts) > 1 else []
        for worker in linked:
            others = {
                numbers[it.place.node_id]: (it.place.node, memories[it.place.node_id].address)
                for it in firsts
                if it is not worker
            }
            refs.append(worker.handle.connect.remote(msgspec.msgpack.encode(others)))
        for worker, data in self._gather(refs, linked):
            if why := msgspec.msgpack.decode(data, type=str):
                raise EngineDeadError(f"{worker} could not start: {why}")
        found = [memories[node] for node in nodes]
        return [
            ((it.pid, it.descriptor), worker.place.host)
            for it, worker in zip(found, self.workers, strict=True)
        ]

    def _gather(
        self, refs: list[Any], workers: list[_Actor] | None = None
    ) -> Iterator[tuple[_Actor, Any]]:
        """Yield the answers of the starting workers (None: of all) as they arrive.

        Raises:
            EngineDeadError: a worker has died, or the workers are to end.
        """
        waiting = dict(zip(refs, self.workers if workers is None else workers, strict=True))
        while waiting:
            if self._ending:
                raise EngineDeadError("The workers have been shut down.")
            for ref in ray.wait(list(waiting), timeout=_CHECK_SECONDS)[0]:
                worker = waiting.pop(ref)
                try:
                    answer = ray.get(ref)
                except RayError as error:
                    raise EngineDeadError(f"{worker} could not start: {_explain(error)}") from error
                yield worker, answer

    def _listen(self) -> None:
        """Process the workers' messages until they end or one has died."""
        decoder = msgspec.msgpack.Decoder(list[FromWorker | None])
        waiting = {worker.handle.hear.remote(): worker for worker in self.workers}
        end, checked = float("inf"), time.monotonic()
        while waiting and self._failure is None and time.monotonic() < end:
            for ref in ray.wait(list(waiting), timeout=_CHECK_SECONDS)[0]:
                worker = waiting.pop(ref)
                try:
                    messages = decoder.decode(ray.get(ref))
                except RayError as error:
                    self._fail(f"{worker} has died: {_explain(error)}")
                    return
                for message in messages:
                    if message is not None:
                        self._take(worker, message)
                if messages[-1] is not None:
                    waiting[worker.handle.hear.remote()] = worker
            if self._ending and not self._closed:
                self._send(b"")
                self._kill()
                end = time.monotonic() + _END_SECONDS
            if time.monotonic() - checked >= _CHECK_SECONDS:
                checked = time.monotonic()
                self._check_stopped()

    def _check_stopped(self) -> None:
        for worker in self.workers:
            stopped = worker.is_stopped()
            if stopped and worker.stopped:
                self._fail(
                    f"{worker} is stopped by a signal such as SIGSTOP, and was killed",
                    EngineStoppedError,
                )
            worker.stopped = stopped

    def _release(self) -> None:
        """End the remaining actors, and return their resources."""
        self._kill()
        with contextlib.suppress(Exception):  # a disconnection has ended them already
            for worker in self.workers:
                ray.kill(worker.handle)
                if worker.stopped:  # a stopped process ignores Ray
                    os.kill(worker.pid, signal.SIGKILL)
            if self._placement is not None:
                remove_placement_group(self._placement)
        SESSION.leave()


def _count_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def _explain(error: RayError) -> str:
    """Return Ray's description of an end in one line, without its guesses."""
    text = " ".join(str(error).split())
    return (text.partition("Worker exit detail: ")[2] or text).partition(" Some common causes")[0]
