"""Values of arguments that are not written as JSON."""

import json

import pytest

from octavo.parsers.calls import to_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5", 1.5),
        ('{"a": [1, null]}', {"a": [1, None]}),
        ("True", True),
        ("None", None),
        ("{'a': (1, 2)}", {"a": [1, 2]}),
        ("plain words", "plain words"),
        ("NaN", "NaN"),
        ("9" * 5000, "9" * 5000),
        ("{1, 2}", "{1, 2}"),
        ("", ""),
    ],
    ids=lambda v: str(v)[:20],
)
def test_values(text, value):
    assert json.loads(to_json(text)) == value


@pytest.mark.parametrize("text", ["[" * 100_000, "-" * 100_000 + "1", "(" * 5000, "a." * 50_000])
def test_deep_values_are_texts(text):
    assert json.loads(to_json(text)) == text
