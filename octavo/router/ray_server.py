"""A server that a router has started on a node of a Ray cluster, in an actor's care.

The router's side is a thread, since Ray's calls wait.
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
# An actor that says nothing for so long is lost, with its server.
_LOST_SECONDS = 30.0


class ServerActor:
    """On a node: starts a server, and ends it."""

    def start(self, words: list[str], key: str) -> str:
        """Starts it; returns its address."""
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
        """Its status, if it has ended; and whether a signal holds it."""
        status = self._process.poll()
        return status, status is None and is_stopped(self._process.pid)

    def terminate(self) -> None:
        """Has it end in order."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it."""
        self._process.kill()


class RayServer:
    """What `subprocess.Popen` is for a server on this machine.

    Args:
        words: for `octavo serve`.
        num_cpus: cores of a node that Ray counts for it.
        on_start: called, on a thread, with its address and the key that it asks for.
    """

    def __init__(
        self, words: list[str], num_cpus: int, on_start: Callable[[str, str], object]
    ) -> None:
        self.returncode: int | None = None
        self.is_stopped = False
        self.failure: str | None = None
        """Why there is none."""
        self._words, self._num_cpus, self._on_start = words, num_cpus, on_start
        self._wanted: signal.Signals | None = None
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-ray-server", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Its status, if it has ended; -9 if it was lost with its node."""
        return self.returncode

    def terminate(self) -> None:
        """Has it end in order."""
        self._want(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self._want(signal.SIGKILL)

    def _want(self, number: signal.Signals) -> None:
        self._wanted = number
        self._changed.set()

    def wait(self) -> int:
        """Waits until it has ended; returns its status."""
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
        """Has a server run on some node; returns its status."""
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
    """Starts servers on nodes of a Ray cluster.

    Args:
        flags: words for `octavo serve`; --num-threads is among them.
    """

    def __init__(self, flags: list[str]) -> None:
        self._flags = [*flags, "--max-connections-per-client", "0", "--disable-fastapi-docs"]
        self._num_cpus = int(flags[flags.index("--num-threads") + 1])
        self._loop = asyncio.get_running_loop()

    def make_upstream(self, name: str) -> Upstream:
        """See `Starter`."""
        return Upstream(name, "")

    def start(self, upstream: Upstream) -> RayServer:
        """See `Starter`."""

        def begin(url: str, key: str) -> None:
            upstream.url, upstream.api_key = url, key
            upstream.suspected.set()

        return RayServer(
            self._flags,
            self._num_cpus,
            lambda url, key: self._loop.call_soon_threadsafe(begin, url, key),
        )
