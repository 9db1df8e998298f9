"""Start and end of engine-core processes; `mp_client.py` communicates with them."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.engine.core_messages import WARM, CoreProcessSetup, CoreReady
from octavo.errors import reason_of, signal_name
from octavo.plan.memory_plan import MemoryPlan
from octavo.system import clock
from octavo.system.device import is_stopped, num_cpus
from octavo.system.socket_folder import SocketFolder

logger = logging.getLogger(__name__)


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
                # More workers than cores may be a mistake, which is reported later.
                *(() if warm is None else (WARM, str(min(warm.num_spare_workers, num_cpus())))),
            ],
            stdin=subprocess.PIPE,
            process_group=0,  # a Ctrl-C in the terminal is for the parent, from the very start
        )
        self.pid = self._process.pid
        self._killed_for: str | None = None
        self._stopped_for = 0.0
        self.was_stopped = False
        """True if `kill_if_stopped` ended the process."""

    def start(self, setup: CoreProcessSetup) -> None:
        """Open the channel, and send the setup, so that the process loads the model.

        Call this once.

        Raises:
            OSError: the system lacks resources for sockets.
        """
        self.started = True
        if setup.reached_by is None:
            self._folder = SocketFolder("octavo-engine-")
            self.input_address, self.output_address = (
                f"ipc://{self._folder.path}/{name}" for name in ("input", "output")
            )
            self._channel = IpcChannel(self.input_address, self.output_address)
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

    def kill(self, reason: str) -> None:
        """Kill a live process at once, for a reason that `describe_exit` reports."""
        if self._killed_for is None and self._process.poll() is None:
            self._killed_for = reason
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


def usable_process(spare: CoreProcess | None, warm: EngineConfig | None = None) -> CoreProcess:
    """Return the spare if it is usable; otherwise end it and return a new process.

    Args:
        spare: process that was started earlier, if any.
        warm: see `CoreProcess`; for a new process.

    Raises:
        OSError: the system lacks resources for the process.
    """
    if spare is not None:
        if spare.usable:
            return spare
        spare.shutdown(0.0)
    return CoreProcess(warm=warm)


def usable_spare(spare: CoreProcess | None, warm: EngineConfig) -> CoreProcess | None:
    """Return a usable spare, see `usable_process`; None if the system lacks resources."""
    try:
        return usable_process(spare, warm)
    except OSError as error:
        logger.warning("there is no warm spare: %s", reason_of(error))
        return None


class IpcChannel:
    """Implementation of `Channel` by two Unix sockets.

    Args:
        input_address: address where the process receives messages.
        output_address: address where it sends messages.

    Raises:
        OSError: the system lacks resources for sockets.
    """

    def __init__(self, input_address: str, output_address: str) -> None:
        self._context = zmq.asyncio.Context()
        try:
            self._input = self._context.socket(zmq.PUSH)
            self._output = self._context.socket(zmq.PULL)
            self._input.set_hwm(0)  # requests may queue up while the process starts
            self._input.connect(input_address)
            self._output.bind(output_address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from error

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return bool(self._context.closed)

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Implement `Channel`."""
        await self._input.send_multipart([kind, payload])

    async def receive(self, seconds: float) -> tuple[bytes, bytes] | None:
        """Implement `Channel`."""
        if not await self._output.poll(timeout=int(seconds * 1000)):
            return None
        kind, payload = await self._output.recv_multipart()
        return kind, payload

    def receive_nowait(self) -> tuple[bytes, bytes] | None:
        """Implement `Channel`."""
        try:
            # Without waiting, the result is a future that is done.
            received: Any = self._output.recv_multipart(zmq.NOBLOCK)
            kind, payload = received.result()
        except zmq.Again:
            return None
        return kind, payload

    def close(self) -> None:
        """Implement `Channel`."""
        self._context.destroy(linger=0)


class CoreLauncher:
    """Launcher of an engine's first process and of its replacements.

    Args:
        config: the engine's settings.
        model_path: the model's folder.
        default_batched_tokens: see `make_engine_core`.
        request_memory: see `make_engine_core`.
        warm_spare: see `make_engine_core`.
        process: the first process, started or not; None: create one.
        log_level: minimum level that a process logs.
        log_format: "text" or "json".
        record: the recording that the processes add to, if any.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        default_batched_tokens: int,
        request_memory: int | None,
        warm_spare: bool | None,
        process: CoreProcess | None = None,
        log_level: str,
        log_format: str,
        record: str | None = None,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._default_batched_tokens = default_batched_tokens
        self._request_memory = request_memory
        self._warm_spare = warm_spare
        self._log_level, self._log_format = log_level, log_format
        self._record = record
        self._spare = process

    def launch(self, ready: CoreReady | None, engine_index: int = 0) -> CoreProcess:
        """Start a process.

        Args:
            ready: answer of the first process, so that KV cache and context stay the same with any
                amount of free memory; None: this is the first process.
            engine_index: index of the engine among several, see `EngineCoreOutputs`.

        Raises:
            OSError: the system lacks resources for the process.
        """
        spare, self._spare = self._spare, None
        if spare is not None and spare.started:
            return spare
        process = usable_process(spare)
        try:
            process.start(self.make_setup(ready, engine_index))
        except OSError:
            process.shutdown(0.0)
            raise
        return process

    def make_setup(self, ready: CoreReady | None, engine_index: int) -> CoreProcessSetup:
        """Return the setup of a process; see `launch`."""
        config, warm_spare = self._config, self._warm_spare
        memory_limit = None
        if ready is not None:
            config, warm_spare = with_kv_cache_of(config, ready.plan), ready.plan.warm_spare
            if config.parallel.data_parallel_size > 1:  # other engines need the free memory, too
                memory_limit = ready.plan.limit
        return CoreProcessSetup(
            config=config,
            model_path=str(self._model_path),
            default_batched_tokens=self._default_batched_tokens,
            request_memory=self._request_memory,
            warm_spare=warm_spare,
            memory_limit=memory_limit,
            engine_index=engine_index,
            log_level=self._log_level,
            log_format=self._log_format,
            record=self._record,
        )

    def make_spare(self) -> None:
        """Start a spare interpreter that a later process can use, if none exists."""
        self._spare = usable_spare(self._spare, self._config)

    def shutdown(self) -> None:
        """End the spare. May be called twice."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.shutdown(0.0)


def with_kv_cache_of(config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
    """Return settings with the resolved KV cache and context.

    Args:
        config: the settings.
        plan: the memory plan that was made from them.
    """
    replace = msgspec.structs.replace
    return replace(
        config,
        model=replace(config.model, max_model_len=plan.max_model_len),
        cache=replace(
            config.cache, num_gpu_blocks_override=plan.num_blocks, kv_cache_memory_bytes=None
        ),
    )
