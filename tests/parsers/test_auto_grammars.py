"""Grammars of answers that may have calls: all formats, markers as text and as special tokens."""

import json
import random
import re
from dataclasses import replace

import pytest

from octavo.parsers.answer import AnswerParser
from octavo.parsers.bare_calls import has_bare_calls
from octavo.parsers.calls import JsonCalls, PythonCalls
from octavo.parsers.formats import FORMATS
from octavo.parsers.parts import CallStart, Text
from tests.parsers.test_laws import parse
from tests.parsers.test_structural_tag import SCHEMAS, compile_tag, sample, vocabulary
from tests.parsers.writers import write

CALLS = [("find", {"city": "Rome", "days": 3}), ("now", {})]
NAMES = [name for name in sorted(FORMATS) if FORMATS[name].structural_tag(SCHEMAS) is not None]
BARE_NAMES = [name for name in NAMES if has_bare_calls(FORMATS[name].calls)]
MARKED = [name for name in NAMES if FORMATS[name].calls.trigger]
# Their models write keys or quotes that the writer of the tests does not write.
OTHER_FORM = {"cohere", "internlm", "lfm2", "llama3_json", "olmo3", "pythonic"}
# Gemma 4 writes texts without escapes.
JSON_NAMES = [name for name in NAMES if name != "gemma4"]
ESCAPES = [
    r"caf\u00e9 \u00E9",
    r"\ud83d\ude00\uD83D\uDE00",
    r"\u0022}, \u0022x\u0022: {\u005c",
    *(
        f"{mark} {mark[1:]}"
        for mark in (r"\u003c/tool_call\u003e", r"\u005B/TOOL_CALLS]", r"\u007d")
    ),
]
NO_ESCAPES = [r"\ud83d", r"\ud83d!", r"\ude00", r"\ude00\ud83d", r"\u00e", r"\u00eg", r"\U0001f600"]
MARK = re.compile(r"<[^<>{}\s]*>|\[[A-Z/_]+\]|｜DSML｜")


def special_texts(fmt):
    """Return the texts of the format's marks that may be special tokens."""
    texts = [*(fmt.thoughts or ()), *fmt.silent, *fmt.calls.texts]
    return sorted({mark for text in texts for mark in MARK.findall(text)})


def tokens(answer, words):
    """Return the tokens of an answer: special ones where the text has them, else bytes."""
    names = sorted(words.special_tokens, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", answer) if names else [answer]
    found = []
    for i, piece in enumerate(pieces):
        found += [words.special_tokens[piece]] if i % 2 else [*piece.encode()]
    return [*found, 256]


def accepts(compiled, words, answer):
    data = tokens(answer, words)
    return compiled.start().accept_tokens(data) == len(data)


def test_formats_without_a_marker():
    assert set(NAMES) == set(FORMATS)
    assert BARE_NAMES == ["llama3_json", "pythonic", "xlam"]


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", NAMES)
def test_what_models_write(name, special):
    """Reasoning and text are free; calls follow their schemas."""
    fmt = FORMATS[name]
    words = vocabulary(special_texts(fmt) if special else [])
    compiled = compile_tag(fmt.structural_tag(SCHEMAS), words)
    for thought in [None, "Hm <b>"] if fmt.thoughts else [None]:
        for text in ("", "Sure: [1] {2}."):
            some = [[]] if name in OTHER_FORM else [[], CALLS[:1], CALLS]
            for calls in some[:2] if name == "openai" else some:
                if thought or text or calls:
                    answer = write(fmt, thought, text, calls)
                    assert accepts(compiled, words, answer), answer
    if name in OTHER_FORM or name in BARE_NAMES:
        return
    for wrong in ({"city": "Paris", "days": 3}, {"city": "Rome"}, {"city": "Rome", "days": 99}):
        answer = write(fmt, None, "Sure.", [("find", wrong)])
        assert not accepts(compiled, words, answer), answer
    if isinstance(fmt.calls, JsonCalls | PythonCalls):
        assert not accepts(compiled, words, write(fmt, None, "", [("lose", {})]))


@pytest.mark.parametrize("parallel", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("name", MARKED)
def test_what_the_grammar_allows(name, parallel):
    """After the marker each text of the grammar is a call that the parser reads."""
    fmt, rng, words = FORMATS[name], random.Random(name), vocabulary()
    compiled = compile_tag(fmt.structural_tag(SCHEMAS, parallel=parallel), words)
    for _ in range(2):
        grammar = compiled.start()
        begin = fmt.calls.trigger
        assert grammar.accept_tokens([*begin.encode()]) == len(begin.encode())
        text = begin + sample(grammar, words, rng, most=6000)
        blocks = [block for block in parse(fmt, [text], SCHEMAS) if block[0] == "call"]
        assert blocks, text
        assert parallel or len(blocks) == 1, text
        for _, function, arguments in blocks:
            found = json.loads(arguments)
            if function == "find":
                assert found["city"] in ("Rome", "Oslo"), text
                assert found["days"] in range(1, 10)
            else:
                assert (function, found) == ("now", {})


def test_the_reasoning_of_gpt_oss_is_a_message():
    """A new message begins after it. The end of a call is the model's stop token."""
    fmt = FORMATS["openai"]
    words = vocabulary([mark for mark in special_texts(fmt) if mark != "<|call|>"])
    words.special_tokens["<|call|>"] = 256
    compiled = compile_tag(fmt.structural_tag(SCHEMAS, required=True), words)
    thought = "<|channel|>analysis<|message|>I think.<|end|>"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    for before in ("", thought, f"{thought}<|start|>assistant"):
        assert accepts(compiled, words, before + call)
        assert not accepts(compiled, words, before)
    assert not accepts(compiled, words, call.removesuffix("}"))
    assert not accepts(compiled, words, f"{thought}<|start|>assistant{thought}{call}")


def test_words_that_are_no_marker():
    fmt, words = FORMATS["phi4_mini_json"], vocabulary()
    compiled = compile_tag(fmt.structural_tag(SCHEMAS), words)
    assert accepts(compiled, words, "import functools, or from functools import cache")
    assert not accepts(compiled, words, "functools[1]")


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_of_other_tools_are_text(name, size):
    """In each format, however the answer is divided."""
    fmt = FORMATS[name]
    answer = write(fmt, None, "", CALLS[:1])
    for schemas, known in (({"find": {}}, True), ({"now": {}}, False)):
        parser = AnswerParser(fmt, schemas, only_known=True)
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
        if known:
            assert [part.text for part in parts if isinstance(part, CallStart)] == ["find"]
        else:
            assert {type(part) for part in parts} == {Text}
            text = "".join(part.text for part in parts)
            assert text.strip() == answer.strip()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in BARE_NAMES])
def test_one_call_ends_the_answer(name):
    fmt, words = FORMATS[name], vocabulary()
    compiled = compile_tag(fmt.structural_tag(SCHEMAS, parallel=False), words)
    if name in OTHER_FORM:
        return
    assert accepts(compiled, words, write(fmt, None, "", CALLS[:1]))
    if name != "openai":
        assert not accepts(compiled, words, write(fmt, None, "", CALLS))


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "qwen3_coder", "seed_oss"])
def test_optional_arguments(name):
    """One may follow another, or not."""
    fmt, words = FORMATS[name], vocabulary()
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }
    compiled = compile_tag(fmt.structural_tag({"find": schema}), words)
    for keys in ((), ("city",), ("days",), ("city", "days")):
        call = ("find", {key: CALLS[0][1][key] for key in keys})
        assert accepts(compiled, words, write(fmt, None, "", [call])), keys


def test_white_space_between_the_marks_of_an_argument():
    """GLM 4.5 writes a new line there, and GLM 4.7 nothing."""
    fmt, words = FORMATS["glm45"], vocabulary()
    compiled = compile_tag(fmt.structural_tag(SCHEMAS), words)
    answer = write(fmt, None, "", CALLS[:1])
    for gap in (" ", "\n", ""):
        assert accepts(compiled, words, answer.replace("</arg_key> <", f"</arg_key>{gap}<"))


def noted(text):
    """Return the schemas of a function whose argument is an object with a text.

    Also formats with an element for each argument write the object as JSON.
    """
    note = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    return {"find": {"type": "object", "properties": {"note": note}, "required": ["note"]}}


@pytest.mark.parametrize("name", JSON_NAMES)
def test_escapes_of_characters(name):
    """A call may have them, also those of quotes and marks, and means what JSON says."""
    fmt, words = replace(FORMATS[name], thoughts=None), vocabulary()
    constant = compile_tag(fmt.structural_tag(noted({"enum": ["X7X"]}), required=True), words)
    call = sample(constant.start(), words, random.Random(name))
    assert call.count("X7X") == 1, call
    free = [
        compile_tag(fmt.structural_tag(noted({"type": "string"}), required=required), words)
        for required in (False, True)
    ]
    for escape in ESCAPES:
        answer = call.replace("X7X", escape)
        for compiled in free:
            assert accepts(compiled, words, answer), answer
        for pieces in ([answer], [*answer]):
            ((kind, function, arguments),) = parse(fmt, pieces, noted({"type": "string"}))
            assert (kind, function) == ("call", "find")
            assert json.loads(arguments) == {"note": {"text": json.loads(f'"{escape}"')}}
    for escape in NO_ESCAPES:
        for compiled in free:
            assert not accepts(compiled, words, call.replace("X7X", escape)), escape
