"""`--api-server-count`: several processes that serve HTTP, behind one listening socket.

This process has the engines and starts the others, which take requests from the socket that they
have in common. One that ends is replaced, and its requests are ended; its clients have lost their
connections with it. See `engine/coordinator.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from functools import partial

import msgspec

from octavo.config import EngineConfig, ServerConfig
from octavo.device import is_stopped
from octavo.engine.async_llm import EngineProcesses, start_engines
from octavo.engine.coordinator import Coordinator, FrontEnd
from octavo.engine.core_launcher import CoreProcess
from octavo.engine.memory_plan import SERVER_NBYTES, resolve_max_model_len
from octavo.errors import ConfigError, OctavoError, signal_name
from octavo.metrics import EngineMetrics
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec

logger = logging.getLogger(__name__)

# Between two looks whether a process lives.
_LOOK_SECONDS = 0.1
_END_SECONDS = 5.0
# Imports take so long at most, beside what a silence may last.
_START_SECONDS = 60.0
# A stop that is over sooner is no reason.
_STOPPED_SECONDS = 0.5
_RESTART_WINDOW = 600.0


class FrontEndSetup(msgspec.Struct):
    """What a front end's process is told."""

    config: ServerConfig
    """Limits are its own share."""
    engine_config: EngineConfig
    model_path: str
    tokenizer_path: str
    slot: int
    """Its number among those that live, for log lines."""
    number: int
    """No other one has had it."""
    listener: int
    """The descriptor of the listening socket."""
    input_address: str
    output_address: str
    """See `FrontEnd`."""
    created: int
    """Second since 1970 at which the server was started."""


def check_front_ends(config: ServerConfig, engine_config: EngineConfig) -> None:
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


async def serve_by_front_ends(
    config: ServerConfig,
    engine_config: EngineConfig,
    process: CoreProcess,
    listener: socket.socket,
) -> int:
    """Serves until a signal ends it; returns the exit status.

    Raises:
        OctavoError: the engine failed, or front ends do again and again.
    """
    # A download may take long; signals are heard meanwhile.
    path, tokenizer_path = await asyncio.to_thread(resolve_folders, engine_config)
    others = config.api_server_count - 1
    processes = EngineProcesses(
        config.progress_timeout,
        config.max_engine_restarts,
        config.warm_spare,
        process,
        # The processes of the other front ends are booked with the requests.
        config.request_memory_bytes + others * SERVER_NBYTES,
        config.log_level,
        config.log_format,
    )
    names, parallel = engine_config.model.served_model_name, engine_config.parallel.of_server()
    spec = read_spec(path, trust_remote_code=engine_config.model.trust_remote_code)
    metrics = EngineMetrics(
        names[0] if names else engine_config.model.model,
        resolve_max_model_len(engine_config, spec),
        config.metrics_prefix,
        first_engine=parallel.first_engine,
    )
    coordinator = Coordinator(
        metrics,
        partial(start_engines, engine_config, path, tokenizer_path, processes),
        parallel.data_parallel_size,
    )
    folder = tempfile.mkdtemp(prefix="octavo-")
    count = config.api_server_count
    share = msgspec.structs.replace(
        config,
        max_num_queued_reqs=-(-config.max_num_queued_reqs // count),
        request_memory_bytes=max(2**20, config.request_memory_bytes // count),
    )
    setup = FrontEndSetup(
        share,
        engine_config,
        str(path),
        str(tokenizer_path),
        slot=0,
        number=0,
        listener=listener.fileno(),
        input_address="",
        output_address="",
        created=int(time.time()),
    )
    front_ends = _FrontEnds(setup, count, coordinator, folder)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, front_ends.on_signal, number)
    engines = asyncio.create_task(coordinator.run())
    serving = asyncio.create_task(front_ends.run())
    try:
        await asyncio.wait({engines, serving}, return_when=asyncio.FIRST_COMPLETED)
        if engines.done():
            engines.result()  # raises
        return await serving
    finally:
        await front_ends.end(serving)
        engines.cancel()
        await asyncio.wait({engines})
        await coordinator.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class _FrontEnds:
    """The processes.

    Args:
        setup: what each is told, but for its number and where it is talked to.
        count: how many there are.
        coordinator: listens to them.
        folder: where sockets have their names.
    """

    def __init__(
        self, setup: FrontEndSetup, count: int, coordinator: Coordinator, folder: str
    ) -> None:
        self._setup, self._count = setup, count
        self._coordinator, self._folder = coordinator, folder
        self._numbers = itertools.count()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """Those that live, by slot."""
        self._draining = False
        self._restarts: deque[float] = deque()

    def on_signal(self, number: int) -> None:
        """The first signal drains all of them, the second one stops them at once."""
        self._draining = True
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(bytes([number]))
                process.stdin.flush()

    async def run(self) -> int:
        """Keeps them alive until a signal ends them; returns the exit status.

        Raises:
            OctavoError: one cannot start, or they end too often.
        """
        keeps = [asyncio.create_task(self._keep(slot)) for slot in range(self._count)]
        try:
            return max(await asyncio.gather(*keeps))
        finally:
            for keep in keeps:
                keep.cancel()
            await asyncio.wait(keeps)

    async def end(self, serving: asyncio.Task[int]) -> None:
        """Ends those that are left; they have been told that there is no engine any more."""
        end = time.monotonic() + _END_SECONDS
        self._draining = True
        while not serving.done() and time.monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS)
        serving.cancel()
        await asyncio.wait({serving})

    async def _keep(self, slot: int) -> int:
        """Starts a process again and again; returns its exit status when that was wanted."""
        can_start = False
        while True:
            number = next(self._numbers)
            front_end = FrontEnd(
                number,
                f"ipc://{self._folder}/in{number}",
                f"ipc://{self._folder}/out{number}",
            )
            self._coordinator.add(front_end)
            process = self._start(slot, front_end)
            try:
                how = await self._watch(process, front_end)
            finally:
                del self._processes[slot]
                process.kill()
                status = process.wait()
                await self._coordinator.remove(front_end)
            if self._draining:
                return max(status, 0)  # one that had not begun knows no draining
            can_start = can_start or front_end.last_heard is not None
            if status > 0 or not can_start:  # it would be no better again
                raise OctavoError(f"Front end {slot} {how}; its log lines say why.")
            self._note_restart(slot, how)

    def _start(self, slot: int, front_end: FrontEnd) -> subprocess.Popen[bytes]:
        setup = msgspec.structs.replace(
            self._setup,
            slot=slot,
            number=front_end.number,
            input_address=front_end.input_address,
            output_address=front_end.output_address,
        )
        process = self._processes[slot] = subprocess.Popen(
            [sys.executable, "-m", "octavo.server.front_end_process"],
            stdin=subprocess.PIPE,
            pass_fds=[setup.listener],
            process_group=0,  # a Ctrl-C in the terminal is for this process
        )
        data = msgspec.msgpack.encode(setup)
        assert process.stdin is not None
        # The pipe stays open for signals, and its end tells the process that this one is gone.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(len(data).to_bytes(4, "little") + data)
            process.stdin.flush()
        return process

    async def _watch(self, process: subprocess.Popen[bytes], front_end: FrontEnd) -> str:
        """Waits until a process has ended, or is silent for too long; returns what it did.

        Time is counted in naps, so that a machine that slept is no reason.
        """
        silent, stopped, heard = -_START_SECONDS, 0.0, front_end.last_heard
        while (status := process.poll()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
            silent += _LOOK_SECONDS
            if heard != front_end.last_heard:
                silent, heard = 0.0, front_end.last_heard
            if silent >= self._setup.config.progress_timeout:
                return f"has said nothing for {silent:.1f} s and was killed"
            stopped = stopped + _LOOK_SECONDS if is_stopped(process.pid) else 0.0
            if stopped >= _STOPPED_SECONDS:
                return "was stopped by a signal such as SIGSTOP, and killed"
        if status < 0:
            return f"was killed by {signal_name(-status)}"
        return f"ended with status {status}"

    def _note_restart(self, slot: int, how: str) -> None:
        """Counts a restart.

        Raises:
            OctavoError: there were too many.
        """
        now, limit = time.monotonic(), self._setup.config.max_engine_restarts
        while self._restarts and self._restarts[0] < now - _RESTART_WINDOW:
            self._restarts.popleft()
        if len(self._restarts) >= limit:
            raise OctavoError(
                f"Front end {slot} {how}; that was death {len(self._restarts) + 1} of a front end "
                f"within ten minutes, and they are replaced {limit} times (--max-engine-restarts)."
            )
        self._restarts.append(now)
        logger.warning("front end %d %s; another one takes its place", slot, how)
