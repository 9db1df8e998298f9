"""/health and /ready of a server whose engine process is frozen: SIGSTOP, then SIGCONT."""

import contextlib
import signal
import threading
import time

import httpx
import pytest

from tests.e2e.harness import Server, serve

TIMEOUT = 1.0
# Beside the timeout: a heartbeat's interval, and a busy machine.
MARGIN = 6.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--max-model-len", "512", "--kv-cache-memory-bytes", "24M"]
    folder = tmp_path_factory.mktemp("health")
    with serve(folder, *flags, "--progress-timeout", str(TIMEOUT)) as server:
        yield server


def expect(server: Server, status: int, within: float) -> None:
    """Both probes answer `status` in time."""
    deadline = time.monotonic() + within
    while True:
        found = [server.get(path).status_code for path in ("/health", "/ready")]
        if found == [status, status]:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def ask(server: Server, ending: threading.Event, **fields: object) -> None:
    """Sends one request after another."""
    body = {"model": "octavo/stories", "prompt": "The", "max_tokens": 50, "ignore_eos": True}
    while not ending.is_set():
        with contextlib.suppress(httpx.HTTPError):
            server.post("/v1/completions", {**body, **fields}, timeout=30)


@pytest.mark.parametrize("load", ["idle", "loaded", "expiring"])
def test_a_frozen_engine_is_unhealthy_until_it_goes_on(server, load):
    ending = threading.Event()
    fields = {"deadline_ms": 200} if load == "expiring" else {}
    clients = [
        threading.Thread(target=ask, args=(server, ending), kwargs=fields)
        for _ in range(0 if load == "idle" else 4)
    ]
    expect(server, 200, MARGIN)
    for client in clients:
        client.start()
    engine = server.engine_process()
    try:
        time.sleep(0.3)
        engine.send_signal(signal.SIGSTOP)
        assert server.get("/health").status_code == 200  # not before the timeout
        expect(server, 503, TIMEOUT + MARGIN)
        for _ in range(20):
            time.sleep(0.05)
            assert server.get("/health").status_code == 503
            answer = server.get("/ready")
            assert answer.status_code == 503
            assert "has not answered" in answer.json()["reason"]
        engine.send_signal(signal.SIGCONT)
        expect(server, 200, MARGIN)
    finally:
        engine.send_signal(signal.SIGCONT)
        ending.set()
        for client in clients:
            client.join()


def test_an_idle_engine_stays_healthy(server):
    ends = time.monotonic() + 3 * TIMEOUT
    while time.monotonic() < ends:
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 200
        time.sleep(0.05)
