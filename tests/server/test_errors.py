"""Answer to each kind of error: status, headers and body."""

import json
import logging

import pytest

from octavo import errors
from octavo.server import errors as server_errors
from octavo.server.errors import error_response, log_unexpected, show
from tests.server.fake_engine import with_server

BAD = "invalid_request_error"
CASES = [
    (errors.RequestError("m"), 400, (BAD, None, None), {}),
    (errors.RequestError("m", "n", "c"), 400, (BAD, "n", "c"), {}),
    (errors.UnsupportedError("m", "n"), 400, (BAD, "n", "unsupported_parameter"), {}),
    (errors.NotFoundError("m", "model"), 404, (BAD, "model", "model_not_found"), {}),
    (
        errors.QueueFullError("m", 7),
        429,
        ("rate_limit_error", None, "queue_full"),
        {"retry-after": "7"},
    ),
    (
        errors.DeadlineError("m"),
        408,
        ("timeout_error", "deadline_ms", "deadline_exceeded"),
        {"x-should-retry": "false"},
    ),
    (
        errors.FirstTokenError("m"),
        408,
        ("timeout_error", "max_ttft_ms", "deadline_exceeded"),
        {"x-should-retry": "false"},
    ),
    (
        errors.UnmetDeadlineError("m", "max_ttft_ms", 7),
        429,
        ("rate_limit_error", "max_ttft_ms", "deadline_unmet"),
        {"retry-after": "7"},
    ),
    (
        errors.GivenUpError("m"),
        500,
        ("server_error", None, "given_up"),
        {"x-should-retry": "false"},
    ),
    (errors.EngineDeadError("m"), 503, ("server_error", None, "engine_unavailable"), {}),
    (errors.ModelError("m"), 500, ("server_error", None, "internal_error"), {}),
    (
        server_errors.AuthenticationError("m"),
        401,
        (BAD, None, "invalid_api_key"),
        {"www-authenticate": "Bearer"},
    ),
    (server_errors.HostError("m"), 421, (BAD, None, "host_not_allowed"), {}),
    (server_errors.MediaTypeError("m"), 415, (BAD, None, "unsupported_media_type"), {}),
    (server_errors.ProtocolError(431, "m"), 431, (BAD, None, "bad_http_request"), {}),
    (server_errors.ProtocolError(408, "m"), 408, (BAD, None, "bad_http_request"), None),
    (server_errors.RouteError(404, "m"), 404, (BAD, None, "not_found"), {}),
    (
        server_errors.RouteError(405, "m", "GET"),
        405,
        (BAD, None, "method_not_allowed"),
        {"allow": "GET"},
    ),
    (
        server_errors.UnavailableError("m"),
        503,
        ("server_error", None, "unavailable"),
        {"retry-after": "5", "connection": "close"},
    ),
]


@pytest.mark.parametrize(("error", "status", "kind", "headers"), CASES)
def test_the_whole_answer(error, status, kind, headers):
    answer = error_response(error)
    assert answer.status_code == status
    type_, param, code = kind
    assert json.loads(answer.body) == {
        "error": {"message": "m", "type": type_, "param": param, "code": code}
    }
    found = dict(answer.headers)
    assert found.pop("content-type") == "application/json"
    assert found.pop("content-length") == str(len(answer.body))
    assert found == ({"x-should-retry": "false"} if headers is None else headers)


def test_a_body_that_is_too_large_ends_the_connection():
    answer = error_response(server_errors.BodyTooLargeError(1024))
    error = json.loads(answer.body)["error"]
    assert (answer.status_code, error["code"]) == (413, "request_too_large")
    assert "1024 bytes" in error["message"]
    assert answer.headers["connection"] == "close"


def test_what_nobody_foresaw_tells_nothing_of_the_inside():
    answer = error_response(RuntimeError("secret path"))
    assert answer.status_code == 500
    assert json.loads(answer.body)["error"] == {
        "message": "Internal server error; the server's log says more.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("x" * 1000, "x" * 1000),
        ("x" * 1001, "x" * 1000 + "..."),
        ("a\ud800b", "a?b"),
    ],
)
def test_messages_are_bounded_and_can_be_sent(message, shown):
    answer = error_response(errors.RequestError(message))
    assert json.loads(answer.body)["error"]["message"] == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x" * 58, repr("x" * 58)),
        ("x" * 59, "'" + "x" * 27 + "..." + "x" * 28 + "'"),
        ([1, 2, 3], "[1, 2, 3]"),
        ([1, 2, 3, 4], "[1, 2, 3, ...]"),
        ({"a": 1, "b": 2, "c": 3}, "{'a': 1, 'b': 2, 'c': 3}"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "{'a': 1, 'b': 2, 'c': 3, ...}"),
        ([[1]], "[[1]]"),
        ([[[1]]], "[[[...]]]"),
        (1.5, "1.5"),
        (None, "None"),
    ],
)
def test_values_are_shown_in_short(value, shown):
    assert show(value) == shown


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        (
            "GET",
            "/nowhere",
            404,
            ("GET /nowhere: no such route; GET / lists them.", None, "not_found"),
        ),
        (
            "GET",
            "/health/",
            404,
            ("GET /health/: no such route; GET / lists them.", None, "not_found"),
        ),
        (
            "POST",
            "/v1/systemone",
            404,
            (
                "POST /v1/systemone: not available; use structured_outputs or response_format with "
                "POST /v1/chat/completions.",
                None,
                "not_found",
            ),
        ),
        (
            "GET",
            "/v1/completions",
            405,
            (
                "GET /v1/completions: method not allowed; use POST.",
                None,
                "method_not_allowed",
            ),
        ),
        (
            "POST",
            "/health",
            405,
            ("POST /health: method not allowed; use GET.", None, "method_not_allowed"),
        ),
        (
            "GET",
            "/v1/models/nope",
            404,
            (
                "The model 'nope' does not exist here; this server has fake.",
                "model",
                "model_not_found",
            ),
        ),
    ],
)
def test_addresses_that_are_none(method, path, status, error):
    async def scenario(served):
        response = await served.http.request(method, path)
        assert response.status_code == status
        message, param, code = error
        assert response.json() == {
            "error": {"message": message, "type": BAD, "param": param, "code": code}
        }
        allowed = "GET" if path == "/health" else "POST"
        assert response.headers.get("allow") == (allowed if status == 405 else None)

    with_server(scenario)


@pytest.mark.parametrize(
    ("error", "level", "with_traceback"),
    [
        (errors.RequestError("m"), None, False),
        (errors.EngineDeadError("m"), logging.ERROR, False),
        (RuntimeError("m"), logging.ERROR, True),
    ],
)
def test_the_log_says_what_no_client_caused(error, level, with_traceback, caplog):
    try:
        raise error
    except Exception as caught:
        log_unexpected(caught)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    for record in caplog.records:
        assert bool(record.exc_info) == with_traceback
        assert with_traceback or "m" in record.getMessage().split()
