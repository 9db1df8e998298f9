"""Server process of one of several models."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import OctavoError
from octavo.router.managed_servers import LocalServer, ManagedServers, start_local
from octavo.router.pool import Pool, Upstream
from octavo.server.adapter_table import FILE_VARIABLE

# Interval of probes of a server that is loading its model, in seconds.
_LOOK_SECONDS = 0.1
# Time for the last lines of a process that has ended: its children may keep the pipe open.
_LAST_LINES_SECONDS = 2.0
_ERROR = "octavo: error: "
_LONGEST_LINE = 2**16


class _LabelledServer(LocalServer):
    """Process whose lines on stderr show the model.

    Args:
        command: its command line.
        label: name of the model.
        options: options of `subprocess.Popen`.
    """

    def __init__(self, command: list[str], label: str, **options: Any) -> None:
        super().__init__(command, stderr=subprocess.PIPE, **options)
        self._label = label
        self._end: float | None = None
        """Second of `time.monotonic` at which its end was noticed."""
        self._reader = threading.Thread(target=self._pass_on_lines, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Return the exit status, after the last lines; None before."""
        status = super().poll()
        if status is None or not self._reader.is_alive():
            return status
        self._end = self._end or time.monotonic()
        return status if time.monotonic() > self._end + _LAST_LINES_SECONDS else None

    def _pass_on_lines(self) -> None:
        assert self.stderr is not None
        with self.stderr as lines:
            while line := lines.readline(_LONGEST_LINE):
                text = line.decode(errors="replace")
                if text.startswith(_ERROR):
                    self.failure = text.removeprefix(_ERROR).strip()
                sys.stderr.write(labelled(text, self._label))
                sys.stderr.flush()


def labelled(line: str, model: str) -> str:
    """Return a line of the log with the name of the model that it is about."""
    if line.startswith("{"):  # --log-format json
        return f'{{"model":{msgspec.json.encode(model).decode()},{line[1:]}'
    return f"[{' '.join(model.split())}] {line}"


class ModelStarter:
    """Starter of the server of a model.

    Args:
        name: name of the model.
        socket: Unix socket of the server.
        adapters: file of the table of its adapters, which outlives its processes; None: it has no
            adapters.
    """

    def __init__(self, name: str, socket: Path, adapters: Path | None = None) -> None:
        self._name, self._socket = name, socket
        self._environment = {} if adapters is None else {FILE_VARIABLE: str(adapters)}
        self.flags: list[str] = []
        """Words for `octavo serve`."""

    def make_upstream(self, name: str) -> Upstream:
        """Implement `Starter`."""
        return Upstream(self._name, "http://localhost", str(self._socket))

    def start(self, upstream: Upstream) -> LocalServer:
        """Implement `Starter`."""
        return start_local(
            self.flags,
            upstream,
            _LabelledServer,
            environment=self._environment,
            label=self._name,
        )


class ModelServer:
    """Server of a model, which is started to load the model, and ended to unload it.

    Args:
        starter: starts it.
        pool: pool that has the server while it runs.
        shutdown_timeout: seconds for requests in flight at the end.
        prepare: completes the starter before each load; it may raise OctavoError.
        on_loss: called if the server cannot be started, or not again.
    """

    def __init__(
        self,
        starter: ModelStarter,
        pool: Pool,
        shutdown_timeout: float,
        prepare: Callable[[], Awaitable[None]],
        on_loss: Callable[[OctavoError], None],
    ) -> None:
        self.pool = pool
        self._starter = starter
        self._shutdown_timeout = shutdown_timeout
        self._prepare, self._on_loss = prepare, on_loss
        self._own: ManagedServers | None = None
        self._num_earlier_restarts = 0

    @property
    def num_restarts(self) -> int:
        """Number of times that a dead server was started again."""
        return self._num_earlier_restarts + (0 if self._own is None else self._own.num_restarts)

    async def load(self) -> None:
        """Implement `Backend`."""
        await self.unload()  # what a loss has left
        await self._prepare()
        failures: list[OctavoError] = []

        def note(error: OctavoError) -> None:
            failures.append(error)
            self._on_loss(error)

        own = self._own = ManagedServers(
            self.pool, "model", self._starter, self._shutdown_timeout, note
        )
        own.scale(1)
        (upstream,) = own.staying
        try:
            while not upstream.ready:
                if failures:
                    raise failures[0]
                upstream.suspected.set()  # probe it again
                await asyncio.sleep(_LOOK_SECONDS)
        except BaseException:
            await self.unload()
            raise

    async def unload(self) -> None:
        """Implement `Backend`."""
        own, self._own = self._own, None
        if own is None:
            return
        self._num_earlier_restarts += own.num_restarts
        for upstream in self.pool.upstreams:
            upstream.leaving = True
        await own.close()
        for upstream in list(self.pool.upstreams):
            await self.pool.remove(upstream)
