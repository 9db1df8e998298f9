"""Connection of this process to a Ray cluster, either a running one or one started for it."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from octavo.errors import ConfigError
from octavo.executor.ray_cluster import ADDRESS, ERROR

logger = logging.getLogger(__name__)


class Session:
    """Connection of this process to Ray, shared by all users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ours = False
        self._cluster: subprocess.Popen[str] | None = None

    def join(self) -> None:
        """Connect if not connected.

        Do not call this in the main thread: Ray would replace its handler of SIGTERM.

        Raises:
            ConfigError: RAY_ADDRESS leads to no cluster, or no cluster can be started.
        """
        with self._lock:
            if not ray.is_initialized():
                self._connect()
            self._users += 1

    def leave(self) -> None:
        """Disconnect after the last user, if `join` connected."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._ours:
                self._ours = False
                ray.shutdown()
                self._end_cluster()

    def _connect(self) -> None:
        address = _find_cluster()
        try:
            if address is None:
                address = self._start_cluster()
                logger.info(
                    "started Ray on this machine, for this process only: no cluster runs here, "
                    "and RAY_ADDRESS names none"
                )
            else:
                logger.info("joining the Ray cluster at %s", address)
            with _sigterm_kept():
                ray.init(address=address, logging_level=logging.ERROR)
        except Exception as error:
            self._end_cluster()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"The Ray cluster at {address} cannot be joined ({type(error).__name__}: {error})."
            ) from error
        self._ours = True

    def _start_cluster(self) -> str:
        """Start a cluster on this machine; return its address."""
        if "RAY_AUTH_MODE" not in os.environ:
            # Otherwise Ray writes a token to the home folder, for all clusters.
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
            ray._raylet.Config.initialize("")  # this process has read the variables already
        # A separate folder, so that other processes do not treat it as a lasting cluster.
        folder = tempfile.mkdtemp(prefix="octavo-ray-", dir=_ray_folder())
        self._cluster = subprocess.Popen(
            [sys.executable, "-m", "octavo.executor.ray_cluster", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # a Ctrl-C in the terminal is for the parent
        )
        assert self._cluster.stdout is not None
        for line in self._cluster.stdout:
            if line.startswith(ADDRESS):
                return line.removeprefix(ADDRESS).strip()
            if line.startswith(ERROR):
                raise ConfigError(f"Ray cannot be started here ({line.removeprefix(ERROR)[:-1]}).")
        raise ConfigError(f"Ray cannot be started here (status {self._cluster.wait()}).")

    def _end_cluster(self) -> None:
        """End the cluster of `_start_cluster`."""
        if (cluster := self._cluster) is not None:
            self._cluster = None
            assert cluster.stdin is not None
            assert cluster.stdout is not None
            cluster.stdin.close()
            cluster.stdout.close()
            cluster.wait()


SESSION = Session()


def _find_cluster() -> str | None:
    """Return the address of the cluster that RAY_ADDRESS names or that runs on this machine.

    Raises:
        ConfigError: RAY_ADDRESS leads to no cluster.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named and named != "auto":
        if "://" in named or not _answers(named):
            raise ConfigError(
                f"RAY_ADDRESS={named!r} leads to no Ray cluster: it is the head's host:port, as "
                "`ray start --head` prints it. Start the cluster, or leave the variable out to "
                "have one started on this machine."
            )
        return named
    try:
        noted = Path(_ray_folder(), "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    return noted if _answers(noted) else None  # the note outlives the cluster


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the previous handling of SIGTERM afterwards.

    Ray treats SIGTERM as a crash: its handler aborts the process if it does not end within three
    seconds. Python's `signal` works in the main thread only, and does not see that handler.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.create_string_buffer(1024)  # more than any platform's struct sigaction
    assert libc.sigaction(signal.SIGTERM, None, before) == 0
    try:
        yield
    finally:
        assert libc.sigaction(signal.SIGTERM, before, None) == 0


def _ray_folder() -> str:
    return os.environ.get("RAY_TMPDIR", "/tmp")


def _answers(address: str) -> bool:
    """Return True if a server listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True
