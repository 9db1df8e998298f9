"""/health and /ready of a server whose engine process is frozen by SIGSTOP."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from tests.e2e.harness import Server, serve

TIMEOUT = 2.0  # a busy machine does not keep an engine from answering for so long
# In addition to the timeout: a heartbeat's interval, a start, and a busy machine.
MARGIN = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--max-model-len", "512", "--kv-cache-memory-bytes", "24M"]
    folder = tmp_path_factory.mktemp("health")
    with serve(folder, *flags, "--progress-timeout", str(TIMEOUT), spare=True) as server:
        yield server


def expect(server: Server, condition: Callable[[], bool]) -> set[str]:
    """Wait for a condition, with /health fine all along; return the reasons of /ready meanwhile."""
    deadline, reasons = time.monotonic() + TIMEOUT + MARGIN, set()
    while True:
        assert server.get("/health").status_code == 200
        found = server.get("/ready")
        if found.status_code != 200:
            reasons.add(found.json()["reason"])
        elif condition():
            return reasons
        assert time.monotonic() < deadline, found.text
        time.sleep(0.005)


def ask(server: Server, ending: threading.Event, **fields: object) -> None:
    """Send one request after another."""
    body = {"model": "octavo/stories", "prompt": "The", "max_tokens": 50, "ignore_eos": True}
    while not ending.is_set():
        with contextlib.suppress(httpx.HTTPError):
            server.post("/v1/completions", {**body, **fields}, timeout=30)


@pytest.mark.parametrize("load", ["loaded", "expiring"])
def test_a_frozen_engine_is_replaced(server, load):
    ending = threading.Event()
    fields = {"deadline_ms": 200} if load == "expiring" else {}
    clients = [
        threading.Thread(target=ask, args=(server, ending), kwargs=fields)
        for _ in range(0 if load == "idle" else 4)
    ]
    expect(server, lambda: True)
    for client in clients:
        client.start()
    try:
        time.sleep(0.3)
        frozen, begin = server.engine_process(), time.monotonic()
        frozen.send_signal(signal.SIGSTOP)
        found = server.get("/ready")
        if time.monotonic() - begin < TIMEOUT / 5:  # well before the timeout
            assert found.status_code == 200
        # A replacement that a spare process becomes may be ready between two looks.
        reasons = expect(server, lambda: not frozen.is_running())
        assert reasons <= {"starting the engine again"}
        assert server.engine_process().pid != frozen.pid
        assert server.get("/health").status_code == 200
        body = {"model": "octavo/stories", "prompt": "The", "max_tokens": 5}
        assert server.post("/v1/completions", body).status_code == 200
    finally:
        ending.set()
        for client in clients:
            client.join()
    restarts.append(load)
    assert server.metric("octavo:engine_restarts_total") == len(restarts)
    assert "the engine process was stopped by a signal for 1.0 s" in server.log.read_text()


restarts: list[str] = []


def test_an_idle_engine_stays_healthy(server):
    ends = time.monotonic() + 1.5 * TIMEOUT
    while time.monotonic() < ends:
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 200
        time.sleep(0.05)
