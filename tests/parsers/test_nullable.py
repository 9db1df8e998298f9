"""Arguments that are a text or null, in formats without JSON for each argument."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.parsers.answer import AnswerParser
from octavo.parsers.calls import PatternCalls, text_schema
from octavo.parsers.detect import without_notes
from octavo.parsers.formats import FORMATS
from tests.parsers.test_structural_tag import compile_tag, vocabulary
from tests.parsers.writers import write

NULLABLE = [
    {"type": ["string", "null"]},
    {"type": ["null", "string"], "description": "x"},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 9}]},
]
NAMES = [
    name
    for name, fmt in sorted(FORMATS.items())
    if isinstance(fmt.calls, PatternCalls) and fmt.calls.argument is not None
]
TEXTS = st.sampled_from(["null", "nul", "nullx", "n", "", " null", "null\n", "Null", "5", "a\nb"])


def arguments(fmt, answer, schema, size):
    """Return the arguments of the call in an answer that arrives in pieces of a size."""
    parser = AnswerParser(fmt, {"f": {"type": "object", "properties": {"x": schema, "y": {}}}})
    pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    return json.loads(
        "".join(part.text for part in parts if type(part).__name__ == "CallArguments")
    )


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([n for n in NAMES if not n.startswith("deepseek")]),
    st.sampled_from(NULLABLE),
    TEXTS,
    st.integers(1, 40),
)
def test_null_and_texts(name, schema, text, size):
    fmt = FORMATS[name]
    answer = write(fmt, None, "", [("f", {"x": text, "y": 1})])
    found = arguments(fmt, answer, schema, size)
    assert found["y"] == 1
    if text.strip() == "null":
        assert found["x"] is None
    else:
        assert found["x"] == text
    # A text that cannot be null stays a text.
    assert arguments(fmt, answer, {"type": "string"}, size)["x"] == text


def test_a_format_that_names_the_kind():
    """DSML says that a value is a text, so "null" is one."""
    answer = write(FORMATS["deepseek_v32"], None, "", [("f", {"x": "null", "y": None})])
    assert arguments(FORMATS["deepseek_v32"], answer, NULLABLE[0], 7) == {"x": "null", "y": None}


def test_long_white_space_is_a_text():
    fmt, text = FORMATS["qwen3_coder"], " " * 5000
    answer = write(fmt, None, "", [("f", {"x": text, "y": 1})])
    assert arguments(fmt, answer, NULLABLE[0], 1)["x"] == text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": ["string", "integer"]},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        {"anyOf": [{"type": "string"}, {"type": "string"}]},
        {"type": "object", "anyOf": [{"type": "string"}, {"type": "null"}]},
        True,
    ],
    ids=str,
)
def test_other_schemas(schema):
    assert text_schema(schema) is None


@pytest.mark.parametrize("schema", NULLABLE, ids=str)
def test_grammars(schema):
    fmt, values = FORMATS["qwen3_coder"], ["a", None]
    if "anyOf" in schema:
        schema = {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}
    elif "type" in schema:
        schema = schema | {"enum": values}
    else:
        schema = {"oneOf": [{"type": "null"}, {"type": "string", "enum": ["a"]}]}
    given = {"f": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    words = vocabulary()
    compiled = compile_tag(fmt.structural_tag(given, required=True, parallel=False), words)
    for value, good in (("a", True), ("null", True), ("b", False)):
        answer = (
            f"<tool_call><function=f><parameter=x>\n{value}\n</parameter></function></tool_call>"
        )
        data = [*answer.encode(), 256]
        assert (compiled.start().accept_tokens(data) == len(data)) is good


def test_notes_are_left_out():
    """Also those deep inside; a property may have such a name."""
    rng = random.Random(1)
    text = "".join(rng.choices("abc ", k=50))
    schema = {
        "title": text,
        "properties": {
            "description": {"type": "string", "description": text, "examples": [text]},
            "title": {"anyOf": [{"items": {"title": text, "const": {"title": 1}}}]},
        },
        "$defs": {"A": {"$comment": text, "enum": ["description"]}},
        "required": ["title"],
    }
    before = json.dumps(schema)
    assert without_notes(schema) == {
        "properties": {
            "description": {"type": "string"},
            "title": {"anyOf": [{"items": {"const": {"title": 1}}}]},
        },
        "$defs": {"A": {"enum": ["description"]}},
        "required": ["title"],
    }
    assert json.dumps(schema) == before
    assert without_notes(None) is None
