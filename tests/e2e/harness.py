"""Real server process for end-to-end tests."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil

from octavo import LLM
from octavo.system.tensor import from_numpy

T = TypeVar("T")


@dataclass
class Server:
    """Running `octavo serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, body: object, timeout: float = 240) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def metric(self, name: str) -> float:
        """Return the sum over the labels of a metric."""
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in self.get("/metrics").text.splitlines()
            if line.startswith((f"{name}{{", f"{name} "))
        ]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_for_metric(self, name: str, value: float) -> None:
        """Wait until a metric has a value; fail if it is higher.

        The server's reaction to a kill may follow the answers, which the killed process may have
        finished before. An engine's numbers may follow its last tokens.
        """
        wait_until(lambda: self.metric(name) >= value, self.log.read_text)
        assert self.metric(name) == value, self.log.read_text()

    def wait_for_line(self, text: str) -> None:
        """Wait until the log has a text: the server writes some lines after it has answered."""
        wait_until(lambda: text in self.log.read_text(), self.log.read_text)

    def resident_bytes(self) -> int:
        """Return the resident memory of the server and its children."""
        server = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [server, *server.children(recursive=True)])

    def engine_process(self) -> psutil.Process:
        """Return the engine process, which is older than a spare one."""
        return processes(self.process.pid, ENGINE)[0]

    def begin_together(self, begin: Callable[[], list[Future[T]]]) -> list[Future[T]]:
        """Begin requests, and return them while at least two of them run.

        They may end before this process looks at the engine; then they are begun again.
        """
        for _ in range(50):
            jobs = begin()
            while not all(job.done() for job in jobs):
                if self.metric("octavo:num_requests_running") >= 2:
                    return jobs
            for job in jobs:
                job.result()  # raises the error of one that failed
        raise AssertionError("no two requests ran at the same time")


ENGINE = "octavo.engine.core_process"
"""Module of engine processes."""


def processes(ancestor: int, module: str) -> list[psutil.Process]:
    """Return the descendants of a process that run a module, the oldest first."""
    found = []
    for child in psutil.Process(ancestor).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if module in child.cmdline():
                found.append(child)
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def wait_until(
    look: Callable[[], T | None], tell: Callable[[], object] = lambda: "", seconds: float = 120
) -> T:
    """Return the first true result of `look`; fail with the result of `tell` after some seconds.

    A look counts as a second at most: the time also goes on while a machine is paused.
    """
    spent = 0.0
    while spent < seconds:
        begin = time.monotonic()
        if found := look():
            return found
        time.sleep(0.05)
        spent += min(1.0, time.monotonic() - begin)
    raise TimeoutError(tell())


def free_port(count: int = 1) -> int:
    """Return the first of `count` free ports in a row.

    They are below the range from which systems give ports to clients (32768 on Linux), so that no
    connection of another test takes one before the caller does.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for offset in range(count):
                s = stack.enter_context(socket.socket())
                s.bind(("127.0.0.1", port + offset))
            return port


@contextlib.contextmanager
def serve(
    tmp_path: Path,
    *flags: str,
    wait: str = "/ready",
    model: str = "",
    spare: bool = False,
    what: str = "serve",
) -> Iterator[Server]:
    """Start a server (or another command) on a free port and wait until `wait` answers 200.

    A warm spare, which takes as long to start as an engine, is for tests in which engines die.
    """
    port, log = free_port(), tmp_path / "server.log"
    command = [sys.executable, "-m", "octavo", what, *([model] if model else [])]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += flags if spare or what != "serve" else ["--no-warm-spare", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "NO_COLOR": "1"}
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        if wait:
            wait_for(server, wait)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(server: Server, path: str) -> float:
    """Wait until a path answers 200; return the seconds."""

    def look() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return server.get(path).status_code == 200
        return False

    started = time.monotonic()
    wait_until(look, lambda: f"{path} did not answer 200: {server.log.read_text()}")
    return time.monotonic() - started


def embed(llm: LLM, token_ids: Sequence[int]) -> Any:
    """Return the embeddings of tokens as a tensor of torch."""
    from octavo.kernels.torch_tensors import as_torch  # servers' tests start without torch

    ids = from_numpy(np.array(token_ids))
    return llm.apply_model(lambda model: as_torch(model.embed_input_ids(ids)).clone())[0]
