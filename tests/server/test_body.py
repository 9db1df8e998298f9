"""How many values a body may hold."""

import msgspec
import pytest

from octavo.errors import RequestError
from octavo.server import body
from octavo.server.body import parse_json


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
