"""`octavo serve` with a fake engine: python -m tests.server.fake_serve MODE [flags].

MODE: ready; slow (needs 100 ms a token); held (makes one token, and the others after SIGUSR1);
loading (is never ready); broken (cannot load); impatient (a client's timeouts are short).
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from types import SimpleNamespace

from octavo import cli
from octavo.errors import EngineDeadError
from octavo.fleet import process
from octavo.server import protocol, run, serve
from tests.server.fake_engine import FakeAsyncLLM


class HeldEngine(FakeAsyncLLM):
    """It pauses after each step until a signal comes."""

    def __init__(self, config):
        super().__init__(config)
        self.is_held = True
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._go_on)

    def _step(self, *args):
        self.paused = self.is_held
        return super()._step(*args)

    def _go_on(self):
        self.is_held = self.paused = False


def main() -> int:
    mode = sys.argv[1]

    async def start(config, engine_config, processes):
        # The server's changes to its process, for tests.
        logging.getLogger("octavo").info(
            "process",
            extra={
                "parallel": os.environ["TOKENIZERS_PARALLELISM"],
                "switch_interval": sys.getswitchinterval(),
                "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
                "frozen": gc.get_freeze_count() > 0,
            },
        )
        engine = (HeldEngine if mode == "held" else FakeAsyncLLM)(engine_config)
        engine.step_time = 0.1 if mode == "slow" else 0.0
        if mode in ("loading", "broken"):
            engine.ready = False
            engine.loaded.clear()
        if mode == "broken":
            engine.load_error = EngineDeadError("the weights need 5 GiB, 1 GiB is free")
            asyncio.get_running_loop().call_later(0.3, engine.loaded.set)
        return engine

    run.start_loading = lambda engine_config, processes: None
    serve.start_engine = start
    process.CoreProcess = lambda warm: SimpleNamespace(shutdown=lambda timeout: None)
    if mode == "impatient":
        protocol.HEAD_TIMEOUT = protocol.SEND_TIMEOUT = 0.5
        serve.KEEP_ALIVE_TIMEOUT = 1
    flags = sys.argv[2:]
    host = [] if "--host" in flags else ["--host", "127.0.0.1"]
    port = [] if "--port" in flags else ["--port", "0"]
    return cli.main(["serve", *host, *port, *flags])


if __name__ == "__main__":
    sys.exit(main())
