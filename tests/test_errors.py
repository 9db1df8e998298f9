"""Tree of errors, on which the HTTP layer and callers rely."""

import socket

import pytest

from octavo import errors
from octavo.errors import reason_of


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (errors.RequestError("m", "n", "c"), 400, "c", "n"),
        (errors.RequestError("m"), 400, None, None),
        (errors.ContextLengthError("m", "prompt"), 400, "context_length_exceeded", "prompt"),
        (errors.UnsupportedError("m", "tools"), 400, "unsupported_parameter", "tools"),
        (errors.NotFoundError("m", "model"), 404, "model_not_found", "model"),
        (errors.NotFoundError("m", code="other"), 404, "other", None),
        (errors.AdapterError("m"), 400, "invalid_adapter", None),
        (errors.QueueFullError("m", retry_after=7), 429, "queue_full", None),
        (errors.DeadlineError("m"), 408, "deadline_exceeded", "deadline_ms"),
        (errors.FirstTokenError("m"), 408, "deadline_exceeded", "max_ttft_ms"),
        (errors.UnmetDeadlineError("m", retry_after=7), 429, "deadline_unmet", "deadline_ms"),
    ],
)
def test_request_errors(error, status, code, param):
    assert isinstance(error, errors.RequestError)
    assert isinstance(error, ValueError)
    assert str(error) == error.message == "m"
    assert (error.status, error.code, error.param) == (status, code, param)
    assert error.type.endswith("_error")


def test_queue_full_says_when_to_come_back():
    assert errors.QueueFullError("m", retry_after=7).retry_after == 7
    assert errors.QueueFullError("m").retry_after >= 1


def test_every_error_is_octavos():
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert len(classes) >= 10
    assert all(issubclass(c, errors.OctavoError) for c in classes)


def test_kinds_that_must_not_be_mixed_up():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.HubError, errors.ModelError)
    assert not issubclass(errors.EngineDeadError, ValueError)
    assert not issubclass(errors.ModelError, errors.RequestError)


def test_the_docstring_draws_the_whole_tree():
    for name, value in vars(errors).items():
        if isinstance(value, type):
            assert name in errors.__doc__


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (FileNotFoundError(2, "No such file", "x"), "No such file: 'x'"),
        (socket.gaierror(-2, "Name not known"), "Name not known"),
        (ValueError("[Errno] is text"), "[Errno] is text"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_reasons_have_no_numbers(error, reason):
    assert reason_of(error) == reason
