"""`--api-server-count`: several API servers, processes that serve HTTP on one listening socket.

This process only starts and watches the others: the coordinator, which owns the engines, and the
API servers, each a front end of the engines. An API server that dies is replaced; its requests end,
and its clients lose their connections. A coordinator that dies is replaced by one with new engines,
and all requests continue. See `fleet/coordinator.py`.
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
from octavo.models.open_model import with_local_adapter
from octavo.server.adapter_table import AdapterTable, given_file, make_table
from octavo.server.child_process import Child
from octavo.system import clock
from octavo.system.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0
# Seconds for an orderly end of the engines; longer than the timeout of `Supervisor`.
_ENGINES_END_SECONDS = 15.0
_RESTART_WINDOW = 600.0
REPLACED = b"\0"
"""Message to a front end, among numbers of signals: the coordinator was replaced."""


class APIServerSetup(msgspec.Struct):
    """Setup of a front end's process."""

    config: ServerConfig
    """Settings of the server; limits are the front end's share."""
    engine_config: EngineConfig
    model_path: str
    tokenizer_path: str
    folder: str
    """Folder of the sockets."""
    adapters: str
    """File of the table of adapters that the front ends share."""
    media: str
    """Folder of the media with uuids that the front ends share."""
    listener: int
    """Descriptor of the listening socket."""
    created: int
    """Start of the server in seconds since 1970."""
    clock_epoch: float
    """Epoch of the first process's clock, which all processes share."""
    slot: int = 0
    """Number among the live front ends, for log lines."""
    number: int = 0
    """Unique number; a replacement has a new one."""
    life: int = 0
    """Number of earlier coordinators."""
    pulse: int = 0
    """Descriptor of `Child.pulse`."""


class CoordinatorSetup(msgspec.Struct):
    """Setup of the coordinator's process."""

    config: ServerConfig
    engine_config: EngineConfig
    model_path: str
    tokenizer_path: str
    folder: str
    """Folder of the sockets."""
    life: int
    """Number of earlier coordinators."""
    clock_epoch: float
    """Epoch of `APIServerSetup`."""
    pulse: int
    """Descriptor of `Child.pulse`."""


class Place(msgspec.Struct):
    """Message to the coordinator: a front end has started or ended."""

    number: int
    present: bool
    input_address: str
    output_address: str


def check_api_servers(config: ServerConfig, engine_config: EngineConfig) -> None:
    """Reject settings that several front ends do not support.

    Raises:
        ConfigError: a setting is unsupported; the message names it.
    """
    count = config.api_server_count
    given = {
        "record": config.record is not None,
        "resume_grace": config.resume_grace > 0,
        "state_dir": config.state_dir is not None,
        "explain_requests": bool(config.explain_requests),
        "enable_sleep_mode": engine_config.model.enable_sleep_mode,
        "enable_elastic_ep": engine_config.parallel.enable_elastic_ep,
    }
    for name, is_given in given.items():
        if count > 1 and is_given:
            raise ConfigError(
                f"{name} is not supported with api_server_count={count}: only one of the front "
                "ends would know its state; leave out one of the two."
            )


async def serve_by_api_servers(
    config: ServerConfig, engine_config: EngineConfig, listener: socket.socket
) -> int:
    """Serve until a signal ends the server; return the exit status.

    Raises:
        OctavoError: the engine failed, or front ends or coordinators failed too often.
    """
    # A download may take long; a thread keeps the event loop free for signals.
    path, tokenizer_path = await asyncio.to_thread(resolve_folders, engine_config)
    engine_config = await asyncio.to_thread(with_local_adapter, engine_config)
    folder = SocketFolder("octavo-engine-")
    file = given_file()
    names = engine_config.model.served_model_name or [engine_config.model.model]
    if file is None:
        file = folder.path / "adapters"
        adapters = make_table(engine_config.lora, names[0], file)
    else:
        adapters = AdapterTable(file)
    media = folder.path / "media"
    media.mkdir()
    setup = APIServerSetup(
        config,
        engine_config,
        str(path),
        str(tokenizer_path),
        str(folder.path),
        str(file),
        str(media),
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
        adapters.close()
        folder.close()


def _start(module: str, *descriptors: int) -> Child:
    try:
        return Child(module, descriptors)
    except OSError as error:
        raise OctavoError(f"No process can be started: {reason_of(error)}.") from None


@dataclass(eq=False)
class _APIServer:
    """Live front end."""

    number: int
    child: Child


class _Processes:
    """Front ends and coordinator.

    Args:
        setup: setup that all front ends share, with the limits of the whole server.
        count: number of front ends.
    """

    def __init__(self, setup: APIServerSetup, count: int) -> None:
        self._whole = config = setup.config
        self._engine_config = engine = setup.engine_config
        model = engine.model
        # The media that they share have a part of the limit, too.
        cache = model.mm_processor_cache_gb / (count + 1)
        self._setup = msgspec.structs.replace(
            setup,
            engine_config=msgspec.structs.replace(
                engine, model=msgspec.structs.replace(model, mm_processor_cache_gb=cache)
            ),
            config=msgspec.structs.replace(
                config,
                max_num_queued_reqs=-(-config.max_num_queued_reqs // count),
                request_memory_bytes=max(2**20, config.request_memory_bytes // count),
            ),
        )
        self._count = count
        self._numbers = itertools.count()
        self._front_ends: dict[int, _APIServer] = {}
        """Live front ends by slot."""
        self._coordinator: Child | None = None
        self._life = 0
        """Number of earlier coordinators."""
        self._draining = False
        self._restarts: dict[str, deque[float]] = {}
        """Times of the restarts, by kind of process."""

    def on_signal(self, number: int) -> None:
        """Drain all front ends after the first signal; stop them at once after the second."""
        self._draining = True
        for front_end in self._front_ends.values():
            front_end.child.tell(bytes([number]))

    async def run(self) -> int:
        """Keep all processes alive until a signal ends them; return the exit status.

        Raises:
            OctavoError: the engines cannot continue, a front end cannot start, or processes end
                too often.
        """
        coordinator = asyncio.create_task(self._keep_coordinator())
        serving = asyncio.create_task(self._keep_front_ends())
        try:
            await asyncio.wait({coordinator, serving}, return_when=asyncio.FIRST_COMPLETED)
            if coordinator.done():
                coordinator.result()  # raises
            return await serving
        finally:
            # The remaining front ends have been notified that the engines have ended.
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
        """Start the coordinator, and replace it each time it ends.

        Raises:
            OctavoError: the coordinator cannot continue, or ends too often.
        """
        can_start = False
        while True:
            child = self._coordinator = _start("octavo.server.coordinator_process")
            whole = self._setup
            child.tell_message(
                CoordinatorSetup(
                    self._whole,
                    self._engine_config,
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
            if not can_start:  # another attempt would fail, too
                raise OctavoError(f"The coordinator {how}; its log lines say why.")
            self._note_restart("the coordinator", "a coordinator", how)
            self._life += 1

    async def _keep(self, slot: int) -> int:
        """Start a front end, and replace it each time it dies; return its wanted exit status."""
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
                return max(status, 0)  # negative: killed before it could drain
            can_start = can_start or child.has_begun
            if status > 0 or not can_start:  # another attempt would fail, too
                raise OctavoError(f"Front end {slot} {how}; its log lines say why.")
            self._note_restart(f"front end {slot}", "a front end", how)

    def _tell_place(self, number: int, *, present: bool) -> None:
        """Notify the coordinator of a front end; a new coordinator is notified when it starts."""
        if self._coordinator is not None:
            addresses = addresses_of(self._setup.folder, self._life, number)
            self._coordinator.tell_message(Place(number, present, *addresses))

    def _note_restart(self, who: str, kind: str, how: str) -> None:
        """Count a restart.

        Raises:
            OctavoError: the limit is exceeded.
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
