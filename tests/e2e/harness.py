"""Real server process for end-to-end tests."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from octavo import LLM
from octavo.system.tensor import from_numpy


@dataclass
class Server:
    """Running `octavo serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: object, timeout: float = 120) -> httpx.Response:
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

    def wait_for_metric(self, name: str, value: float, timeout: float = 60) -> None:
        """Wait until a metric has a value; fail if it exceeds it, or in `timeout` seconds.

        The server's reaction to a kill may follow the answers, which the killed process may have
        finished before.
        """
        end = time.monotonic() + timeout
        while (now := self.metric(name)) < value and time.monotonic() < end:
            time.sleep(0.05)
        assert now == value, self.log.read_text()

    def resident_bytes(self) -> int:
        """Return the resident memory of the server and its children."""
        server = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [server, *server.children(recursive=True)])

    def engine_process(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        engines = [c for c in children if "octavo.engine.core_process" in c.cmdline()]
        return min(engines, key=psutil.Process.create_time)  # a spare one is younger


def free_port(count: int = 1) -> int:
    """Return the first of `count` free ports in a row.

    They are below the range from which systems give ports to clients (32768 on Linux), so that no
    connection of another test takes one before the caller does.
    """
    while True:
        port = random.randrange(10_000, 32_000)
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


def wait_for(server: Server, path: str, timeout: float = 60) -> float:
    """Wait until a path answers 200; return the seconds."""
    started = time.monotonic()
    while time.monotonic() - started < timeout:
        assert server.process.poll() is None, server.log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            if server.get(path).status_code == 200:
                return time.monotonic() - started
        time.sleep(0.05)
    raise TimeoutError(f"{path} did not answer 200: {server.log.read_text()}")


def embed(llm: LLM, token_ids: Sequence[int]) -> Any:
    """Return the embeddings of tokens as a tensor of torch."""
    from octavo.kernels.torch_tensors import as_torch  # servers' tests start without torch

    ids = from_numpy(np.array(token_ids))
    return llm.apply_model(lambda model: as_torch(model.embed_input_ids(ids)).clone())[0]
