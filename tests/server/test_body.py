"""Bounds on the content, the time and the size of a body."""

import asyncio

import msgspec
import pytest

from octavo.errors import RequestError
from octavo.server import body
from octavo.server.body import parse_json
from tests.server.fake_engine import Call, with_server


@pytest.mark.parametrize(
    "text", ["a, b: [c] {d}, ", '", ', '\\", ', '\\\\", ', "\\", '\\",[{:\\\\', "é,"]
)
def test_marks_in_strings_are_no_values(text):
    value = {"prompt": [text * 300_000, 'x"']}
    assert parse_json(msgspec.json.encode(value)) == value


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ([1] * (body.MAX_JSON_VALUES + 1), "values"),
        (['",'] * (body.MAX_JSON_VALUES + 1), "values"),
        ([[]] * (body.MAX_JSON_CONTAINERS + 1), "lists"),
        ({str(i): 1 for i in range(body.MAX_JSON_CONTAINERS + 1)}, "keys"),
    ],
)
def test_too_many_values(value, word):
    with pytest.raises(RequestError, match=word) as caught:
        parse_json(msgspec.json.encode({"x": value}))
    assert caught.value.code == "too_many_values"


@pytest.mark.parametrize("text", ["\\", '"', '",', '\\",', "a\\b"])
def test_strings_cut_at_any_place(text, monkeypatch):
    monkeypatch.setattr(body, "MAX_JSON_CONTAINERS", 10)
    monkeypatch.setattr(body, "MAX_JSON_VALUES", 5)
    for piece in range(1, 12):
        monkeypatch.setattr(body, "_PIECE", piece)
        for length in range(4, 14):
            value = {"prompt": text * length + "[{:,", "n": [1, 2, 3]}
            assert parse_json(msgspec.json.encode(value)) == value
            with pytest.raises(RequestError, match="more than 5 values"):
                parse_json(msgspec.json.encode({**value, "x": [1, 2]}))


def test_as_many_values_as_allowed():
    value = {"x": [1] * (body.MAX_JSON_VALUES - 1)}
    assert parse_json(msgspec.json.encode(value)) == value


def test_the_bounds_in_numbers():
    """The numbers are the documented ones; other tests check that they hold."""
    assert body.MAX_JSON_VALUES == 524_288
    assert body.MAX_JSON_CONTAINERS == 100_000
    assert body.MAX_JSON_DEPTH == 64
    assert body.BODY_TIMEOUT == 60.0
    assert body.MAX_UNKNOWN_FIELDS == 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "The body is empty; send a JSON object."),
        (b" \n", "The body is empty; send a JSON object."),
        (b"[]", "The body must be a JSON object, not a list."),
        (b"null", "The body must be a JSON object, not null."),
        (b"5", "The body must be a JSON object, not a number."),
        (b"1.5", "The body must be a JSON object, not a number."),
        (b'"x"', "The body must be a JSON object, not a string."),
        (b"true", "The body must be a JSON object, not a boolean."),
        (b"{", "The body is not valid JSON: Input data was truncated."),
        (b'{"a":NaN}', "The body is not valid JSON: invalid character (byte 5)."),
        (b"{} x", "The body is not valid JSON: trailing characters (byte 4)."),
        (b'{"a":"\xff"}', "The body is not valid UTF-8 (byte 6)."),
        (b"[" * 65 + b"]" * 65, "The JSON is nested more than 64 levels deep."),
        (b"[" * 64 + b"]" * 64, "The body must be a JSON object, not a list."),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "The JSON is nested more than 64 levels deep."),
        (b'{"a":[' * 33 + b"]}" * 33, "The JSON is nested more than 64 levels deep."),
        (b"[" * 90_000, "The JSON is nested more than 64 levels deep."),
    ],
)
def test_what_is_no_object_is_said_in_full(data, message):
    with pytest.raises(RequestError) as caught:
        parse_json(data)
    assert caught.value.message == message
    assert (caught.value.param, caught.value.code) == (None, "invalid_json")


def test_objects_lists_and_keys_count_together():
    most = {"x": [[]] * (body.MAX_JSON_CONTAINERS - 4), "y": 1}  # 3 keys and lists, 1 object
    assert parse_json(msgspec.json.encode(most)) == most
    most["x"].append([])
    with pytest.raises(RequestError, match="more than 100000 objects, lists and keys"):
        parse_json(msgspec.json.encode(most))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "Application/JSON ; charset=utf-8"}, 200),
        ({"content-type": "application/json-seq"}, 415),
        ({"content-type": ""}, 415),
        ({"content-encoding": "identity"}, 200),
        ({"content-encoding": " Identity "}, 200),
        ({"content-encoding": ""}, 200),
        ({"content-encoding": "gzip"}, 415),
        ({"content-length": "100"}, 200),
        ({"content-length": "101"}, 413),
        ({"content-length": "9" * 5000}, 413),
        ({"content-length": "-5"}, 200),
    ],
)
def test_headers_of_a_body(headers, status):
    async def scenario(served):
        call = Call(served, "/v1/completions", b'{"prompt":"hi","max_tokens":1}', headers)
        await call.task
        assert call.status == status

    with_server(scenario, max_request_bytes=100)


@pytest.mark.parametrize(("size", "status"), [(100, 200), (101, 413)])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_size_to_the_byte(size, status, chunks):
    data = b'{"prompt":"hi","max_tokens":1}'.ljust(size)

    async def scenario(served):
        call = Call(served, "/v1/completions", data, chunks=chunks)
        await call.task
        assert call.status == status

    with_server(scenario, max_request_bytes=100)


def test_a_body_that_does_not_come_in_time(monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT", 0.05)

    async def scenario(served):
        call = Call(served, "/v1/completions", b'{"prompt":"hi"}', chunks=3, cut_after=2)
        call._gone.clear()
        await asyncio.wait_for(call.task, 60)
        assert call.status == 408
        error = msgspec.json.decode(call.body)["error"]
        assert error["code"] == "deadline_exceeded"
        assert "did not arrive within" in error["message"]
        assert not served.engine.requests
        assert served.state.body_bytes == 0

    with_server(scenario)
