"""Server that a router has started on a node of a Ray cluster, in an actor.

The router's side is a thread, since Ray's calls block.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from octavo.config import API_KEY_VARIABLES, environment_without_keys
from octavo.executor.ray_session import SESSION
from octavo.router.pool import Upstream
from octavo.router.server_flags import HOST
from octavo.system.device import is_stopped

_LOOK_SECONDS = 0.25
# Time without an answer after which an actor is lost, with its server.
_LOST_SECONDS = 30.0


class ServerActor:
    """Ray actor that starts a server on its node, and ends it."""

    def start(self, words: list[str], key: str) -> str:
        """Start the server; return its address."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        environment = environment_without_keys()
        environment[API_KEY_VARIABLES[0]] = key
        words = [word.replace(HOST, host) for word in words]
        words += ["--host", host, "--port", str(port)]
        module = [sys.executable, "-m", "octavo.router.server_process", str(os.getpid())]
        self._process = subprocess.Popen(
            [*module, *words], stdin=subprocess.DEVNULL, env=environment, process_group=0
        )
        return f"http://{host}:{port}"

    def poll(self) -> tuple[int | None, bool]:
        """Return its exit status, if it has ended, and True if a signal has stopped it."""
        status = self._process.poll()
        return status, status is None and is_stopped(self._process.pid)

    def terminate(self) -> None:
        """Request an orderly end."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the server."""
        self._process.kill()


class RayServer:
    """Counterpart of `subprocess.Popen` for a server on a node.

    Args:
        words: words for `octavo serve`.
        num_cpus: cores of a node that Ray reserves for it.
        on_start: called, on a thread, with its address and the API key that it requires.
    """

    def __init__(
        self, words: list[str], num_cpus: int, on_start: Callable[[str, str], object]
    ) -> None:
        self.returncode: int | None = None
        self.is_stopped = False
        self.failure: str | None = None
        """Cause of a failed start, or None."""
        self._words, self._num_cpus, self._on_start = words, num_cpus, on_start
        self._wanted: signal.Signals | None = None
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-ray-server", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Return its exit status, if it has ended; -9 if it was lost with its node."""
        return self.returncode

    def terminate(self) -> None:
        """Request an orderly end."""
        self._want(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server."""
        self._want(signal.SIGKILL)

    def _want(self, number: signal.Signals) -> None:
        self._wanted = number
        self._changed.set()

    def wait(self) -> int:
        """Wait for its end; return its exit status."""
        self._thread.join()
        assert self.returncode is not None
        return self.returncode

    def _run(self) -> None:
        status = 1
        try:
            SESSION.join()
            try:
                status = self._keep()
            finally:
                SESSION.leave()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        self.returncode = status

    def _keep(self) -> int:
        """Run a server on some node; return its exit status."""
        actor: Any = (
            ray.remote(ServerActor)
            .options(num_cpus=self._num_cpus, scheduling_strategy="SPREAD")
            .remote()
        )
        try:
            key = secrets.token_hex(16)
            begun = actor.start.remote(self._words, key)
            while not ray.wait([begun], timeout=_LOOK_SECONDS)[0]:  # until a node has room
                if self._wanted is not None:
                    return -self._wanted
            self._on_start(ray.get(begun), key)
            while True:
                status, self.is_stopped = ray.get(actor.poll.remote(), timeout=_LOST_SECONDS)
                if status is not None:
                    return int(status)
                if self._changed.wait(_LOOK_SECONDS):
                    self._changed.clear()
                    wanted = self._wanted
                    call = actor.kill if wanted is signal.SIGKILL else actor.terminate
                    ray.get(call.remote(), timeout=_LOST_SECONDS)
        except RayError as error:
            self.failure = f"its node is lost ({type(error).__name__})"
            return -signal.SIGKILL
        finally:
            ray.kill(actor)


class RayStarter:
    """Starter of servers on nodes of a Ray cluster.

    Args:
        flags: words for `octavo serve`, including --num-threads.
    """

    def __init__(self, flags: list[str]) -> None:
        self._flags = [*flags, "--max-connections-per-client", "0", "--disable-fastapi-docs"]
        self._num_cpus = int(flags[flags.index("--num-threads") + 1])
        self._loop = asyncio.get_running_loop()

    def make_upstream(self, name: str) -> Upstream:
        """Implement `Starter`."""
        return Upstream(name, "")

    def start(self, upstream: Upstream) -> RayServer:
        """Implement `Starter`."""

        def begin(url: str, key: str) -> None:
            upstream.url, upstream.api_key = url, key
            upstream.suspected.set()

        return RayServer(
            self._flags,
            self._num_cpus,
            lambda url, key: self._loop.call_soon_threadsafe(begin, url, key),
        )
