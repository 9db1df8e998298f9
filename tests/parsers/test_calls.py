"""Values of arguments that are not written as JSON."""

import json

import pytest

from octavo.parsers.answer import AnswerParser
from octavo.parsers.calls import to_json
from octavo.parsers.formats import FORMATS
from octavo.parsers.parts import CallArguments


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


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "12"),
        ({"type": ["string", "null"]}, "12"),
        ({"type": "integer"}, 12),
        ({"type": ["string", "integer"]}, 12),
        ({}, 12),
    ],
    ids=str,
)
def test_the_schema_decides_about_texts(schema, value):
    schemas = {"f": {"properties": {"x": schema}}}
    parser = AnswerParser(FORMATS["qwen3_coder"], schemas)
    parts = parser.feed(
        "<tool_call><function=f><parameter=x>\n12\n</parameter></function></tool_call>"
    )
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert json.loads(arguments) == {"x": value}
