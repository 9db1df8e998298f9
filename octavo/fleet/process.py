"""Engine-core process on this machine; `mp_client.py` communicates with it.

A server imports this module first, so that the interpreter of its engine starts at once. Therefore
it imports little.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from octavo.config import EngineConfig
from octavo.errors import signal_name
from octavo.system import clock
from octavo.system.device import is_stopped, num_cpus
from octavo.system.socket_folder import SocketFolder

if TYPE_CHECKING:
    from octavo.engine.core_messages import CoreProcessSetup
    from octavo.fleet.ipc_channel import IpcChannel


class CoreProcess:
    """Engine-core process on this machine: an interpreter that waits for its setup.

    Args:
        warm: settings that determine its early imports and spare worker processes; None: it imports
            modules and starts workers after its setup.

    Raises:
        OSError: the system lacks resources for the process.
    """

    def __init__(self, *, warm: EngineConfig | None = None) -> None:
        self.input_address, self.output_address = "", ""
        """Addresses of the sockets for requests and outputs; the process only binds the first."""
        self._folder: SocketFolder | None = None
        """Folder of the sockets."""
        self._channel: IpcChannel | None = None
        self.started = False
        """True if `start` has been called."""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "octavo.engine.core_process"),
                # With an argument it warms up, and starts that number of worker processes.
                # More workers than cores may be a mistake, which is reported later.
                *(() if warm is None else (str(min(warm.num_spare_workers, num_cpus())),)),
            ],
            stdin=subprocess.PIPE,
            process_group=0,  # a Ctrl-C in the terminal is for the parent, from the very start
        )
        self.pid = self._process.pid
        self._killed_for: str | None = None
        self._stopped_for = 0.0
        self.was_stopped = False
        """True if `kill_if_stopped` ended the process, or `kill` for no fault of its own."""

    def start(self, setup: CoreProcessSetup) -> None:
        """Open the channel, and send the setup, so that the process loads the model.

        Call this once.

        Raises:
            OSError: the system lacks resources for sockets.
        """
        from octavo.fleet.ipc_channel import IpcChannel

        self.started = True
        if setup.reached_by is None:
            self._folder = SocketFolder("octavo-engine-")
            self.input_address, self.output_address = (
                f"ipc://{self._folder.path}/{name}" for name in ("input", "output")
            )
            self._channel = IpcChannel(self.input_address, self.output_address, self.pid)
        setup = msgspec.structs.replace(
            setup,
            input_address=self.input_address,
            output_address=self.output_address,
            clock_epoch=clock.epoch(),
        )
        data = msgspec.msgpack.encode(setup)
        assert self._process.stdin is not None
        # The pipe stays open: its end notifies the child that this process has ended. If the
        # child has died already, callers of `describe_exit` find that.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(len(data).to_bytes(4, "little") + data)
            self._process.stdin.flush()

    def open_channel(self) -> IpcChannel:
        """Return the channel to the process; call `start` first."""
        assert self._channel is not None
        return self._channel

    def describe_exit(self) -> str | None:
        """Describe how the process ended; return None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if self._killed_for is not None:
            return f"{self._killed_for} and was killed"
        if code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"the engine process was killed by {signal_name(-code)}{hint}"
        return f"the engine process ended with status {code}"

    @property
    def usable(self) -> bool:
        """True if the process can be started: it has not ended, and no signal has stopped it."""
        return self.describe_exit() is None and not is_stopped(self.pid)

    def kill(self, reason: str, *, is_victim: bool = False) -> None:
        """Kill a live process at once, for a reason that `describe_exit` reports.

        Args:
            reason: the reason.
            is_victim: True if neither the process nor a request is the cause.
        """
        if self._killed_for is None and self._process.poll() is None:
            self._killed_for, self.was_stopped = reason, self.was_stopped or is_victim
            self._process.kill()

    def kill_if_stopped(self, nap: float, limit: float) -> None:
        """Kill the process if a signal has stopped it for too long.

        Args:
            nap: seconds since the last call, without the time that the machine was suspended.
            limit: seconds after which it is killed.
        """
        self._stopped_for = self._stopped_for + nap if is_stopped(self.pid) else 0.0
        if self._stopped_for >= limit:
            self.was_stopped = True
            self.kill(f"the engine process was stopped by a signal for {self._stopped_for:.1f} s")

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the process: request its end, and kill it after `timeout` seconds.

        May be called twice.
        """
        if self._channel is not None:
            self._channel.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its setup may still be unread
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        folder, self._folder = self._folder, None  # two threads may wait for the same process
        if folder is not None:
            folder.close()
