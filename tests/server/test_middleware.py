"""Middleware: the request's line in the log, its id, and its counters."""

import asyncio
import logging
import time

import pytest
from starlette.websockets import WebSocketDisconnect

from octavo.config import ServerConfig
from octavo.server.http_state import HttpState
from octavo.server.middleware import RequestMiddleware
from octavo.system.logs import REQUEST_ID
from tests.server.fake_engine import Call, with_server

LOG = "octavo.server.middleware"
FIELDS = ("status", "latency_ms", "client", "prompt_tokens", "completion_tokens")


def lines(caplog):
    """Return the fields of each request's line, by its text."""
    return {
        record.getMessage(): {name: getattr(record, name, "none") for name in FIELDS}
        for record in caplog.records
        if record.name == LOG
    }


def test_the_line_of_a_request_says_all_of_it(caplog):
    caplog.set_level(logging.DEBUG, LOG)

    async def scenario(served):
        served.engine.step_time = 0.01
        started = time.monotonic()
        call = Call(served, "/v1/completions", b'{"prompt":"hi","max_tokens":4}')
        await call.task
        elapsed = (time.monotonic() - started) * 1000
        line = lines(caplog)["POST /v1/completions"]
        assert 30 <= line.pop("latency_ms") <= elapsed + 1
        assert line == {
            "status": 200,
            "client": "10.0.0.1",
            "prompt_tokens": 3,
            "completion_tokens": 4,
        }

    with_server(scenario)


@pytest.mark.parametrize(
    ("client", "header", "address"),
    [
        (None, None, None),
        (None, b"6.6.6.6, 10.0.0.7", "10.0.0.7"),  # a client adds addresses before its own
        (("10.0.0.1", 5), b"10.0.0.7", "10.0.0.1"),
    ],
)
def test_a_proxy_at_a_unix_socket_names_its_client(client, header, address):
    found = []

    async def app(scope, receive, send):
        found.append(scope["octavo"].address)

    async def main():
        headers = [] if header is None else [(b"x-forwarded-for", header)]
        scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "client": client}
        await RequestMiddleware(app, HttpState(ServerConfig()))(scope, None, None)

    asyncio.run(main())
    assert found == [address]


def test_a_client_that_has_gone_before_its_session_is_no_error(caplog):
    async def app(scope, receive, send):
        raise WebSocketDisconnect

    async def main():
        state = HttpState(ServerConfig())
        scope = {"type": "websocket", "headers": [], "path": "/v1/realtime"}
        await RequestMiddleware(app, state)(scope, None, None)
        assert state.num_active == 0
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    asyncio.run(main())


def test_lines_of_what_generates_nothing(caplog):
    caplog.set_level(logging.DEBUG, LOG)

    async def scenario(served):
        for path in ("/health", "/v1/models", "/v1/x%0Ay"):
            await served.http.get(path)
        found = lines(caplog)
        levels = {r.getMessage(): r.levelno for r in caplog.records if r.name == LOG}
        assert levels == {
            "GET /health": logging.DEBUG,  # probes arrive every second
            "GET /v1/models": logging.INFO,
            "GET /v1/x%0Ay": logging.INFO,
        }
        assert [line["status"] for line in found.values()] == [200, 200, 404]
        for line in found.values():
            assert (line["prompt_tokens"], line["completion_tokens"]) == ("none", "none")

    with_server(scenario)


@pytest.mark.parametrize(
    ("settings", "models", "version"),
    [
        ({}, logging.INFO, logging.INFO),
        ({"disable_uvicorn_access_log": True}, logging.DEBUG, logging.DEBUG),
        ({"disable_access_log_for_endpoints": "/x, /v1/models/fake"}, logging.INFO, logging.DEBUG),
    ],
)
def test_lines_that_nobody_wants(caplog, settings, models, version):
    caplog.set_level(logging.DEBUG, LOG)

    async def scenario(served):
        await served.http.get("/v1/models")
        await served.http.get("/v1/models/fake")

    with_server(scenario, **settings)
    levels = {r.getMessage(): r.levelno for r in caplog.records if r.name == LOG}
    assert levels == {"GET /v1/models": models, "GET /v1/models/fake": version}


def test_a_client_without_an_address(caplog):
    caplog.set_level(logging.DEBUG, LOG)
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/version",
        "headers": [],
        "query_string": b"",
    }

    async def scenario(served):
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.disconnect"}

        await served.http._transport.app(dict(scope), receive, send)
        assert sent[0]["status"] == 200
        # Neither an address nor a raw path: a server on a Unix socket has none.
        assert lines(caplog)["GET /version"]["client"] is None

    with_server(scenario)


def test_what_is_logged_during_a_request_carries_its_id(caplog):
    seen = []

    async def scenario(served):
        async def broken(*what):
            seen.append(REQUEST_ID.get())
            raise RuntimeError("boom")

        served.engine.reset_prefix_cache = broken
        before = REQUEST_ID.get()
        headers = {"X-Request-Id": "mine"}
        await served.http.post("/reset_prefix_cache", json={}, headers=headers)
        assert seen == ["mine"]
        assert REQUEST_ID.get() == before

    with_server(scenario, enable_admin=True)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("!", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a~b", True),
        ("a b", False),
        ("", False),
    ],
)
def test_ids_that_are_fit_for_headers_are_kept(given, taken):
    async def scenario(served):
        response = await served.http.get("/version", headers={"X-Request-Id": given})
        found = response.headers["x-request-id"]
        assert (found == given) == taken
        assert taken or len(found) == 32

    with_server(scenario)


def test_probes_are_not_in_the_way_of_the_end():
    async def scenario(served):
        counts = []

        async def endpoint(scope, receive, send):
            counts.append(served.state.num_active)

        middleware = RequestMiddleware(endpoint, served.state)
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            scope = {"type": "http", "method": "GET", "path": path, "headers": []}
            await middleware(scope, None, None)
        assert counts == [0, 0, 0, 1]
        # Messages other than requests pass through: the server's start and end.
        await middleware({"type": "lifespan"}, None, None)
        assert counts[-1] == 0

    with_server(scenario)


def test_bodies_count_until_their_requests_end():
    async def scenario(served):
        served.engine.paused = True
        body = b'{"prompt":"hi"}'
        calls = [Call(served, "/v1/completions", body, chunks=3) for _ in range(2)]
        while served.engine.num_unfinished_requests < 2:
            await asyncio.sleep(0.001)
        assert served.state.body_bytes == 2 * len(body)
        assert served.state.num_active == 2
        calls[0].disconnect()
        await calls[0].task
        assert served.state.body_bytes == len(body)
        served.engine.paused = False
        await calls[1].task
        assert served.state.body_bytes == served.state.num_active == 0

    with_server(scenario)


def test_an_answer_that_has_begun_is_not_answered_again():
    async def scenario(served):
        async def endpoint(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise RuntimeError("boom")

        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
        with pytest.raises(RuntimeError, match="boom"):  # uvicorn then closes the connection
            await RequestMiddleware(endpoint, served.state)(scope, None, send)
        assert len(sent) == 1

    with_server(scenario)
