"""A front end's process, see `front_ends.py`: it reads its setup from standard input."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec
import uvloop

from octavo.config import api_keys_from_environment
from octavo.device import signal_at_parents_end
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.front_end import CoordinatorProcess, FrontEndClient
from octavo.errors import EngineDeadError, OctavoError
from octavo.logs import setup_logging
from octavo.server.front_ends import FrontEndSetup
from octavo.server.run import allow_files, prepare_process, serve
from octavo.server.state import ServerState

logger = logging.getLogger(__name__)


def main() -> int:
    """Serves until the parent ends it; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_at_parents_end(signal.SIGCONT)
    size = int.from_bytes(sys.stdin.buffer.read(4), "little")
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=FrontEndSetup)
    threading.Thread(target=_end_with_parent, args=(setup,), daemon=True).start()
    config = setup.config
    setup_logging(config.log_level, config.log_format, api_server=setup.slot)
    prepare_process()
    allow_files()
    keys = config.api_key + list(api_keys_from_environment().values())

    async def start() -> AsyncLLM:
        return _make_engine(setup)

    state = ServerState(config, setup.engine_config, start, keys)
    state.created = setup.created
    gc.freeze()
    try:
        with (
            socket.socket(fileno=setup.listener) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(serve(state, listener))
    except EngineDeadError:
        return 1  # the parent says why
    except OctavoError as error:
        logger.error("%s", error)
        return 1


def _make_engine(setup: FrontEndSetup) -> AsyncLLM:
    process = CoordinatorProcess(setup.input_address, setup.output_address)
    names = setup.engine_config.model.served_model_name
    client = FrontEndClient(process, lambda: engine.metrics.render())
    engine = AsyncLLM.for_front_end(
        setup.engine_config,
        Path(setup.model_path),
        Path(setup.tokenizer_path),
        client,
        setup.number,
        request_memory=setup.config.request_memory_bytes,
        served_name=names[0] if names else None,
        metrics_prefix=setup.config.metrics_prefix,
    )
    return engine


def _end_with_parent(setup: FrontEndSetup) -> None:
    """Ends the process when standard input ends: the parent is gone, and cannot tidy up."""
    while os.read(sys.stdin.fileno(), 1):  # a buffer's lock would outlive the thread
        pass
    shutil.rmtree(Path(setup.input_address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
