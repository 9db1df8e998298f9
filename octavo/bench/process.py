"""Servers as separate processes: started, awaited, and always stopped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import httpx

from octavo.errors import BenchError, reason_of

_POLL = 0.05
_CONNECT_TIMEOUT = 2.0
_LOG_LINES = 10


class Server:
    """Server that was started by `running_server`.

    Attributes:
        base_url: its address.
        seconds: time from its start to the first successful answer of /health.
    """

    def __init__(self, process: subprocess.Popen[bytes], base_url: str, log: Path) -> None:
        self.base_url = base_url
        self.seconds = 0.0
        self._process = process
        self._log = log

    def check(self, grace: float = 0.0) -> None:
        """Raise BenchError with the last lines of its log if the server ends within `grace` s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(grace)
            raise BenchError(self._complaint(f"ended with status {status}"))

    def wait(self, timeout: float) -> None:
        """Wait until /health answers with 200.

        Raises:
            BenchError: the server ends, or is not healthy within `timeout` seconds.
        """
        begin = time.monotonic()
        url = f"{self.base_url}/health"
        with httpx.Client(timeout=_CONNECT_TIMEOUT) as http:
            while True:
                self.check()
                with contextlib.suppress(httpx.HTTPError):
                    if http.get(url).status_code == 200:
                        break
                if time.monotonic() - begin > timeout:
                    raise BenchError(
                        self._complaint(
                            f"does not answer {url} within {timeout:g} s (--ready-timeout)"
                        )
                    )
                time.sleep(_POLL)
        self.seconds = time.monotonic() - begin

    def stop(self, grace: float) -> None:
        """Send SIGTERM, then after `grace` seconds SIGKILL, to the process and its descendants."""
        try:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace)
        finally:
            # Kill the rest of its group, and the process itself after a second Ctrl-C.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _complaint(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        said = "\n".join(lines) or "(nothing)"
        return f"The server {what}. Its log ({self._log}) ends:\n{said}"


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    base_url: str,
    log: Path,
    *,
    timeout: float,
    grace: float = 10.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server during the body.

    It has a separate process group, so that Ctrl-C does not reach it before its requests have
    ended, and so that all its processes can be stopped. SIGTERM and SIGHUP count as Ctrl-C
    meanwhile: otherwise they would leave it running.

    Args:
        command: program and arguments.
        base_url: its address.
        log: file for its output.
        timeout: maximum wait for its /health, in seconds.
        grace: time between SIGTERM and SIGKILL, in seconds.
        environment: its variables; None: this process'.

    Raises:
        BenchError: the server cannot be started, ends, does not become healthy, or another server
            answers at the address.
    """
    _check_free(base_url)
    with contextlib.ExitStack() as stack:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log.open("wb"))
            stack.enter_context(_ending_signals())
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise BenchError(f"The server cannot be started: {reason_of(error)}.") from error
        server = Server(process, base_url, log)
        stack.callback(server.stop, grace)
        server.wait(timeout)
        yield server


def free_port() -> int:
    """Return a port of this machine without a listener.

    It is below the range from which systems give ports to clients (32768 on Linux), so that no
    connection takes it before a server does.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _check_free(base_url: str) -> None:
    """Raise BenchError if another server listens there: the measurement would be of that server."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(OSError):
        socket.create_connection((parts.hostname or "", port), _CONNECT_TIMEOUT).close()
        raise BenchError(
            f"Another server answers at {base_url} already; stop it, or choose another --port."
        )


@contextlib.contextmanager
def _ending_signals() -> Iterator[None]:
    def as_ctrl_c(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    # Under nohup, SIGHUP stays ignored.
    taken = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, as_ctrl_c)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
