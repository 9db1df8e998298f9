import io
import json
import logging

import pytest

from octavo.system.logs import (
    REQUEST_ID,
    JsonFormatter,
    TextFormatter,
    current_logging,
    setup_default_logging,
    setup_logging,
)
from tests.server.fake_engine import Call, with_server


def record(message="hello %s", *args, **extra):
    made = logging.getLogger("octavo.x").makeRecord(
        "octavo.x", logging.INFO, "file.py", 1, message, args or ("you",), None, extra=extra
    )
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def test_text_lines():
    line = TextFormatter().format(record(status=200, path="/x"))
    assert line.endswith(".250 INFO hello you status=200 path=/x")


def test_json_lines():
    token = REQUEST_ID.set("r-1")
    try:
        line = JsonFormatter().format(record(status=200, odd=object))
    finally:
        REQUEST_ID.reset(token)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["time"] == 1_700_000_000.25
    assert entry["level"] == "info"
    assert entry["logger"] == "octavo.x"
    assert entry["message"] == "hello you"
    assert entry["status"] == 200
    assert entry["request_id"] == "r-1"


def test_tracebacks():
    made = record()
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    assert "RuntimeError: boom" in TextFormatter().format(made)
    assert "RuntimeError: boom" in json.loads(JsonFormatter().format(made))["exception"]


@pytest.fixture
def lines(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    before = {n: (logging.getLogger(n).handlers, logging.getLogger(n).level) for n in _LOGGERS}
    setup_logging("debug", "json")
    yield lambda: [json.loads(line) for line in stderr.getvalue().splitlines()]
    for name, (handlers, level) in before.items():
        log = logging.getLogger(name)
        log.handlers, log.propagate = handlers, True
        log.setLevel(level)


_LOGGERS = ("octavo", "uvicorn")


def test_the_access_line(lines):
    async def scenario(served):
        await served.complete(max_tokens=3, request_id="mine")
        await served.chat(max_tokens=2, stream=True)
        await served.complete(temperature=-1)
        await served.http.get("/health")
        await served.http.get("/v1/x%0Ay")

    with_server(scenario)
    found = {e["message"]: e for e in lines() if "latency_ms" in e}
    line = found["POST /v1/completions"]
    assert line["status"] == 400
    assert "prompt_tokens" not in line
    line = found["POST /v1/chat/completions"]
    assert (line["status"], line["completion_tokens"], line["prompt_tokens"]) == (200, 2, 21)
    assert line["level"] == "info"
    assert len(line["request_id"]) == 32
    assert found["GET /health"]["level"] == "debug"
    assert found["GET /v1/x%0Ay"]["status"] == 404


def test_a_client_that_went_away_is_499(lines):
    async def scenario(served):
        served.engine.paused = True
        call = Call(served, "/v1/completions", b'{"prompt": "hi"}')
        call.disconnect()
        await call.task

    with_server(scenario)
    (line,) = [e for e in lines() if "latency_ms" in e]
    assert line["status"] == 499


def test_requests_are_logged_where_asked_for(lines):
    async def scenario(served):
        await served.complete(prompt="my secret", temperature=0.5, max_tokens=3)

    with_server(scenario, enable_log_requests=True)
    (line,) = [e for e in lines() if e["message"] == "request"]
    assert json.loads(line["params"])["temperature"] == 0.5
    assert line["prompts"] == 1
    assert "my secret" not in json.dumps(line)
    with_server(scenario)
    assert len([e for e in lines() if e["message"] == "request"]) == 1


def test_default_logging_leaves_a_program_s_own_alone(monkeypatch):
    log, root = logging.getLogger("octavo"), logging.getLogger()
    before = log.handlers, log.propagate, log.level
    try:
        log.handlers = []
        monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
        setup_default_logging("info")
        assert log.handlers == []
        monkeypatch.setattr(root, "handlers", [])
        setup_default_logging("info")
        assert len(log.handlers) == 1
        setup_default_logging("info")
        assert len(log.handlers) == 1
    finally:
        log.handlers, log.propagate, level = before
        log.setLevel(level)


def test_what_every_line_says_is_known_to_who_starts_a_process(lines, capsys):
    setup_logging("info", "json", engine=3)
    logging.getLogger("octavo.x").warning("one")
    assert json.loads(capsys.readouterr().err)["engine"] == 3
    assert current_logging() == ("info", "json", {"engine": 3})
    setup_logging("info", "json")
    assert current_logging() == ("info", "json", {})
