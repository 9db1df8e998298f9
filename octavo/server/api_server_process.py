"""Process of an API server, see `api_servers.py`; it reads its setup from standard input."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import uvloop

from octavo.errors import EngineDeadError, OctavoError
from octavo.fleet.coordinator_client import CoordinatorClient, CoordinatorProcess
from octavo.frontend.async_llm import AsyncLLM
from octavo.server.adapter_table import AdapterTable
from octavo.server.api_servers import REPLACED, APIServerSetup
from octavo.server.child_process import Parent, read_message
from octavo.server.listen import allow_files
from octavo.server.run import prepare_process
from octavo.server.serve import END_SIGNALS, serve
from octavo.server.state import ServerState
from octavo.system import clock
from octavo.system.device import signal_at_parents_end
from octavo.system.garbage import exempt_present_objects
from octavo.system.logs import setup_logging

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until the parent ends it; return the exit status."""
    # The parent decides when to drain or stop. A service manager sends SIGTERM to all processes,
    # and a signal in addition to the parent's would be a second one, which does not drain.
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal_at_parents_end(signal.SIGCONT)
    setup = read_message(APIServerSetup)
    if setup is None:
        return 0
    clock.set_epoch(setup.clock_epoch)
    coordinator = CoordinatorProcess(setup.folder, setup.number, setup.life)
    signals = _ParentSignals()
    heeds = setup, coordinator, signals
    threading.Thread(target=_heed_parent, args=heeds, daemon=True).start()
    config = setup.config
    setup_logging(config.log_level, config.log_format, api_server=setup.slot)
    prepare_process()
    allow_files()

    parent = Parent(setup.pulse)
    beats = []

    async def start() -> AsyncLLM:
        engine = _make_engine(setup, coordinator)
        beats.append(asyncio.create_task(parent.beat()))  # keeps a reference to the task
        return engine

    adapters = AdapterTable(Path(setup.adapters))
    state = ServerState(config, setup.engine_config, start, adapters)
    state.created = setup.created
    exempt_present_objects()
    try:
        with (
            socket.socket(fileno=setup.listener) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            is_first = setup.slot == 0
            return runner.run(serve(state, listener, signals.hear, announces=is_first))
    except EngineDeadError:
        return 1  # the parent logs why
    except OctavoError as error:
        logger.error("%s", error)
        return 1


def _make_engine(setup: APIServerSetup, coordinator: CoordinatorProcess) -> AsyncLLM:
    engine = AsyncLLM(
        setup.engine_config,
        Path(setup.model_path),
        Path(setup.tokenizer_path),
        lambda unfinished, _: CoordinatorClient(
            coordinator, lambda: engine.metrics.render(), unfinished
        ),
        request_memory=setup.config.request_memory_bytes,
        metrics_prefix=setup.config.metrics_prefix,
        front_end=setup.number,
        shared_media=Path(setup.media),
    )
    return engine


class _ParentSignals:
    """Relay of the parent's signals; a signal without a listener ends the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_signal: Callable[[int], None] = lambda number: None

    def hear(self, on_signal: Callable[[int], None]) -> None:
        """Call `on_signal` in the running event loop for each signal from now on."""
        with self._lock:
            self._loop, self._on_signal = asyncio.get_running_loop(), on_signal

    def tell(self, number: int) -> None:
        """Relay a signal; runs on another thread."""
        with self._lock:
            if self._loop is None:
                os._exit(0)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
                self._loop.call_soon_threadsafe(self._on_signal, number)


def _heed_parent(
    setup: APIServerSetup, coordinator: CoordinatorProcess, signals: _ParentSignals
) -> None:
    """Relay signals; end the process after the parent, which can no longer clean up."""
    while number := os.read(sys.stdin.fileno(), 1):  # a buffer's lock would outlive the thread
        if number == REPLACED:
            coordinator.replace()
        else:
            signals.tell(number[0])
    shutil.rmtree(setup.folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
