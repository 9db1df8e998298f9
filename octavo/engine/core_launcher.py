"""Starting and ending an engine-core process; talking to it is `mp_client.py`'s."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from octavo.config import EngineConfig
from octavo.engine.wire import CoreProcessSetup


class CoreProcess:
    """An engine-core process on this machine.

    Args:
        config: the engine's settings.
        model_path: the model's folder.
        default_batched_tokens: see `make_engine_core`.
        request_memory: see there.
        log_level: minimum level that the process logs.
        log_format: "text" or "json".
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        default_batched_tokens: int,
        request_memory: int,
        log_level: str,
        log_format: str,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="octavo-")
        self.input_address, self.output_address = (
            f"ipc://{self._folder}/{name}" for name in ("input", "output")
        )
        """Where it takes requests, and where it sends outputs: it binds the first only."""
        setup = msgspec.msgpack.encode(
            CoreProcessSetup(
                config=config,
                model_path=str(model_path),
                default_batched_tokens=default_batched_tokens,
                request_memory=request_memory,
                input_address=self.input_address,
                output_address=self.output_address,
                log_level=log_level,
                log_format=log_format,
            )
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.core_process"],
            stdin=subprocess.PIPE,
            process_group=0,  # a Ctrl-C in the terminal is for the parent, from the very start
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        # The pipe stays open: its end tells the child that this process is gone. What a child says
        # that has died already is found by who looks for its end.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(len(setup).to_bytes(4, "little") + setup)
            self._process.stdin.flush()

    def describe_exit(self) -> str | None:
        """How the process ended, for people; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"the engine process was killed by {name}{hint}"
        return f"the engine process ended with status {code}"

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ends the process: asks it to, and after `timeout` seconds makes it.

        May be called twice.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
