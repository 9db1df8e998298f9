"""Servers that the router starts, watches, restarts and ends itself.

On this machine each listens on a Unix socket in a folder that only this user can open, so that no
other client can bypass the router.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from octavo.config import environment_without_keys
from octavo.errors import OctavoError, reason_of, signal_name
from octavo.router.pool import Pool, Upstream
from octavo.system.device import is_stopped

logger = logging.getLogger(__name__)

P = TypeVar("P", bound="LocalServer")

# Interval of checks for live processes.
_LOOK_SECONDS = 0.1
# Delay before the restart of a dead server: doubled each time, until a server lives long enough.
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_LIVED_SECONDS = 60.0
# Shorter stops are ignored.
_STOPPED_SECONDS = 0.5
# Number of consecutive timeouts of probes after which a server is killed and replaced.
_MOST_SILENT = 6
# Time in addition to shutdown_timeout until a server that is to end is killed.
_END_SECONDS = 10.0


class ServerProcess(Protocol):
    """Process of a started server, on any machine."""

    failure: str | None
    """Cause of a failed start; None: the server's log contains it."""

    @property
    def is_stopped(self) -> bool:
        """True if a signal such as SIGSTOP has stopped the server."""
        ...

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        ...

    def terminate(self) -> None:
        """Request an orderly end."""

    def kill(self) -> None:
        """Kill the server."""

    def wait(self) -> int:
        """Wait for its end, and return its exit status."""
        ...


class Starter(Protocol):
    """Starter of servers of one kind."""

    def make_upstream(self, name: str) -> Upstream:
        """Make a server for the router, without starting it."""
        ...

    def start(self, upstream: Upstream) -> ServerProcess:
        """Start or restart a server.

        Raises:
            OSError: the system lacks resources for it.
        """
        ...


class LocalServer(subprocess.Popen[bytes]):
    """Process on this machine."""

    failure: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Implement `ServerProcess`."""
        return is_stopped(self.pid)


def start_local(
    flags: list[str],
    upstream: Upstream,
    kind: type[P],
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> P:
    """Start a server on this machine, at its Unix socket.

    Args:
        flags: words for `octavo serve`.
        upstream: the server.
        kind: class of its process.
        environment: further environment variables.
        more: further arguments of the class.

    Raises:
        OSError: the system lacks resources for it.
    """
    assert upstream.socket is not None
    return kind(
        [
            *(sys.executable, "-m", "octavo.router.server_process", str(os.getpid())),
            *(*flags, "--uds", upstream.socket),
            *("--max-connections-per-client", "0", "--disable-fastapi-docs"),
        ],
        stdin=subprocess.DEVNULL,
        env={**environment_without_keys(), **(environment or {})},
        process_group=0,  # a Ctrl-C in the terminal is for the router
        **more,
    )


class LocalStarter:
    """Starter of servers on this machine.

    Args:
        flags: words for `octavo serve`.
        folder: folder of their sockets.
    """

    def __init__(self, flags: list[str], folder: Path) -> None:
        self._flags, self._folder = flags, folder

    def make_upstream(self, name: str) -> Upstream:
        """Implement `Starter`."""
        return Upstream(name, "http://localhost", str(self._folder / name))

    def start(self, upstream: Upstream) -> ServerProcess:
        """Implement `Starter`."""
        return start_local(self._flags, upstream, LocalServer)


class ManagedServers:
    """Own servers of one kind.

    Args:
        pool: pool that they are added to.
        role: prefill, decode or replica.
        starter: starts a server.
        shutdown_timeout: seconds for requests in flight when a server is to end.
        on_failure: called with the cause when no server can be started.
    """

    def __init__(
        self,
        pool: Pool,
        role: str,
        starter: Starter,
        shutdown_timeout: float,
        on_failure: Callable[[OctavoError], None],
    ) -> None:
        self.pool = pool
        self.role = role
        self.num_restarts = 0
        self._starter = starter
        self._shutdown_timeout = shutdown_timeout
        self._on_failure = on_failure
        self._next = 0
        self._tasks: dict[Upstream, asyncio.Task[None]] = {}
        self._processes: dict[Upstream, ServerProcess] = {}

    @property
    def staying(self) -> list[Upstream]:
        """Servers that are not to end."""
        return [upstream for upstream in self._tasks if not upstream.leaving]

    def scale(self, count: int) -> None:
        """Start servers, or end those with the least load, until there are `count`."""
        staying = self.staying
        for _ in range(count - len(staying)):
            name = f"{self.role}-{self._next}"
            self._next += 1
            upstream = self._starter.make_upstream(name)
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
        """End all servers."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(self._end(upstream) for upstream in list(self._processes)))

    async def _keep(self, upstream: Upstream) -> None:
        """Keep a server running until it is to end."""
        pause = _FIRST_PAUSE
        while True:
            began = time.monotonic()
            try:
                process = self._processes[upstream] = self._starter.start(upstream)
            except OSError as error:
                raise OctavoError(
                    f"{upstream.name} cannot be started: {reason_of(error)}."
                ) from None
            logger.info("server starts", extra={"server": upstream.name})
            reason = await self._watch(upstream, process)
            if upstream.leaving:
                break
            if not upstream.epoch and (process.poll() or 0) > 0:
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

    async def _watch(self, upstream: Upstream, process: ServerProcess) -> str:
        """Wait until a server has ended, is to end, or does not answer; return a description.

        A server that does not answer is killed.
        """
        stopped = 0.0
        while (status := process.poll()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
            if upstream.leaving and not upstream.num_requests:
                return "is to end"
            stopped = stopped + _LOOK_SECONDS if process.is_stopped else 0.0
            if stopped >= _STOPPED_SECONDS:
                process.kill()
                return "was stopped by a signal such as SIGSTOP, and killed"
            if upstream.silent >= _MOST_SILENT:
                process.kill()
                return "does not answer and was killed"
        if process.failure is not None:
            return f"failed: {process.failure},"
        return (
            f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        )

    async def _end(self, upstream: Upstream) -> None:
        """End a server's process, if it still runs."""
        process = self._processes.pop(upstream, None)
        if process is None:
            return
        process.terminate()
        left = self._shutdown_timeout + _END_SECONDS
        while process.poll() is None and left > 0:
            await asyncio.sleep(_LOOK_SECONDS)
            left -= _LOOK_SECONDS
        process.kill()
        await asyncio.to_thread(process.wait)
