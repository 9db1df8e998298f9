"""`--api-server-count`: several API servers, processes that serve HTTP on one listening socket.

This process only starts and watches the others: the coordinator, which has the engines, and the API
servers, each of which is a front end of the engines. An API server that dies is replaced; its
requests end, and its clients lose their connections. A coordinator that dies is replaced by another
one with its own engines, and all requests continue. See `fleet/coordinator.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass

import msgspec

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError, OctavoError, reason_of
from octavo.fleet.coordinator_client import addresses_of
from octavo.models.hub import resolve_folders
from octavo.server.child_process import Child
from octavo.system import clock
from octavo.system.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0
# What engines get to end in order, more than which `Supervisor` gives them.
_ENGINES_END_SECONDS = 15.0
_RESTART_WINDOW = 600.0
REPLACED = b"\0"
"""What a front end is told of the coordinator, among the numbers of signals."""


class APIServerSetup(msgspec.Struct):
    """What a front end's process is told."""

    config: ServerConfig
    """Limits are its own share."""
    engine_config: EngineConfig
    model_path: str
    tokenizer_path: str
    folder: str
    """Of the sockets."""
    listener: int
    """The descriptor of the listening socket."""
    created: int
    """Second since 1970 at which the server was started."""
    clock_epoch: float
    """Of the first process: one clock for all, though the system's has been set meanwhile."""
    slot: int = 0
    """Its number among those that live, for log lines."""
    number: int = 0
    """No other one has had it."""
    life: int = 0
    """How many coordinators there were before."""
    pulse: int = 0
    """See `Child`."""


class CoordinatorSetup(msgspec.Struct):
    """What the coordinator's process is told."""

    config: ServerConfig
    engine_config: EngineConfig
    model_path: str
    tokenizer_path: str
    folder: str
    """Of the sockets."""
    life: int
    """How many coordinators there were before."""
    clock_epoch: float
    """See `APIServerSetup`."""
    pulse: int
    """See `Child`."""


class Place(msgspec.Struct):
    """What the coordinator is told of a front end: it has come, or is gone."""

    number: int
    present: bool
    input_address: str
    output_address: str


def check_api_servers(config: ServerConfig, engine_config: EngineConfig) -> None:
    """Refuses what one of several front ends cannot do.

    Raises:
        ConfigError: naming the setting.
    """
    count = config.api_server_count
    given = {
        "record": config.record is not None,
        "resume_grace": config.resume_grace > 0,
        "enable_sleep_mode": engine_config.model.enable_sleep_mode,
        "enable_elastic_ep": engine_config.parallel.enable_elastic_ep,
    }
    for name, is_given in given.items():
        if count > 1 and is_given:
            raise ConfigError(
                f"{name} is not supported with api_server_count={count}: what it is about would "
                "be known to one of the front ends only; leave out one of them."
            )


async def serve_by_api_servers(
    config: ServerConfig, engine_config: EngineConfig, listener: socket.socket
) -> int:
    """Serves until a signal ends it; returns the exit status.

    Raises:
        OctavoError: the engine failed, or front ends or coordinators do again and again.
    """
    # A download may take long; signals are heard meanwhile.
    path, tokenizer_path = await asyncio.to_thread(resolve_folders, engine_config)
    folder = SocketFolder("octavo-engine-")
    setup = APIServerSetup(
        config,
        engine_config,
        str(path),
        str(tokenizer_path),
        str(folder.path),
        listener=listener.fileno(),
        created=int(time.time()),
        clock_epoch=clock.epoch(),
    )
    processes = _Processes(setup, config.api_server_count)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, processes.on_signal, number)
    try:
        return await processes.run()
    finally:
        folder.close()


def _start(module: str, *descriptors: int) -> Child:
    try:
        return Child(module, descriptors)
    except OSError as error:
        raise OctavoError(f"No process can be started: {reason_of(error)}.") from None


@dataclass(eq=False)
class _APIServer:
    """A front end that lives."""

    number: int
    child: Child


class _Processes:
    """The front ends and the coordinator.

    Args:
        setup: what each front end is told, but for what is its own; limits are the server's.
        count: front ends.
    """

    def __init__(self, setup: APIServerSetup, count: int) -> None:
        self._whole = config = setup.config
        self._setup = msgspec.structs.replace(
            setup,
            config=msgspec.structs.replace(
                config,
                max_num_queued_reqs=-(-config.max_num_queued_reqs // count),
                request_memory_bytes=max(2**20, config.request_memory_bytes // count),
            ),
        )
        self._count = count
        self._numbers = itertools.count()
        self._front_ends: dict[int, _APIServer] = {}
        """Those that live, by slot."""
        self._coordinator: Child | None = None
        self._life = 0
        """Of the coordinator: how many there were before."""
        self._draining = False
        self._restarts: dict[str, deque[float]] = {}
        """When each kind was."""

    def on_signal(self, number: int) -> None:
        """The first signal drains all front ends, the second one stops them at once."""
        self._draining = True
        for front_end in self._front_ends.values():
            front_end.child.tell(bytes([number]))

    async def run(self) -> int:
        """Keeps all alive until a signal ends them; returns the exit status.

        Raises:
            OctavoError: the engines cannot go on, a front end cannot start, or processes end too
                often.
        """
        coordinator = asyncio.create_task(self._keep_coordinator())
        serving = asyncio.create_task(self._keep_front_ends())
        try:
            await asyncio.wait({coordinator, serving}, return_when=asyncio.FIRST_COMPLETED)
            if coordinator.done():
                coordinator.result()  # raises
            return await serving
        finally:
            # Front ends that are left have been told that there is no engine any more.
            self._draining = True
            await asyncio.wait({serving}, timeout=_END_SECONDS)
            serving.cancel()
            await asyncio.wait({serving})
            coordinator.cancel()
            await asyncio.wait({coordinator})
            if self._coordinator is not None:
                await self._coordinator.end(_ENGINES_END_SECONDS)
                self._coordinator.close()

    async def _keep_front_ends(self) -> int:
        keeps = [asyncio.create_task(self._keep(slot)) for slot in range(self._count)]
        try:
            return max(await asyncio.gather(*keeps))
        finally:
            for keep in keeps:
                keep.cancel()
            await asyncio.wait(keeps)

    async def _keep_coordinator(self) -> None:
        """Starts one again and again.

        Raises:
            OctavoError: it cannot go on, or ends too often.
        """
        can_start = False
        while True:
            child = self._coordinator = _start("octavo.server.coordinator_process")
            whole = self._setup
            child.tell_message(
                CoordinatorSetup(
                    self._whole,
                    whole.engine_config,
                    whole.model_path,
                    whole.tokenizer_path,
                    whole.folder,
                    self._life,
                    whole.clock_epoch,
                    child.pulse,
                )
            )
            for front_end in self._front_ends.values():
                self._tell_place(front_end.number, present=True)
                if self._life:
                    front_end.child.tell(REPLACED)
            how = await child.watch(self._whole.progress_timeout)
            self._coordinator = None
            child.kill()
            child.close()
            can_start = can_start or child.has_begun
            if not can_start:  # it would be no better again
                raise OctavoError(f"The coordinator {how}; its log lines say why.")
            self._note_restart("the coordinator", "a coordinator", how)
            self._life += 1

    async def _keep(self, slot: int) -> int:
        """Starts a front end again and again; returns its exit status when that was wanted."""
        can_start = False
        while True:
            child = _start("octavo.server.api_server_process", self._setup.listener)
            front_end = self._front_ends[slot] = _APIServer(next(self._numbers), child)
            child.tell_message(
                msgspec.structs.replace(
                    self._setup,
                    slot=slot,
                    number=front_end.number,
                    life=self._life,
                    pulse=child.pulse,
                )
            )
            self._tell_place(front_end.number, present=True)
            try:
                how = await child.watch(self._whole.progress_timeout)
            finally:
                del self._front_ends[slot]
                status = child.kill()
                child.close()
                self._tell_place(front_end.number, present=False)
            if self._draining:
                return max(status, 0)  # one that had not begun knows no draining
            can_start = can_start or child.has_begun
            if status > 0 or not can_start:  # it would be no better again
                raise OctavoError(f"Front end {slot} {how}; its log lines say why.")
            self._note_restart(f"front end {slot}", "a front end", how)

    def _tell_place(self, number: int, *, present: bool) -> None:
        """Tells the coordinator of a front end; one that is not there is told when it is."""
        if self._coordinator is not None:
            addresses = addresses_of(self._setup.folder, self._life, number)
            self._coordinator.tell_message(Place(number, present, *addresses))

    def _note_restart(self, who: str, kind: str, how: str) -> None:
        """Counts a restart.

        Raises:
            OctavoError: there were too many.
        """
        now, limit = time.monotonic(), self._whole.max_engine_restarts
        restarts = self._restarts.setdefault(kind, deque())
        while restarts and restarts[0] < now - _RESTART_WINDOW:
            restarts.popleft()
        if len(restarts) >= limit:
            raise OctavoError(
                f"{who.capitalize()} {how}; that was death {len(restarts) + 1} of {kind} within "
                f"ten minutes, and they are replaced {limit} times (--max-engine-restarts)."
            )
        restarts.append(now)
        logger.warning("%s %s; another one takes its place", who, how)
