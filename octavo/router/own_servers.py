"""Servers that the router starts itself, on its own machine: watched, started again, ended.

Each listens on a Unix socket in a folder that only this user can open, so that nobody gets past the
router.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from octavo.arguments import setting_flags
from octavo.config import (
    API_KEY_VARIABLES,
    EngineConfig,
    ServerConfig,
    config_fields,
    section_fields,
)
from octavo.device import is_stopped, num_cpus
from octavo.errors import ConfigError, OctavoError, reason_of, signal_name
from octavo.router.config import PASSED_ON, RouterConfig
from octavo.router.pool import Pool, Upstream

logger = logging.getLogger(__name__)

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""What servers of a kind do with the KV cache; those of other kinds do all of a request."""

# Memory for prompts that wait until a decode server has fetched them; who fetches keeps none.
_HANDED_NBYTES = 2**30
_KEPT_NBYTES = 64 * 2**20
# Between two looks whether a process lives.
_LOOK_SECONDS = 0.1
# Before a dead server is started again: twice as long each time, unless it has lived for a while.
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_LIVED_SECONDS = 60.0
# A stop that is over sooner is no reason.
_STOPPED_SECONDS = 0.5
# Probes in a row that a server lets time out until it is killed, and another one started.
_MOST_SILENT = 6
# Beside shutdown_timeout, until a server that is to end is killed.
_END_SECONDS = 10.0


def flags_of_kinds(
    router: RouterConfig,
    server: Mapping[str, object],
    engine: Mapping[str, Any],
    config: EngineConfig,
) -> dict[str, list[str]]:
    """The words for `octavo serve`, for each kind of server that a router starts itself.

    Args:
        router: which these are.
        server: settings of the server that were given for them.
        engine: those of the engine.
        config: the engine's, complete.

    Raises:
        ConfigError: there is none, though settings for some were given, or they contradict.
    """
    if router.num_own == 0:
        if given := [*engine, *(name for name in server if name not in PASSED_ON)]:
            raise ConfigError(
                f"{given[0]} is for servers that the router starts, and it starts none; give "
                "--replicas N, or --prefill N with --decode N, too, or leave it out."
            )
        return {}
    events = config.cache.kv_events_config
    if router.most_own > 1 and events is not None and events.enable_kv_cache_events:
        raise ConfigError(
            "kv_events_config names one address, and the router starts several servers; leave it "
            "out, or start the servers yourself."
        )
    counts = {"replica": router.replicas, "decode": router.decode, "prefill": router.prefill}
    return {
        kind: server_flags(kind, server, engine, config, router.most_own)
        for kind, count in counts.items()
        if count
    }


def server_flags(
    role: str,
    server: Mapping[str, object],
    engine: Mapping[str, Any],
    config: EngineConfig,
    most: int,
) -> list[str]:
    """The words for `octavo serve` that start one of several servers of a machine.

    Cores and memory are shared equally among them, unless the settings say how many threads.

    Args:
        role: prefill, decode or replica.
        server: settings of the server that were given.
        engine: those of the engine.
        config: the engine's, complete.
        most: servers that there may be at one time.
    """
    device, cache = config.device, config.cache
    shared = dict(engine)
    shared["gpu_memory_utilization"] = cache.gpu_memory_utilization / most
    if device.num_threads is None:
        num_processes = config.parallel.data_parallel_size * (
            device.tensor_parallel_size * device.pipeline_parallel_size
        )
        shared["num_threads"] = max(1, num_cpus() // (most * num_processes))
    if role in ROLES:
        transfer: dict[str, Any] = {
            "kv_connector": "P2PConnector",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": _HANDED_NBYTES if role == "prefill" else _KEPT_NBYTES
            },
        }
        if cache.kv_transfer_config is not None:
            transfer = msgspec.to_builtins(cache.kv_transfer_config)
        shared["kv_transfer_config"] = transfer | {"kv_role": ROLES[role]}
    fields = [*config_fields(EngineConfig), *section_fields(ServerConfig)]
    return setting_flags(shared | dict(server), fields)


class OwnServers:
    """Servers of one kind.

    Args:
        pool: where they are to be found.
        role: prefill, decode or replica.
        flags: words for `octavo serve`.
        folder: for their sockets.
        shutdown_timeout: seconds that requests in flight get when a server is to end.
        on_failure: called when none can be started, with the reason.
    """

    def __init__(
        self,
        pool: Pool,
        role: str,
        flags: list[str],
        folder: Path,
        shutdown_timeout: float,
        on_failure: Callable[[OctavoError], None],
    ) -> None:
        self.pool = pool
        self.role = role
        self.num_restarts = 0
        self._flags = flags
        self._folder = folder
        self._shutdown_timeout = shutdown_timeout
        self._on_failure = on_failure
        self._next = 0
        self._tasks: dict[Upstream, asyncio.Task[None]] = {}
        self._processes: dict[Upstream, subprocess.Popen[bytes]] = {}

    @property
    def staying(self) -> list[Upstream]:
        """Those that are not to end."""
        return [upstream for upstream in self._tasks if not upstream.leaving]

    def scale(self, count: int) -> None:
        """Starts servers, or has those with the least to do end, until there are `count`."""
        staying = self.staying
        for _ in range(count - len(staying)):
            name = f"{self.role}-{self._next}"
            self._next += 1
            upstream = Upstream(name, "http://localhost", str(self._folder / name))
            self.pool.add(upstream)
            task = self._tasks[upstream] = asyncio.create_task(self._keep(upstream))
            task.add_done_callback(self._note_end)
        by_load = sorted(staying, key=lambda upstream: (upstream.ready, upstream.load))
        for upstream in by_load[: max(0, len(staying) - count)]:
            upstream.leaving = True
            logger.info("server is to end", extra={"server": upstream.name})

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(
                error if isinstance(error, OctavoError) else OctavoError(f"Unexpected: {error!r}")
            )

    async def close(self) -> None:
        """Ends them all."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(self._end(upstream) for upstream in list(self._processes)))

    async def _keep(self, upstream: Upstream) -> None:
        """Has a server run until it is to end."""
        pause = _FIRST_PAUSE
        while True:
            began = time.monotonic()
            process = self._start(upstream)
            reason = await self._watch(upstream, process)
            if upstream.leaving:
                break
            if not upstream.epoch and process.returncode is not None and process.returncode > 0:
                raise OctavoError(f"{upstream.name} {reason} before it was ready; see above why.")
            await self._end(upstream)
            self.num_restarts += 1
            pause = _FIRST_PAUSE if time.monotonic() - began > _LIVED_SECONDS else 2 * pause
            logger.warning(
                "server is started again", extra={"server": upstream.name, "reason": reason}
            )
            self.pool.restarted(upstream)
            await asyncio.sleep(min(pause, _LONGEST_PAUSE))
        await self._end(upstream)
        await self.pool.remove(upstream)
        del self._tasks[upstream]

    def _start(self, upstream: Upstream) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k not in API_KEY_VARIABLES}
        try:
            process = self._processes[upstream] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "octavo.router.server_process", str(os.getpid())),
                    *(*self._flags, "--uds", str(self._folder / upstream.name)),
                    *("--max-connections-per-client", "0", "--disable-fastapi-docs"),
                ],
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,  # a Ctrl-C in the terminal is for the router
            )
        except OSError as error:
            raise OctavoError(f"{upstream.name} cannot be started: {reason_of(error)}.") from None
        logger.info("server starts", extra={"server": upstream.name, "pid": process.pid})
        return process

    async def _watch(self, upstream: Upstream, process: subprocess.Popen[bytes]) -> str:
        """Waits until a server has ended, is to end, or does not answer; returns what it did.

        One that does not answer is killed.
        """
        stopped = 0.0
        while (status := process.poll()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
            if upstream.leaving and not upstream.num_requests:
                return "is to end"
            stopped = stopped + _LOOK_SECONDS if is_stopped(process.pid) else 0.0
            if stopped >= _STOPPED_SECONDS:
                process.kill()
                return "was stopped by a signal such as SIGSTOP, and killed"
            if upstream.silent >= _MOST_SILENT:
                process.kill()
                return "does not answer and was killed"
        return (
            f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        )

    async def _end(self, upstream: Upstream) -> None:
        """Ends a server's process, if it has not ended."""
        process = self._processes.pop(upstream, None)
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        left = self._shutdown_timeout + _END_SECONDS
        while process.poll() is None and left > 0:
            await asyncio.sleep(_LOOK_SECONDS)
            left -= _LOOK_SECONDS
        process.kill()
        process.wait()
