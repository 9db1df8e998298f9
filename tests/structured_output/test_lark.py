"""EBNF and structural tags with llguidance, compared with xgrammar, whose notation they are."""

from __future__ import annotations

import json

import pytest

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from tests.structured_output.test_backends import ALL_BYTES, accepts

# Grammar, texts that it allows, and texts that it does not allow.
EBNF = {
    "rules without recursion": ('root ::= w "x"\nw ::= [a-z]+', ["aax", "xx"], ["x", "aa"]),
    "escapes": (r'root ::= "\n\t\0\"\\\/\x41b\u00e9ab\U0001f600"', ['\n\t\0"\\/Abéab😀'], []),
    "classes": (r"root ::= [\]\[^-][\^a-][^\-&~]", ["]^a", "[-^", "^aé", "--x"], ["a^a", "]a-"]),
    "no operators in classes": ("root ::= [a~~b] [a&&b]", ["~&", "ab"], ["&a"]),
    "lines": (
        'root ::=  # first\n  "a"\n  | b\n\n  (\n  "c" | "d"\n  )\nb ::=\n"b" {2,\n3}\r\n',
        ["a", "bbc", "bbbd"],
        ["b", "bb", "ac"],
    ),
    "names": (
        'root ::= Foo-bar fooBar foo_bar start\nFoo-bar ::= "a"\nfooBar ::= "b" root | "c"\n'
        'foo_bar ::= "d"\nstart ::= "e"',
        ["acde", "abacdede"],
        ["acd"],
    ),
}


@pytest.mark.parametrize("name", EBNF)
@pytest.mark.parametrize("backend", ALL_BYTES)
def test_ebnf(backend, name):
    text, right, wrong = EBNF[name]
    compiled = ALL_BYTES[backend].compile(GrammarSpec("grammar", text))
    assert [t for t in right if not accepts(compiled, t)] == []
    assert [t for t in wrong if accepts(compiled, t)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (r'root ::= "\q"', r"escape \\q, which stands for no character"),
        (r'root ::= "\ud83d"', r"escape \\ud83d, which"),
        ("root ::= [b-a]", "range b-a has no characters"),
        ('root ::= "a', '"a has no end'),
        ("root ::= [a", r"\[a has no end"),
        ('root ::= "a" (= "b")', "convert the grammar"),
    ],
)
def test_wrong_ebnf_is_refused_by_name(grammar, message):
    with pytest.raises(GrammarError, match=message):
        ALL_BYTES["llguidance"].compile(GrammarSpec("grammar", grammar))


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
WORD = {"type": "regex", "pattern": "[a-z]+"}
NESTED = {"type": "grammar", "grammar": 'root ::= "(" root ")" | x\nx ::= [a-z]*'}
TEXT = {"type": "any_text"}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements):
    return {"type": "sequence", "elements": elements}


CALLS = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", NUMBER, "</f>")]
CALL, TWO = "<f=a>1</f>", "<f=a>1</f><f=b>2</f>"
THINK = tag("<think>", TEXT, "</think>")


def triggered(**fields):
    return {"type": "triggered_tags", "triggers": ["<f"], "tags": CALLS, **fields}


def separated(**fields):
    return {"type": "tags_with_separator", "tags": CALLS, "separator": ",", **fields}


FORMATS = {
    "const_string": ({"type": "const_string", "value": "a\n"}, ["a\n"], ["a"]),
    "json_schema": (NUMBER, ["12"], ['"a"']),
    "regex": (tag("<", WORD, "x"), ["<ax", "<xx"], ["<x", "<a"]),
    "regular parts": (sequence(WORD, {"type": "const_string", "value": "b"}, NUMBER),
                      ["abb1", "ab1"], ["b1", "ab"]),
    "grammar": (tag("<g>", NESTED, "</g>"), ["<g>((a))</g>", "<g></g>"], ["<g>(</g>"]),
    "or": ({"type": "or", "elements": [NUMBER, NESTED, WORD]}, ["1", "(a)", "a"], ["1a"]),
    "optional": ({"type": "optional", "content": NESTED}, ["", "(a)"], ["("]),
    "plus": ({"type": "plus", "content": tag("a", NUMBER, "b")}, ["a1b", "a1ba2b"], ["", "a1"]),
    "star": ({"type": "star", "content": WORD}, ["", "abc"], ["1"]),
    "repeat": ({"type": "repeat", "min": 2, "max": -1, "content": tag("a", NUMBER, "b")},
               ["a1ba1b", "a1b" * 4], ["a1b"]),
    "several ends": (tag("<t>", NUMBER, ["</t>", "!"]), ["<t>1</t>", "<t>1!"], ["<t>1"]),
    "any_text": (TEXT, ["", "a<b"], []),
    "text in a tag": (THINK, ["<think>a<b</think>", "<think></think>"],
                      ["<think>a", "<think>a</think>b</think>"]),
    "thinking first": (sequence(THINK, triggered(at_least_one=True)),
                       [f"<think>a</think>{CALL} b"], [CALL, "<think>a</think> b"]),
    "triggered_tags": (triggered(), ["", "a<b", CALL, f"a{CALL}b{TWO}c"],
                       ["<f", f"a{CALL}<f", "<f=c>1</f>", "<f=a>x</f>"]),
    "at_least_one": (triggered(at_least_one=True), [CALL, f"{TWO}a{CALL}b"], ["", f"a{CALL}"]),
    "stop_after_first": (triggered(stop_after_first=True), ["", "a", f"a{CALL}"],
                         [f"{CALL}a", TWO]),
    "exactly one": (triggered(at_least_one=True, stop_after_first=True), [CALL],
                    ["", f"a{CALL}", f"{CALL}a", TWO]),
    "triggered in a tag": (tag("[", triggered(), "]"), ["[]", f"[a{CALL}b]"], ["[]]", "[<f]"]),
    "tags_with_separator": (separated(), ["", CALL, f"{CALL},{CALL}"], [f"{CALL},", TWO]),
    "separated, one": (separated(at_least_one=True, stop_after_first=True), [CALL],
                       ["", f"{CALL},{CALL}"]),
}  # fmt: skip


def tag_spec(content):
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": content}))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", ALL_BYTES)
def test_structural_tags(backend, name):
    content, right, wrong = FORMATS[name]
    compiled = ALL_BYTES[backend].compile(tag_spec(content))
    assert [t for t in right if not accepts(compiled, t)] == []
    assert [t for t in wrong if accepts(compiled, t)] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"type": "token", "token": 5}, "the format token is not supported"),
        ({**NUMBER, "style": "qwen_xml"}, "style of the format json_schema is not supported"),
        ({**TEXT, "excludes": ["a"]}, "excludes of the format any_text is not supported"),
        (tag({"type": "token", "token": 5}, NUMBER, "a"), "tokens are not supported"),
        (tag("a", NUMBER, {"type": "token", "token": 5}), "tokens are not supported"),
        (tag("a", TEXT, []), "end of a structural tag must be a list that is not empty"),
        (triggered(triggers="<f"), "triggers of a structural tag must be a list"),
        (sequence(TEXT, NUMBER), "free text is supported at the end"),
        (triggered(triggers=["<g"]), "no trigger begins the tag '<f=a>'"),
        ({"type": "tag", "begin": "a", "end": "b"}, "the field 'content' is missing"),
        ("text", "llguidance: "),
        (tag("a", {"type": "json_schema", "json_schema": False}, "b"), "allows no text"),
    ],
)
def test_unsupported_tags_are_refused_by_name(content, message):
    with pytest.raises(GrammarError, match=message):
        ALL_BYTES["llguidance"].compile(tag_spec(content))


@pytest.mark.parametrize("free", [TEXT, triggered(), triggered(stop_after_first=True)], ids=str)
def test_texts_that_do_not_begin_with_a_pattern(free):
    compiled = ALL_BYTES["llguidance"].compile(tag_spec({**free, "not_first": "ab*c|[xy]"}))
    has_tags = free is not TEXT
    ends = free.get("stop_after_first")
    for text, right in [
        *(("", True), ("a", True), ("abb", True), ("abbd", True), ("zac", True)),
        *(("ac", False), ("abbcd", False), ("x", False), ("yes", False)),
        *((f"a{CALL}", True), (f"ac{CALL}", False), (CALL, True)),
        *((f"{CALL}ac", not ends), (f"d{CALL}x{CALL}y", not has_tags or not ends)),
        ("d<f=c>1</f>", not has_tags),
    ]:
        assert accepts(compiled, text) is right, text


@pytest.mark.parametrize("backend", ALL_BYTES)
def test_patterns_of_beginnings_that_are_refused(backend):
    wrong = triggered(at_least_one=True) if backend == "llguidance" else TEXT
    with pytest.raises(GrammarError, match=f"{backend}: not_first.* is not supported"):
        ALL_BYTES[backend].compile(tag_spec({**wrong, "not_first": "a"}))
