"""Process of the coordinator, see `api_servers.py`; it has the engines of all API servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import uvloop

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import OctavoError
from octavo.fleet.coordinator import Coordinator, FrontEndConnection
from octavo.fleet.start import EngineProcesses, start_engines
from octavo.models.registry import read_spec
from octavo.observability.metrics import EngineMetrics
from octavo.plan.memory_plan import SERVER_NBYTES, resolve_max_model_len
from octavo.server.api_servers import CoordinatorSetup, Place
from octavo.server.child_process import Parent, read_message
from octavo.system import clock
from octavo.system.device import signal_at_parents_end
from octavo.system.logs import setup_logging

logger = logging.getLogger(__name__)

_END_SIGNALS = signal.SIGTERM, signal.SIGINT


def main() -> int:
    """Run until the parent ends it; return the exit status."""
    # The parent decides when; a service manager sends SIGTERM to all processes.
    for number in _END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal_at_parents_end(signal.SIGCONT)
    setup = read_message(CoordinatorSetup)
    if setup is None:
        return 0
    clock.set_epoch(setup.clock_epoch)
    setup_logging(setup.config.log_level, setup.config.log_format)
    tempfile.tempdir = setup.folder  # files of a killed coordinator disappear with the server
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_coordinate(setup))


async def _coordinate(setup: CoordinatorSetup) -> int:
    """Run until the parent has ended, or ends it; return the exit status."""
    parent = Parent(setup.pulse)
    try:
        coordinator = _make_coordinator(setup)
    except OctavoError as error:
        parent.tell_failure(error)
        return 1
    beats = asyncio.create_task(parent.beat())
    places = _Places(coordinator)
    running = asyncio.create_task(coordinator.run())
    await asyncio.wait({running, places.ended}, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    try:
        if running.done():
            running.result()  # raises
    except OctavoError as error:
        status = 1
        if coordinator.is_final:
            beats.cancel()
            parent.tell_failure(error)
            await places.ended  # front ends are still notified
        else:
            logger.warning("%s", error)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await coordinator.shutdown()
        beats.cancel()
    return status


def _make_coordinator(setup: CoordinatorSetup) -> Coordinator:
    config, engine_config, path = setup.config, setup.engine_config, Path(setup.model_path)
    names, parallel = engine_config.model.served_model_name, engine_config.parallel.of_server()
    processes = EngineProcesses(
        config.progress_timeout,
        config.max_engine_restarts,
        config.warm_spare,
        # The memory of all front ends' processes but one is counted with the requests.
        request_memory=config.request_memory_bytes + config.api_server_count * SERVER_NBYTES,
        log_level=config.log_level,
        log_format=config.log_format,
        reports_steps=config.reports_steps,
    )
    checkpoint = open_checkpoint(
        path, engine_config.load.load_format, mmproj=engine_config.load.mmproj
    )
    spec = read_spec(checkpoint, engine_config.model)
    metrics = EngineMetrics(
        names[0] if names else engine_config.model.model,
        resolve_max_model_len(engine_config, spec),
        config.metrics_prefix,
        first_engine=parallel.first_engine,
    )
    tokenizer_path = Path(setup.tokenizer_path)
    return Coordinator(
        metrics,
        partial(start_engines, engine_config, path, tokenizer_path, processes),
        parallel.data_parallel_size,
        is_first=setup.life == 0,
    )


class _Places:
    """Reader of the parent's messages about the front ends."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._front_ends: dict[int, FrontEndConnection] = {}
        self._loop = asyncio.get_running_loop()
        self._removals: set[asyncio.Task[None]] = set()
        self.ended = self._loop.create_future()
        """Future that is done after the parent's last message."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            while (place := read_message(Place)) is not None:
                self._loop.call_soon_threadsafe(self._take, place)
            self._loop.call_soon_threadsafe(self._end)

    def _take(self, place: Place) -> None:
        if place.present:
            front_end = FrontEndConnection(place.number, place.input_address, place.output_address)
            self._front_ends[place.number] = front_end
            self._coordinator.add(front_end)
        elif (gone := self._front_ends.pop(place.number, None)) is not None:
            removal = asyncio.create_task(self._coordinator.remove(gone))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


if __name__ == "__main__":
    sys.exit(main())
