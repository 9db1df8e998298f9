"""Streams of sound through a router, and through a server of several models behind it."""

import contextlib
import os
import signal

import psutil
import pytest

from tests.e2e.harness import serve
from tests.server.test_realtime import (
    COMPLETED,
    MODEL,
    TEXT,
    encoded,
    exceptions,
    receive,
    send,
    sound,
    sync,
)

OTHER = "octavo/stories"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Return the router, and the server of two models."""
    folder = tmp_path_factory.mktemp("log")
    (folder / "router").mkdir()
    flags = ["--model", OTHER, "--model", MODEL, "--num-threads", "1"]
    with (
        serve(folder, *flags) as models,
        serve(folder / "router", "--servers", models.url, what="router") as router,
    ):
        yield router, models


def address(server):
    return server.url.replace("http", "ws") + "/v1/realtime"


def last_of(session):
    events = []
    with contextlib.suppress(exceptions.ConnectionClosed):
        while True:
            events.append(receive(session))
    return events[-1]["error"]["code"], session.close_code


def speak(session):
    """Send the digits; return their transcript."""
    for begin in range(0, len(samples := sound()), 5000):
        send(session, "input_audio_buffer.append", audio=encoded(samples[begin : begin + 5000]))
    while (event := receive(session))["type"] != COMPLETED:
        assert event["type"] != "error", event
    return event["transcript"]


@pytest.mark.parametrize("query", [f"?model={MODEL}", "?intent=transcription"])
def test_a_transcript(servers, query):
    for server in servers:
        with sync.connect(address(server) + query, open_timeout=120) as session:
            assert receive(session)["type"] == "session.created"
            assert speak(session) == TEXT


def test_a_model_that_dies_ends_its_sessions(servers):
    """The next session waits until the model's server has started again."""
    router, models = servers
    with sync.connect(address(router), open_timeout=120) as session:
        assert receive(session)["type"] == "session.created"
        send(session, "input_audio_buffer.clear")
        while receive(session)["type"] != "input_audio_buffer.cleared":
            pass
        children = psutil.Process(models.process.pid).children()
        (victim,) = [child for child in children if MODEL in child.cmdline()]
        os.kill(victim.pid, signal.SIGKILL)
        assert last_of(session) == ("unavailable", 1011)
    with sync.connect(address(router), open_timeout=240) as session:
        assert receive(session)["type"] == "session.created"
        assert speak(session) == TEXT


def test_servers_that_stop_end_their_sessions(servers):
    router, _ = servers
    with sync.connect(address(router), open_timeout=120) as session:
        receive(session)
        router.process.send_signal(signal.SIGTERM)
        assert last_of(session) == ("unavailable", 1001)
    assert router.process.wait(60) == 0
