"""`octavo serve --headless`: a machine that runs engines for a server on another machine.

The node joins the head node, starts engine processes on request, reports their ends, and ends with
the head. The engines' messages bypass it: see `cluster.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
import zmq
import zmq.utils.monitor

from octavo import __version__
from octavo.checkpoints.identity import model_hash
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.core_messages import CoreProcessSetup, ReachedBy
from octavo.engine.head import connect
from octavo.errors import ConfigError, EngineDeadError, reason_of
from octavo.fleet import cluster
from octavo.fleet.cluster import (
    ALIVE_SECONDS,
    GONE_SECONDS,
    ClusterKey,
    Exited,
    Join,
    Kill,
    Launch,
)
from octavo.fleet.core_launcher import usable_process, usable_spare
from octavo.fleet.expert_memory import ExpertMemory
from octavo.fleet.process import CoreProcess
from octavo.fleet.start import share_cores
from octavo.models.hub import resolve_folders
from octavo.models.open_model import open_model, with_local_adapter
from octavo.models.registry import read_spec
from octavo.plan.setup import Machine
from octavo.system.device import cpu_memory
from octavo.system.logs import setup_logging

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
# Time for the head to become reachable.
JOIN_SECONDS = 600.0
# Time for a head with the same key to complete the handshake, once it is reached.
_KEY_SECONDS = 4.0
_REMIND_SECONDS = 10.0


def run_node(server_config: ServerConfig, config: EngineConfig) -> int:
    """Serve the head node until a signal or the head ends it; return the exit status.

    Args:
        server_config: settings of logging, here and in the engines, and the timeout of stopped
            engines.
        config: this machine's settings; the engines use the head node's, except for those of a
            machine.

    Raises:
        ConfigError, ModelError, HubError: the settings or the model are invalid, or the head
            rejects them.
        EngineDeadError: the head node cannot be reached, has ended, or has another key.
    """
    setup_logging(server_config.log_level, server_config.log_format)
    parallel = config.parallel
    parallel.check(headless=True)
    assert parallel.cluster_key_file is not None
    assert parallel.data_parallel_address is not None
    key = ClusterKey.from_file(parallel.cluster_key_file)
    config = share_cores(config)
    path, tokenizer_path = resolve_folders(config)
    config = with_local_adapter(config)
    checkpoint = open_model(config, path)
    read_spec(checkpoint, config.model)
    join = Join(
        version=__version__,
        model=model_hash(checkpoint, tokenizer_path),
        data_parallel_size=parallel.data_parallel_size,
        start_rank=parallel.data_parallel_start_rank,
        num_engines=parallel.num_local_engines,
        host=f"{socket.gethostname()} ({os.getpid()})",
    )
    address = cluster.tcp_address(parallel.data_parallel_address, parallel.data_parallel_rpc_port)
    reached = ReachedBy(address, key.public, key.secret, b"")
    node = _Node(server_config, config, path, reached, join)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, node.on_signal)
    try:
        node.run()
    finally:
        node.close()
    return 0


class _Node:
    """The node's end of the connection, and its engine processes."""

    def __init__(
        self,
        server_config: ServerConfig,
        config: EngineConfig,
        path: Path,
        reached: ReachedBy,
        join: Join,
    ) -> None:
        self._server_config = server_config
        self._config, self._path, self._reached, self._join = config, path, reached, join
        share = config.cache.gpu_memory_utilization / join.num_engines
        self._memory_limit = int(cpu_memory()[1] * share)
        self._context = zmq.Context()
        self._processes: dict[bytes, CoreProcess] = {}
        self._spare: CoreProcess | None = None
        self._memory: ExpertMemory | None = None
        """Memory of the engines, if they divide experts."""
        self._generation = b""
        """Generation of the engines that use the memory."""
        self._latest = config
        """Settings of the engine that was started last."""
        self._stopped = False
        self._name = cluster.NODE + os.urandom(16)
        self._socket = connect(self._context, reached, self._name)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._heard: float | None = None
        """Time of the head's last heartbeat; None: the head has not accepted this node yet."""
        self._alone_since = time.monotonic()
        self._connected_at: float | None = None
        """Time of the first connection to the head."""
        self._shaken_hands = False
        """True if the head has ever completed the handshake."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """End `run`."""
        self._stopped = True

    def run(self) -> None:
        """Follow the head's messages.

        Raises:
            ConfigError: the head rejects this node.
            EngineDeadError: the head cannot be reached, or has ended.
        """
        logger.info("joining the head node %s", self._reached.address)
        self._tell(cluster.JOIN, self._join)
        said = told = time.monotonic()
        limit = self._server_config.progress_timeout / 2  # before the head's timeout
        while not self._stopped:
            if self._socket.poll(int(_POLL_SECONDS * 1000)):
                kind, payload = self._socket.recv_multipart()
                if not self._obey(kind, payload):
                    return
            now = time.monotonic()
            if now - told >= ALIVE_SECONDS:
                if self._heard is None:
                    self._tell(cluster.JOIN, self._join)  # the head may not have been up before
                else:
                    self._heard += max(0.0, now - told - 2 * ALIVE_SECONDS)  # suspended
                    self._tell(cluster.ALIVE)
                for process in self._processes.values():
                    process.kill_if_stopped(ALIVE_SECONDS, limit)
                told = now
            if self._heard is None:
                self._note_connections()
                alone = now - self._alone_since
                at = None if self._shaken_hands else self._connected_at
                if alone > JOIN_SECONDS or (at is not None and now - at > _KEY_SECONDS):
                    raise EngineDeadError(self._why_alone(alone))
                if now - said > _REMIND_SECONDS:
                    logger.warning("%s; still trying", self._why_alone(alone))
                    said = now
            elif (silent := now - self._heard) > GONE_SECONDS:
                self._start_over(f"has not been heard for {silent:.0f} s")
            self._look_at_processes()
        logger.info("stopping")
        self._tell(cluster.LEAVE)

    def _start_over(self, why: str) -> None:
        """Kill the engines that the lost head node started here, and try to join again."""
        logger.warning("the head node %s %s; joining again", self._reached.address, why)
        self._end_processes()
        self._heard, self._alone_since = None, time.monotonic()

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.kill("the head node is gone")
            process.shutdown(0.0)
        self._processes.clear()

    def close(self) -> None:
        """End the engine processes."""
        self._end_processes()
        if self._spare is not None:
            self._spare.shutdown(0.0)
        if self._memory is not None:
            self._memory.close()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _obey(self, kind: bytes, payload: bytes) -> bool:
        """Follow a message; return False to end the node."""
        decode = msgspec.msgpack.decode
        if kind == cluster.REFUSED:
            raise ConfigError(
                f"the head node {self._reached.address} rejects this node: {decode(payload)}."
            )
        if kind == cluster.FORGOTTEN:
            if self._heard is not None:
                self._start_over("has given up this node")
            return True
        if self._heard is None:
            if kind != cluster.WELCOME:
                return kind != cluster.LEAVE
            logger.info("the head node has welcomed this one")
        self._heard = time.monotonic()
        if kind == cluster.LAUNCH:
            self._launch(decode(payload, type=Launch))
        elif kind == cluster.KILL:
            kill = decode(payload, type=Kill)
            self._end(kill.launch_id, lambda process: process.kill(kill.reason))
        elif kind == cluster.STOP:
            self._end(decode(payload, type=bytes), lambda process: process.kill("it was stopped"))
        elif kind == cluster.SPARE:
            self._spare = usable_spare(self._spare, self._latest)
        elif kind == cluster.LEAVE:
            logger.info("the head node ends, and so does this one")
            return False
        return True

    def _launch(self, launch: Launch) -> None:
        replace = msgspec.structs.replace
        setup = launch.setup
        assert setup.reached_by is not None
        config, own = setup.config, self._config
        setup = replace(
            setup,
            # Of the head's settings, replace those of a machine by this one's.
            config=replace(
                config,
                model=replace(config.model, model=own.model.model, tokenizer=own.model.tokenizer),
                load=own.load,
                device=replace(
                    config.device,
                    num_threads=own.device.num_threads,
                    numa_node=own.device.numa_node,
                ),
                parallel=own.parallel,
            ),
            model_path=str(self._path),
            memory_limit=self._memory_limit,
            log_level=self._server_config.log_level,
            log_format=self._server_config.log_format,
            reached_by=replace(self._reached, launch_id=setup.reached_by.launch_id),
        )
        if setup.machine is not None:
            setup = self._with_machine(setup, setup.machine)
        spare, self._spare = self._spare, None
        try:
            process = usable_process(spare)
            process.start(setup)
        except OSError as error:
            how = f"no process can be started: {reason_of(error)}"
            self._tell(cluster.EXITED, Exited(launch.launch_id, how))
            return
        self._processes[launch.launch_id] = process
        self._latest = setup.config

    def _with_machine(self, setup: CoreProcessSetup, machine: Machine) -> CoreProcessSetup:
        """Return the setup with this machine, and its memory of the engines' generation."""
        if self._memory is None:
            self._memory = ExpertMemory(setup.config.device.pipeline_parallel_size)
        elif machine.generation != self._generation:
            for process in self._processes.values():
                process.kill("it belongs to an earlier generation")
            self._memory.renew()
        self._generation = machine.generation
        parallel, replace = self._config.parallel, msgspec.structs.replace
        assert parallel.data_parallel_address is not None
        port = parallel.data_parallel_rpc_port + 1
        return replace(
            setup,
            expert_memory=self._memory.paths,
            machine=replace(
                machine,
                first_engine=self._join.start_rank,
                num_engines=self._join.num_engines,
                address=cluster.tcp_address(parallel.data_parallel_address, port),
                public=self._reached.public,
                secret=self._reached.secret,
            ),
        )

    def _end(self, launch_id: bytes, how: Callable[[CoreProcess], None]) -> None:
        process = self._processes.get(launch_id)
        if process is not None:
            how(process)

    def _look_at_processes(self) -> None:
        for launch_id, process in list(self._processes.items()):
            how = process.describe_exit()
            if how is not None:
                process.shutdown(0.0)
                del self._processes[launch_id]
                self._tell(cluster.EXITED, Exited(launch_id, how, process.was_stopped))

    def _why_alone(self, seconds: float) -> str:
        """Explain, as far as known, why the head has not answered."""
        if self._shaken_hands:
            return f"the head node {self._reached.address} has not answered for {seconds:.0f} s"
        if self._connected_at is not None:
            return (
                f"the head node {self._reached.address} is there, but rejects this node: the "
                "cluster_key_file must be the same on all machines"
            )
        return (
            f"the head node {self._reached.address} was not reached in {seconds:.0f} s: check "
            "--data-parallel-address and --data-parallel-rpc-port, and that it runs"
        )

    def _note_connections(self) -> None:
        """Record the progress of connecting to the head."""
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)
            self._connected_at = self._connected_at or time.monotonic()
            self._shaken_hands |= event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _tell(self, kind: bytes, message: object = None) -> None:
        self._socket.send_multipart([kind, msgspec.msgpack.encode(message)])
