"""An environment without torch, and servers in it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import free_port

ROOT = Path(__file__).parents[2]
LIGHT = ROOT / ".venv" / "light" / "bin" / "python"


@pytest.fixture(scope="session")
def light() -> str:
    """Return the interpreter of an environment with Octavo's own dependencies only."""
    if not LIGHT.exists():
        pytest.skip("there is no environment without torch: run `make light`")
    return str(LIGHT)


Serve = Callable[..., contextlib.AbstractContextManager[httpx.Client]]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Return a function that runs `octavo COMMAND ... --port` and yields a client of it."""

    @contextlib.contextmanager
    def run(python: str, *words: str, **environment: str) -> Iterator[httpx.Client]:
        port = free_port()
        log = tmp_path_factory.mktemp("server") / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [python, "-m", "octavo", *words, "--host", "127.0.0.1", "--port", str(port)],
                env={**os.environ, **environment},
                stdout=file,
                stderr=file,
            )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                client.headers["x-server-pid"] = str(process.pid)
                for _ in range(4000):
                    assert process.poll() is None, log.read_text()
                    with contextlib.suppress(httpx.HTTPError):
                        if client.get("/ready").status_code == 200:
                            break
                    time.sleep(0.05)
                yield client
        finally:
            process.terminate()
            process.wait(100)

    return run
