"""Grammars of calls: what a model writes under them is parsed, and follows the schema."""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from octavo.errors import UnsupportedError
from octavo.messages import GrammarSpec
from octavo.parsers.formats import FORMATS
from octavo.structured_output.llguidance_backend import LLGuidanceBackend
from octavo.structured_output.vocabulary import Vocabulary
from tests.parsers.test_laws import parse

SCHEMAS = {
    "find": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Rome", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
    },
    "now": None,
}
NAMES = sorted(FORMATS)


def vocabulary(special=()):
    """Return one token for each byte, a stop token, and special tokens."""
    tokens = [bytes([i]) for i in range(256)] + [b""] * (1 + len(special))
    ids = {text: 257 + i for i, text in enumerate(special)}
    return Vocabulary(tokens, [256], lambda text: list(text.encode()), ids)


def sample(grammar, words, rng, most=1500):
    """Return a text that the grammar allows: random tokens, but mostly the end if it is allowed."""
    names = {i: text for text, i in words.special_tokens.items()}
    text = b""
    row = np.zeros((words.size + 31) // 32, np.int32)
    for _ in range(most):
        grammar.fill_bitmask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: words.size]
        allowed = np.flatnonzero(bits)
        allowed = [i for i in allowed if i >= 256 or 0x20 <= i < 0x7F or i == 10] or [*allowed]
        if 256 in allowed:
            return text.decode()
        token = int(rng.choice([i for i in allowed if i > 256] or allowed))
        assert grammar.accept_tokens([token]) == 1
        text += names[token].encode() if token > 256 else bytes([token])
    raise AssertionError(f"the text does not end: {text[:200]}")


def compile_tag(tag, words):
    spec = GrammarSpec("structural_tag", json.dumps(tag))
    return LLGuidanceBackend(words).compile(spec)


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", NAMES)
def test_required_calls(name, special):
    fmt = replace(FORMATS[name], thoughts=None)
    rng = random.Random(name)
    marks = [text for text in fmt.calls.begins if len(text) > 1 and " " not in text]
    words = vocabulary([marks[0]] if special and marks else [])
    tag = fmt.structural_tag(SCHEMAS, required=True, parallel=False)
    compiled = compile_tag(tag, words)
    for _ in range(3):
        text = sample(compiled.start(), words, rng)
        blocks = parse(fmt, [text], SCHEMAS)
        assert len(blocks) == 1, text
        kind, function, arguments = blocks[0]
        assert kind == "call"
        found = json.loads(arguments)
        if function == "find":
            assert found["city"] in ("Rome", "Oslo"), text
            assert found["days"] in range(1, 10)
        else:
            assert (function, found) == ("now", {})


def test_reasoning_comes_first():
    fmt, words = FORMATS["hermes"], vocabulary()
    tag = fmt.structural_tag(SCHEMAS, required=True, thinks=True)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for answer, good in [
        (f"I think.</think>\n\n{call}", True),
        (f"I think.</think>{call}\n{call}", True),
        ("I think.</think>\n\nHello", False),
        (call, False),  # a thought that does not end
    ]:
        grammar = compile_tag(tag, words).start()
        data = [*answer.encode(), 256]
        assert (grammar.accept_tokens(data) == len(data)) is good, answer


def test_calls_of_an_answer_that_may_have_none():
    fmt, words = FORMATS["hermes"], vocabulary()
    tag = fmt.structural_tag(SCHEMAS)
    call = '<tool_call>\n{"name": "find", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
    for answer, good in [
        ("Hello", True),
        (f"Sure: {call}\n{call}", True),
        (call.replace("Rome", "Paris"), False),
        (call.replace("find", "lose"), False),
    ]:
        grammar = compile_tag(tag, words).start()
        data = [*answer.encode(), 256]
        assert (grammar.accept_tokens(data) == len(data)) is good, answer


def test_a_marker_that_is_a_special_token():
    """Any text may come before it; the same text, spelled in other tokens, begins no call."""
    words = vocabulary(["<tool_call>", "</tool_call>"])
    begin, end = words.special_tokens.values()
    call = [*b'\n{"name": "now", "arguments": {}}\n', end]
    compiled = compile_tag(FORMATS["hermes"].structural_tag(SCHEMAS), words)
    for data, good in [
        ([*b"Sure: ", begin, *call, *b" and ", begin, *call, 256], True),
        ([begin, *call, 256], True),
        ([*b"Sure: ", begin, *b"\n{}", 256], False),
        ([*b"<tool_call> is a marker", 256], True),
    ]:
        assert (compiled.start().accept_tokens(data) == len(data)) is good


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("name", "properties", "words"),
    [
        ("gemma4", {"a": {}}, "'a' has a schema that no grammar describes"),
        ("gemma4", {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, "'a' has a schema"),
        ("gemma4", {"a b": {"type": "string"}}, "'a b' has a schema"),
        ("gemma4", {"a": {"enum": [[1]]}}, "'a' has a schema"),
        ("gemma4", {"a": {"type": "object"}}, "'a' has a schema"),
        ("gemma4", {"a": nested(50)}, "nested too deeply"),
        ("olmo3", {f"a{i}": {} for i in range(33)}, "33 optional arguments"),
    ],
    ids=str,
)
def test_arguments_that_no_grammar_describes(name, properties, words):
    """Calls that must come get an error; others are free."""
    schemas = {"f": {"type": "object", "properties": properties}}
    assert FORMATS[name].structural_tag(schemas) is None
    with pytest.raises(UnsupportedError, match=words):
        FORMATS[name].structural_tag(schemas, required=True)


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize(
    ("arguments", "good"),
    [
        ('a:[1,2],b:{x:<|"|>{,]<|"|>,y:true},c:null', True),
        ('a:[],c:<|"|>x<|"|>', True),
        ("a:[1,],c:null", False),
        ('a:[1],c:null,b:{x:<|"|>t<|"|>}', False),  # keys are sorted
        ("a:[1],b:{y:true},c:null", False),
        ("c:null", False),
        ("a:[1],c:5", False),
    ],
)
def test_the_form_of_gemma(arguments, good, special):
    fmt = FORMATS["gemma4"]
    inner = {"x": {"type": "string"}, "y": {"type": "boolean"}}
    properties = {
        "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "a": {"type": "array", "items": {"type": "integer"}},
        "b": {"type": "object", "properties": inner, "required": ["x"]},
    }
    schemas = {"f": {"type": "object", "properties": properties, "required": ["a", "c"]}}
    words = vocabulary(['<|"|>', "<|tool_call>", "<tool_call|>"] if special else [])
    compiled = compile_tag(fmt.structural_tag(schemas), words)
    answer = f"Sure.<|tool_call>call:f{{{arguments}}}<tool_call|>"
    pieces = re.split("(" + "|".join(map(re.escape, words.special_tokens)) + ")", answer)
    data = [*answer.encode()]
    if special:
        data = [
            t
            for i, piece in enumerate(pieces)
            for t in ([words.special_tokens[piece]] if i % 2 else piece.encode())
        ]
    data.append(256)
    assert (compiled.start().accept_tokens(data) == len(data)) is good
    if good:
        (call,) = [block for block in parse(fmt, [answer], schemas) if block[0] == "call"]
        assert json.loads(call[2])["a"] is not None


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "olmo3"])
def test_definitions_that_a_property_refers_to(name):
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schema = {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": point}, "required": ["p"]}
    tag = FORMATS[name].structural_tag({"now": schema}, required=True)
    compile_tag(tag, vocabulary())


@pytest.mark.parametrize(
    ("answer", "good"),
    [("f()", True), ("f(a=1)", True), ("f(b=2)", True), ("f(a=1, b=2)", True), ("f(, b=2)", False)],
)
def test_optional_arguments_of_python_calls(answer, good):
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tag = FORMATS["pythonic"].structural_tag({"f": schema}, required=True, parallel=False)
    data = [*f"[{answer}]".encode(), 256]
    assert (compile_tag(tag, vocabulary()).start().accept_tokens(data) == len(data)) is good


def test_a_text_or_null():
    schema = {
        "properties": {"x": {"type": ["string", "null"], "enum": [None, "a"]}},
        "required": ["x"],
    }
    fmt = FORMATS["qwen3_coder"]
    tag = fmt.structural_tag({"f": schema}, required=True, parallel=False)
    for value, good in (("null", True), ("a", True), ("None", False)):
        answer = (
            f"<tool_call><function=f><parameter=x>\n{value}\n</parameter></function></tool_call>"
        )
        data = [*answer.encode(), 256]
        assert (compile_tag(tag, vocabulary()).start().accept_tokens(data) == len(data)) is good
