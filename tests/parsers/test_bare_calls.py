"""Grammars of formats whose calls have no marker: an answer is a call that it holds, or a text."""

import json
import random
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.parsers.answer import AnswerParser
from octavo.parsers.bare_calls import like_a_call
from octavo.parsers.formats import FORMATS, THINK
from octavo.parsers.parts import CallArguments, CallStart
from tests.parsers.test_auto_grammars import accepts
from tests.parsers.test_structural_tag import SCHEMAS, compile_tag, sample, vocabulary

NAMES = ("llama3_json", "pythonic", "xlam")
GOOD = {"city": "Rome", "days": 3}
ILL = ({"city": "Paris", "days": 3}, {"city": "Rome"}, {"city": "Rome", "days": "3"})
# Texts that are no calls, though some begin like one.
TEXTS = [
    *("Hello", "", " \n", "See: CALL", "{", "[", "[1, 2]", "{}", '{"a": 1}', '{"name": 5}'),
    *('{"name": "John", "age": 5}', '{"names": "find"}', '[{"name": "John"}]', '[{"a": [1]}]'),
    *(
        '{"type": "b", "x": {}}',
        '{"id": 7, "name": "Jo"}',
        '{"nam',
        '[{"name": "fin',
        "[finder(1)]",
    ),
    *("[find]", "[{]", "{ find", '{"find": "name"}', "```\nCALL\n```"),
]


def call(name, arguments, function="find"):
    if name == "pythonic":
        written = ", ".join(f"{k}={json.dumps(v)}" for k, v in arguments.items())
        return f"[{function}({written})]"
    key = FORMATS[name].calls.keys[1]
    text = json.dumps({"name": function, key: arguments})
    return f"[{text}]" if name == "xlam" else text


def read(fmt, text, thinks=False):
    """Return the calls in an answer, whose schemas a grammar holds."""
    parser = AnswerParser(fmt, SCHEMAS, thinks, held=True)
    found = []
    for part in parser.feed(text) + parser.end():
        if isinstance(part, CallStart):
            found.append([part.text, ""])
        elif isinstance(part, CallArguments):
            found[-1][1] += part.text
    return found


def is_right(function, arguments):
    found = json.loads(arguments)
    if function == "now":
        return found == {}
    return found.keys() == GOOD.keys() and found["city"] in ("Rome", "Oslo") and found["days"] > 0


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def grammars(request):
    """Formats with reasoning, and their grammars, with markers as texts or as special tokens."""
    marks = ["<think>", "</think>", "<|python_tag|>", "<|python_start|>"]
    words = vocabulary(marks if request.param else [])
    formats = {name: replace(FORMATS[name], thoughts=THINK) for name in NAMES}
    return words, {
        (name, parallel): (fmt, compile_tag(fmt.structural_tag(SCHEMAS, parallel=parallel), words))
        for name, fmt in formats.items()
        for parallel in (True, False)
    }


@pytest.mark.parametrize("parallel", [True, False], ids=["several", "one"])
@pytest.mark.parametrize("name", NAMES)
def test_calls_and_texts(name, parallel, grammars):
    words, compiled = grammars
    fmt, grammar = compiled[name, parallel]
    good = call(name, GOOD)
    before = ["", " \n", "<think>Hm.</think>", "<think>[{</think>\n\n"]
    for start in before:
        assert accepts(grammar, words, start + good), start
        assert [c[0] for c in read(fmt, start + good)] == ["find"]
        assert accepts(grammar, words, start + call(name, {}, "now"))
        for ill in ILL:
            assert not accepts(grammar, words, start + call(name, ill)), (start, ill)
        for text in TEXTS:
            text = start + text.replace("CALL", call(name, ILL[0]))
            assert not read(fmt, text), text
            assert accepts(grammar, words, text), text
    first, second = good.strip("[]"), call(name, {}, "now").strip("[]")
    several = f"[{first}, {second}]" if good[0] == "[" else f"{first}; {second}"
    assert len(read(fmt, several)) == 2
    assert accepts(grammar, words, several) is parallel
    assert not accepts(grammar, words, several.replace("Rome", "Paris"))
    if name != "pythonic":
        extra = ['"id": "c1", "name"', '"type": "function", "name"']
        assert all(accepts(grammar, words, good.replace('"name"', text)) for text in extra)


TRICKS = [
    *("\xa0CALL", "\u3000\x1cCALL", "CALL CALL", "CALL; CALL", "MARKCALL; CALL", "MARKCALL CALL"),
    *(
        "MARKCALL\n\nCALL",
        "<think>MARKCALL</think>CALL",
        "a<think>b</think>CALL",
        "[,CALL",
        "{,CALL",
    ),
    *(
        "<think>a</think><think>b</think>CALL",
        " <think>a</think>CALL",
        "<think>a<think></think>CALL",
    ),
    *("a MARKCALL", "CALL text", "</think>CALL", "<think>CALL", "CALL<think>a</think>CALL"),
]


@pytest.mark.parametrize("name", NAMES)
def test_no_trick_leads_to_an_ill_typed_call(name, grammars):
    """What the grammar accepts and the parser reads as a call follows its schema."""
    words, compiled = grammars
    mark = {"llama3_json": "<|python_tag|>", "pythonic": "<|python_start|>", "xlam": ""}[name]
    written = [call(name, ill) for ill in ILL]
    if name != "pythonic":
        spelled = [('"name"', '"n\\u0061me"'), ('"find"', '"f\\u0069nd"')]
        spelled += [('"name"', f'"{key}"') for key in ("tool_name", "function", "function_name")]
        spelled += [('"name"', f'{first}, "name"') for first in ('"type": {}', '"id": "\\" [{"')]
        spelled += [('"name"', '"type":"a","id": 7 ,, "name"'), ('{"name"', '{,"name"')]
        written += [written[0].replace(*change) for change in spelled]
        written.append(json.dumps({"arguments": ILL[0], "name": "find"}))
        nested = {"function": {"name": "find", "arguments": ILL[0]}}
        written += [json.dumps(nested), json.dumps({"type": "function"} | nested)]
        if name == "xlam":
            written = [text if text[0] == "[" else f"[{text}]" for text in written]
    else:
        written += [text.strip("[]") for text in written]
    num_calls = 0
    for parallel in (True, False):
        fmt, grammar = compiled[name, parallel]
        for ill in written:
            for trick in [*TRICKS, "CALL"]:
                goods = [ill, call(name, GOOD)]
                goods += [goods[1].strip("[]")] if name == "pythonic" else []
                for good in goods:
                    text = trick.replace("MARK", mark)
                    text = text.replace("CALL", good, 1).replace("CALL", ill)
                    if accepts(grammar, words, text):
                        calls = read(fmt, text)
                        num_calls += len(calls)
                        assert all(is_right(*found) for found in calls), text
    assert num_calls


@pytest.mark.parametrize("name", NAMES)
def test_what_the_grammar_allows(name, grammars):
    """After the beginning of a call each text of the grammar is a call that the parser reads."""
    words, compiled = grammars
    rng = random.Random(name)
    for parallel in (True, False):
        fmt, grammar = compiled[name, parallel]
        begin = {"llama3_json": '{"name": "find"', "pythonic": "[find(", "xlam": '[{"name": "now"'}[
            name
        ]
        for _ in range(2):
            started = grammar.start()
            assert started.accept_tokens([*begin.encode()]) == len(begin)
            text = begin + sample(started, words, rng)
            calls = read(fmt, text)
            assert calls, text
            assert len(calls) == 1 or parallel
            assert all(is_right(*found) for found in calls), text


PIECES = [
    *(
        "{",
        "[",
        "}",
        "]",
        '"',
        ",",
        ":",
        " ",
        "\n",
        "\xa0",
        "\\",
        "\\u0066",
        "(",
        ")",
        "=",
        ";",
        "x",
    ),
    *('"name"', '"find"', '"now"', '"arguments"', '"parameters"', '"type"', '"id"', '"function"'),
    *("find(", "now()", "<think>", "</think>", "7", '{"name": ', '{"city": "Rome", "days": 3}'),
    *('{"city": 5}', '[{"name": "now", "arguments": {}}', "<|python_tag|>", "<|python_start|>"),
]


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(st.sampled_from(PIECES), max_size=9))
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_text(name, grammars, pieces):
    """The grammar refuses only texts that begin like a call; its calls follow their schemas."""
    words, compiled = grammars
    fmt, grammar = compiled[name, True]
    text = "".join(pieces)
    marks = ["<think>", *filter(None, [fmt.calls.trigger])]
    accepted, calls = accepts(grammar, words, text), read(fmt, text)
    if accepted:
        assert all(is_right(*found) for found in calls), text
    elif not calls and not any(mark in text for mark in [*words.special_tokens, *marks]):
        pattern = like_a_call(fmt.calls, SCHEMAS)
        pattern = re.sub(r"\\u\{(\w+)\}", lambda found: f"\\u{int(found[1], 16):04x}", pattern)
        assert re.match(pattern, text), text


def test_the_prompt_begins_the_thought():
    words, fmt = vocabulary(), FORMATS["xlam"]
    grammar = compile_tag(fmt.structural_tag(SCHEMAS, thinks=True), words)
    good, ill = call("xlam", GOOD), call("xlam", ILL[0])
    for text, right in [
        (f"Hm.</think>\n\n{good}", True),
        (f"Hm. {ill}</think>No.", True),
        (f"Hm.</think>{ill}", False),
        ("No end", False),
    ]:
        assert accepts(grammar, words, text) is right, text
    assert read(fmt, f"Hm.</think>{good}", thinks=True)


def test_many_tools():
    """The grammar of many tools stays within the limits, and tells them from texts."""
    schemas = {f"tool_{i}": SCHEMAS["find"] for i in range(128)}
    words = vocabulary()
    grammar = compile_tag(FORMATS["llama3_json"].structural_tag(schemas), words)
    for name, right in (("tool_77", True), ("tool_200", None)):
        good = call("llama3_json", GOOD, name)
        assert accepts(grammar, words, good)
        assert accepts(grammar, words, good.replace("Rome", "Paris")) is (right is None)
