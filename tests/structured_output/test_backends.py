"""Both backends, compared with a validator and with the interface."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import octavo
from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from octavo.structured_output.llguidance_backend import LLGuidanceBackend
from octavo.structured_output.vocabulary import Vocabulary
from octavo.structured_output.xgrammar_backend import XGrammarBackend
from octavo.text.tokenizer import Tokenizer
from tests import small_tokenizers

BACKENDS = [XGrammarBackend, LLGuidanceBackend]
STORIES = Path(octavo.__file__).parent / "builtin" / "stories"
PADDING = 70


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(STORIES)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary.from_tokenizer(tokenizer, len(tokenizer) + PADDING, [0, 2])


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda b: b.name)
def backend(request, vocabulary):
    return request.param(vocabulary)


BYTES = Vocabulary([bytes([i]) for i in range(256)] + [b""], [256], lambda t: list(t.encode()))
ALL_BYTES = {backend.name: backend(BYTES) for backend in BACKENDS}


def allowed(grammar, size):
    row = np.full(-(-size // 32), -1, np.int32)
    grammar.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def accepts(compiled, text):
    tokens = [*text.encode(), 256]
    return compiled.start().accept_tokens(tokens) == len(tokens)


def walk(compiled, vocabulary, pick, most=300):
    """Return a text that a grammar allows, token by token; check each one."""
    grammar, tokens = compiled.start(), []
    while not grammar.is_terminated and len(tokens) < most:
        choices = allowed(grammar, vocabulary.size)
        assert choices
        token = pick(choices)
        assert token < len(vocabulary.token_bytes)
        assert vocabulary.token_bytes[token] or token in vocabulary.stop_token_ids
        assert grammar.accept_tokens([token]) == 1
        tokens.append(token)
    return b"".join(vocabulary.token_bytes[t] for t in tokens), grammar.is_terminated


GRAMMARS = {
    "json": (
        "json",
        '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, '
        '"required": ["a", "b"], "additionalProperties": false}',
        '{"a": 12, "b": "yy"}',
        '{"a": 12, "b": "z"}',
    ),
    "json_object": ("json_object", "", '{"k": [1, "é\\n"]}', "[1]"),
    "regex": ("regex", "[a-c]{2,4}(é|中)", "abc中", "ab"),
    "choice": (
        "choice",
        '["yes", "no \\"quoted\\" \\n\\\\ 中😀", "no"]',
        'no "quoted" \n\\ 中😀',
        "n",
    ),
    "ebnf": ("grammar", 'root ::= "(" root ")" | "x"', "((x))", "((x)"),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_allows_what_it_says(backend, name):
    kind, text, right, wrong = GRAMMARS[name]
    compiled = ALL_BYTES[backend.name].compile(GrammarSpec(kind, text))
    assert accepts(compiled, right)
    assert not accepts(compiled, wrong)


def test_thousands_of_choices_that_begin_alike_are_matched(backend):
    choices = [f"the choice with the number {i}" for i in range(3000)]
    compiled = ALL_BYTES[backend.name].compile(GrammarSpec("choice", json.dumps(choices)))
    assert accepts(compiled, choices[2999])
    assert not accepts(compiled, "the choice with the number 3000")


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_model_s_tokens_spell_it(backend, vocabulary, tokenizer, name):
    kind, text, right, wrong = GRAMMARS[name]
    compiled = backend.compile(GrammarSpec(kind, text))
    tokens = [*tokenizer.encode(right, False), 2]
    grammar = compiled.start()
    assert grammar.accept_tokens(tokens) == len(tokens)
    assert grammar.is_terminated
    assert allowed(grammar, vocabulary.size) == [0, 2]
    assert grammar.accept_tokens([2]) == 0
    bad = [*tokenizer.encode(wrong, False), 2]
    assert compiled.start().accept_tokens(bad) < len(bad)
    if name != "json_object":
        for pick in (min, max):
            spelt, ended = walk(compiled, vocabulary, pick)
            if ended:
                assert accepts(
                    ALL_BYTES[backend.name].compile(GrammarSpec(kind, text)), spelt.decode()
                )


def test_what_was_accepted_can_be_taken_back(backend, vocabulary, tokenizer):
    compiled = backend.compile(GrammarSpec("regex", "ab[0-9]c"))
    tokens = [*tokenizer.encode("ab7c", False), 0]
    grammar, masks = compiled.start(), []
    for token in tokens:
        masks.append(allowed(grammar, vocabulary.size))
        assert grammar.accept_tokens([token]) == 1
    assert grammar.is_terminated
    for count in range(1, len(tokens) + 1):
        grammar.rollback(count)
        assert not grammar.is_terminated
        assert allowed(grammar, vocabulary.size) == masks[len(tokens) - count]
        assert grammar.accept_tokens(tokens[len(tokens) - count :]) == count
    grammar.rollback(0)
    assert grammar.is_terminated


def test_a_token_that_is_refused_changes_nothing(backend, vocabulary, tokenizer):
    grammar = backend.compile(GrammarSpec("regex", "ab[0-9]c")).start()
    (a,) = tokenizer.encode("a", False)
    before = allowed(grammar, vocabulary.size)
    for token in (tokenizer.encode("z", False)[0], 0, vocabulary.size - 1, vocabulary.size + 5):
        assert grammar.accept_tokens([token, a]) == 0
    assert allowed(grammar, vocabulary.size) == before
    assert grammar.accept_tokens([a, a]) == 1


def test_requests_with_one_grammar_do_not_share_their_state(backend, vocabulary, tokenizer):
    compiled = backend.compile(GrammarSpec("regex", "ab[0-9]c"))
    first, second = compiled.start(), compiled.start()
    (a,) = tokenizer.encode("a", False)
    first.accept_tokens([a])
    assert allowed(second, vocabulary.size) == allowed(compiled.start(), vocabulary.size)
    assert allowed(first, vocabulary.size) != allowed(second, vocabulary.size)


def test_forced_text_is_tokenised_as_the_tokeniser_does(backend, tokenizer):
    text = '{"the name of the animal": '
    schema = {
        "type": "object",
        "properties": {"the name of the animal": {"type": "string"}},
        "required": ["the name of the animal"],
    }
    spec = GrammarSpec("json", json.dumps(schema), any_whitespace=False)
    grammar, tokens = backend.compile(spec).start(), tokenizer.encode(text + '"', False)
    assert grammar.accept_tokens(tokens[:2]) == 2
    forced = grammar.forced_tokens(100)
    assert len(forced) >= 3
    assert forced[:3] == tokens[2:5]
    assert grammar.forced_tokens(2) == forced[:2]
    assert grammar.accept_tokens(forced) == len(forced)
    assert grammar.forced_tokens(8) == []
    over = backend.compile(GrammarSpec("choice", '["a"]')).start()
    over.accept_tokens([tokenizer.encode("a", False)[0], 2])
    assert over.forced_tokens(8) == []


def test_nothing_is_forced_within_a_character(backend):
    grammar = ALL_BYTES[backend.name].compile(GrammarSpec("choice", '["é", "yes"]')).start()
    assert grammar.accept_tokens([0xC3]) == 1
    assert grammar.forced_tokens(8) == []
    assert grammar.accept_tokens([0xA9, 256]) == 2


DEFS = {"a": {"type": "string"}}
# Schemas and values, some of them wrong: no backend may accept the wrong ones.
CASES = [
    ({"type": "integer", "multipleOf": 7}, [7, 8]),
    ({"type": "number", "multipleOf": 0.5}, [1.25]),
    ({"type": "array", "uniqueItems": True}, [[1, 1]]),
    ({"type": "array", "contains": {"type": "string"}}, [[1]]),
    ({"type": "object", "minProperties": 1}, [{}]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, [{"a": 1, "b": 2}]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, [{"b": 1}]),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"abc": 1}]),
    ({"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": {"type": "null"}}},
     [{"ab": 1}]),
    ({"type": "object", "required": ["a"]}, [{}]),
    ({"required": ["a"]}, [{}]),
    ({"type": "object", "dependentRequired": {"a": ["b"]}, "properties": {"a": {}}}, [{"a": 1}]),
    ({"type": "object", "dependentSchemas": {"a": False}, "properties": {"a": {}}}, [{"a": 1}]),
    ({"not": {"type": "string"}}, ["a"]),
    ({"if": {"type": "string"}, "then": {"maxLength": 1}}, ["aa"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, [1]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a", None]),
    ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, ["aa", 1]),
    ({"type": "string", "allOf": [{"maxLength": 1}]}, ["aa"]),
    ({"anyOf": [{"minLength": 2}], "type": "string"}, ["a"]),
    ({"anyOf": [{"required": ["a"]}], "type": "object", "properties": {"a": {}}}, [{}]),
    ({"enum": [1, "a"], "type": "string"}, [1]),
    ({"enum": ["a", "aaa"], "maxLength": 2}, ["aaa"]),
    ({"enum": ["a"], "const": "b"}, ["a", "b"]),
    ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": DEFS}, ["aa"]),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "not": {}}}}, ["a"]),
    ({"$ref": "#/$defs/b", "$defs": DEFS}, [1]),
    ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "string"}}}, [1]),
    ({"$dynamicRef": "#x", "$defs": {"a": {"$dynamicAnchor": "x", "type": "string"}}}, [1]),
    ({"minimum": 3}, [2]),
    ({"minItems": 2}, [[1]]),
    ({"pattern": "^a$"}, ["b"]),
    ({"minProperties": 1}, [{}]),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, ["aaa"]),
    ({"type": "string", "format": "date", "maxLength": 2}, ["2020-01-01"]),
    ({"type": "string", "pattern": "^(?!a)b"}, ["a"]),
    ({"type": "string", "pattern": "^a$b"}, ["ab"]),
    ({"type": ["string", "integer"], "minLength": 2, "minimum": 5}, ["a", 4]),
    ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, [["a", 1], [1]]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"b": 1}]),
    ({"properties": {"a": {"items": {"minimum": 3}}}}, [{"a": [1]}]),
    ({"type": "integer", "multipleOf": 2.5}, [3]),
    ({"type": "integer", "multipleOf": 2, "minimum": 3}, [5]),
    ({"type": "integer", "multipleOf": 5000}, [5001]),
    ({"type": "array", "contains": False}, [[], [1]]),
    ({"if": False, "else": {"const": 1}}, [2]),
    ({"type": "array", "items": True, "minItems": -1}, []),
    ({"type": "string", "format": "ipv4"}, ["01.2.3.4"]),
    ({"type": "string", "pattern": "^[[:alpha:]]$"}, ["a"]),
    ({"type": "string", "pattern": "^[a&&b]$"}, ["ab"]),
    ({"type": "string", "pattern": "^[a--b]$"}, ["ab"]),
    ({"type": "string", "pattern": "^\\Aa$"}, ["a"]),
    ({"type": "string", "pattern": "^a+[b]{1,129}$"}, ["abab"]),
    *(({"type": "string", "pattern": f"^a{negated}b$"}, ['a"b', r"a\b"])
      for negated in ('[^"]', r"[^\\]", r"[^\x22\\]", '[^"-]', "[^!-~]", "[^A-z]")),
    ({"type": "object", "patternProperties": {'^[^"]$': True}, "additionalProperties": False},
     [{'"': 1}]),
    ({"properties": {"a": {"$id": "http://x/b", "$ref": "#/$defs/a", "$defs": {"a": True}}},
      "$defs": DEFS}, [{"a": 1}]),
]  # fmt: skip


# Schemas and wrong texts for them, which `json.dumps` would not write.
TEXTS = [
    *(
        ({"type": "string"} | more, [f'"{char}"'])
        for more in (
            {"minLength": 1},
            {"maxLength": 1},
            {"maxLength": 1000},
            {"pattern": "^.{0,1000}$"},
            {"pattern": "^[^a]{1,200}$"},
            {"pattern": r"^[\s\S]*$"},
            {"pattern": "^\\W{0,200}$"},
            {"pattern": "^[ -~]{0,200}$"},
            {"pattern": "^[.-\\]]{0,200}$"},
            {"pattern": '^"$'},
            {"pattern": r"^\"$"},
            {"pattern": r"^\\$"},
            {"pattern": r"^\n$"},
            {"pattern": "^\n$"},
            {"pattern": "^[^]$"},
            {"format": "json-pointer"},
            {"format": "relative-json-pointer"},
        )
        for char in ('"', "\\", "\n", "\t", "\x01", '/"', "0/\n")
    ),
    ({"type": "object", "propertyNames": {"maxLength": 9}}, ['{"\n": 1}', '{"\x01": 1}']),
    ({"type": "object", "patternProperties": {'^"$': {}}}, ['{""": 1}']),
    ({"type": "object", "patternProperties": {"^.{1,200}$": {}}}, ['{""": 1}', '{"\n": 1}']),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, [r'{"\u0061": "x"}']),
    (
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True},
        [r'{"\u0061": "x"}'],
    ),
    (
        {
            "type": "object",
            "properties": {"a\n": {"type": "null"}},
            "additionalProperties": {"type": "string"},
        },
        [r'{"a\n": "x"}'],
    ),
    ({"type": "object", "minProperties": 2}, ['{"a": 1, "a": 1}']),
    (
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
        ['{"a": 1, "a": 1}'],
    ),
    ({"type": "integer", "divisibleBy": 2}, ["3"]),
    ({"type": "string", "maxLength": 2}, [r'"\u00e9\ud83d\ude00a"', r'"\ud83d"', r'"\ude00"']),
    ({"type": "string", "minLength": 2}, [r'"\u00e9"', r'"\ud83d\ude00"']),
    ({"type": "string", "pattern": "^[^é]*$"}, [r'"\u00e9"']),
]


@pytest.mark.parametrize(("schema", "texts"), TEXTS, ids=lambda v: json.dumps(v)[:60])
def test_no_text_is_accepted_wrongly(backend, schema, texts):
    try:
        compiled = ALL_BYTES[backend.name].compile(GrammarSpec("json", json.dumps(schema)))
    except GrammarError:
        return
    assert [text for text in texts if accepts(compiled, text)] == []


# Schemas that one of the two must support, and texts that follow them.
SUPPORTED = [
    ({"type": "string", "maxLength": 3}, [r'"a\n\""', '""', '"中😀a"', r'"\u4e2d\uD83D\uDE00a"']),
    ({}, [r'{"\u00e9": "\u0061\u001f"}']),
    ({"type": "string", "pattern": "^[^x]{0,1000}$"}, [r'"a\n\""']),
    ({"type": "string", "pattern": r"^[A-Z\d_.-]+(/|\.)\w$"}, ['"AB-1/x"']),
    ({"type": "string", "pattern": '^[^"]{1,300}[^@]$'}, [r'"a b\n"', r'"a\""']),
    ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"']),
    ({"type": "integer", "multipleOf": 5000}, ["15000"]),
    ({"type": "array", "maxItems": 2}, ["[]", "[1, 2]"]),
    ({"type": "object", "maxProperties": 1}, ["{}", '{"a": 1}']),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True},
     ['{"a": 1, "b": 2}', '{"c\\n": 2}']),
    ({"type": "object", "required": ["b"], "properties": {"a": {}}}, ['{"a": 1, "b": 2}']),
    ({"type": "object", "minProperties": 2, "required": ["a", "b"],
      "properties": {"a": {}, "b": {}}}, ['{"a": 1, "b": 2}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "texts"), SUPPORTED, ids=lambda v: json.dumps(v)[:60])
def test_what_one_refuses_the_other_takes(schema, texts):
    for backend in ALL_BYTES.values():  # the order of "auto"
        try:
            compiled = backend.compile(GrammarSpec("json", json.dumps(schema)))
        except GrammarError:
            continue
        assert [text for text in texts if not accepts(compiled, text)] == []
        return
    pytest.fail("both refuse it")


def test_an_escape_may_have_several_tokens():
    pieces = [rb"\u", rb"\ud83", rb"d\ude", b'00"', b'0g"', b"00e", b'9"', b'"']
    words = Vocabulary([*pieces, b""], [len(pieces)], lambda text: [])
    compiled = LLGuidanceBackend(words).compile(GrammarSpec("json", '{"type": "string"}'))
    for tokens in ([7, 0, 5, 6, 8], [7, 1, 2, 3, 8]):
        grammar = compiled.start()
        for token in tokens:
            assert token in allowed(grammar, words.size)
            assert grammar.accept_tokens([token]) == 1
        assert grammar.is_terminated
    grammar = compiled.start()
    assert grammar.accept_tokens([7, 1, 2]) == 3
    assert allowed(grammar, words.size) == [3, 5]


@pytest.mark.parametrize(("schema", "values"), CASES, ids=lambda v: json.dumps(v)[:60])
def test_nothing_is_accepted_wrongly(backend, schema, values):
    try:
        compiled = ALL_BYTES[backend.name].compile(GrammarSpec("json", json.dumps(schema)))
    except GrammarError:
        return  # another one may support it
    try:
        is_valid = jsonschema.Draft202012Validator(schema).is_valid
        wrong = [value for value in values if not is_valid(value)]
    except Exception:  # the schema refers to nothing
        wrong = values
    assert [value for value in wrong if accepts(compiled, json.dumps(value))] == []


def test_a_oneof_that_can_be_told_apart_is_supported(backend):
    schema = {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, kind: {"type": "integer"}},
                "required": ["kind", kind],
            }
            for kind in ("cat", "dog")
        ]
    }
    compiled = ALL_BYTES[backend.name].compile(GrammarSpec("json", json.dumps(schema)))
    assert accepts(compiled, '{"kind": "dog", "dog": 1}')
    assert not accepts(compiled, '{"kind": "dog", "cat": 1}')


INVALID = {
    "no regex": ("regex", "(a", "parenthes|unclosed"),
    "no json": ("json", '{"type": ', "not valid JSON"),
    "half a character": ("json", '{"const": "\\ud800"}', "surrogate"),
    "too deep": ("json", '{"items": ' * 65 + "{}" + "}" * 65, "64 deep"),
    "much too deep": ("json", '{"items": ' * 50_000 + "{}" + "}" * 50_000, "64 deep"),
    "no choices": ("choice", "[]", "at least one text"),
    "choice of numbers": ("choice", '["a", 1]', "list of texts; 1 is not a text"),
    "no grammar": ("grammar", "", "Empty|no rule"),
    "no rule": ("grammar", "root ::= other", "other|not defined"),
    "no end": ("json", '{"$ref": "#"}', "allows no text|NoExtension|Circular"),
    "circle": ("grammar", "root ::= root", "allows no text|NoExtension"),
    "parentheses": ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "limit|recursion"),
    "no tag": ("structural_tag", "{}", "format|structures"),
    "type": ("json", '{"type": "foo"}', "foo"),
    "keyword": ("json", '{"properties": {"a": {"not": {"multipleOf": 2}}}}', '"?not'),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_wrong_is_named(backend, name):
    kind, text, message = INVALID[name]
    with pytest.raises(GrammarError, match=message) as caught:
        backend.compile(GrammarSpec(kind, text))
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 500
    assert "/project/" not in caught.value.message


def test_white_space(backend):
    def compiled(any_whitespace):
        spec = GrammarSpec("json", '{"type": "array"}', any_whitespace=any_whitespace)
        return ALL_BYTES[backend.name].compile(spec)

    for text in ("[1, 2]", "[\n  1,2 ]"):
        assert accepts(compiled(True), text)
    assert accepts(compiled(False), "[1, 2]")
    assert not accepts(compiled(False), "[\n  1,2 ]")


def test_a_structural_tag(backend):
    tag = {
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    compiled = ALL_BYTES[backend.name].compile(GrammarSpec("structural_tag", json.dumps(tag)))
    assert accepts(compiled, "call <f>12</f> now")
    assert not accepts(compiled, "call <f>a</f> now")
    assert not accepts(compiled, 'call <f>"a"</f> now')


def test_a_structural_tag_s_schemas_are_looked_at(vocabulary):
    schema = {"type": "array", "uniqueItems": True}
    for tag in (
        {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]},
        {
            "type": "structural_tag",
            "format": {"type": "tag", "begin": "<f>", "end": "</f>",
                       "content": {"type": "json_schema", "json_schema": schema}},
        },
    ):  # fmt: skip
        for backend in ALL_BYTES.values():
            with pytest.raises(GrammarError, match="uniqueItems"):
                backend.compile(GrammarSpec("structural_tag", json.dumps(tag)))


def test_lark_is_for_llguidance():
    spec = GrammarSpec("grammar", 'start: "a" | "b"')
    with pytest.raises(GrammarError, match="EBNF"):
        ALL_BYTES["xgrammar"].compile(spec)
    assert accepts(ALL_BYTES["llguidance"].compile(spec), "b")


@pytest.mark.parametrize("token", ["<[10]>", "!<[10]>", "<think>"])
@pytest.mark.parametrize("name", ALL_BYTES)
def test_tokens_of_llama_cpp_are_refused_by_name(name, token):
    text = f'root ::= [<\\]"] "a" {token}'
    with pytest.raises(GrammarError, match=rf"names a token, {re.escape(token)}, .*in quotes"):
        ALL_BYTES[name].compile(GrammarSpec("grammar", text))
    quoted = GrammarSpec("grammar", f'root ::= "\\"{token}" [<{token[-1]}]  # {token}')
    assert accepts(ALL_BYTES[name].compile(quoted), f'"{token}>')


def test_limits_while_matching_are_errors_not_ends():
    """llguidance would then allow only a stop token, as if the answer were complete."""
    grammar = ALL_BYTES["llguidance"].compile(GrammarSpec("regex", "((a{0,99}){0,99}){0,99}b"))
    state = grammar.start()

    def go_on():
        while True:
            assert state.accept_tokens(b"a") == 1
            allowed(state, 257)

    with pytest.raises(GrammarError, match="llguidance"):
        go_on()


@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.sentencepiece])
def test_small_tokenizers(make):
    tokenizer = make()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer) + 3, [tokenizer.eos_token_id])
    assert vocabulary.size == len(tokenizer) + 3
    for special in (*tokenizer.all_special_ids, vocabulary.size - 1):
        assert vocabulary.token_bytes[special] == b""
    for backend in BACKENDS:
        made = backend(vocabulary)
        made.compile(GrammarSpec("regex", "a[ab]"))  # sentencepiece puts a space before its "a"
        compiled = made.compile(GrammarSpec("choice", '[" ab", "é\\n"]'))
        for text in (" ab", "é\n"):
            tokens = []
            for byte in text.encode():
                tokens.append(vocabulary.token_bytes.index(bytes([byte])))
            tokens.append(tokenizer.eos_token_id)
            assert compiled.start().accept_tokens(tokens) == len(tokens)
        assert compiled.start().forced_tokens(9) == []
        grammar = compiled.start()
        grammar.accept_tokens([vocabulary.token_bytes.index(b" ")])
        forced = b"".join(vocabulary.token_bytes[t] for t in grammar.forced_tokens(9))
        assert forced == b"ab"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.sentencepiece])
def test_the_text_of_a_special_token_is_text(make, backend):
    """In a grammar that has it as text; the tokenizer would read the token."""
    tokenizer = make()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    compiled = backend(vocabulary).compile(GrammarSpec("choice", '["a<s>b</s></s>"]'))
    grammar, text = compiled.start(), b""
    while (found := allowed(grammar, vocabulary.size)) != [tokenizer.eos_token_id]:
        assert grammar.accept_tokens(found[:1]) == 1
        text += vocabulary.token_bytes[found[0]]
    assert text == b"a<s>b</s></s>"


def thinks_then_calls(begin):
    """Return a structural tag: maybe <s>text<s>, maybe a line feed, then `begin`a</s>."""

    def tag(begin, content, end):
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    parts = [
        {"type": "optional", "content": tag("<s>", {"type": "any_text"}, "<s>")},
        {"type": "optional", "content": {"type": "const_string", "value": "\n"}},
        tag(begin, {"type": "const_string", "value": "a"}, "</s>"),
    ]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    return GrammarSpec("structural_tag", json.dumps(tag))


@pytest.mark.parametrize("padding", [0, 23, 24])
def test_a_stop_token_in_a_grammar(padding):
    """It is allowed where the grammar has it, and only there, and ends the answer."""
    tokenizer = small_tokenizers.byte_level()
    size = len(tokenizer) + padding
    bos, eos = small_tokenizers.BOS, small_tokenizers.EOS
    vocabulary = Vocabulary.from_tokenizer(tokenizer, size, [eos])
    compiled = LLGuidanceBackend(vocabulary).compile(thinks_then_calls("<s>!"))
    grammar = compiled.start()
    assert allowed(grammar, size) == [10, bos]
    assert grammar.accept_tokens([bos, 65, bos]) == 3
    assert allowed(grammar, size) == [10, bos]  # the rest may begin with an empty text
    assert grammar.accept_tokens([eos]) == 0
    assert grammar.forced_tokens(9) == []  # of a special token, which is no text
    assert grammar.accept_tokens([bos]) == 1
    assert grammar.forced_tokens(9) == [33, 97]
    assert grammar.accept_tokens([33, 97]) == 2
    assert allowed(grammar, size) == [eos]
    assert grammar.forced_tokens(9) == []
    for _ in range(2):
        assert grammar.accept_tokens([eos, 97]) == 1
        assert grammar.is_terminated
        assert allowed(grammar, size) == [eos]
        grammar.rollback(1)
        assert not grammar.is_terminated
        assert allowed(grammar, size) == [eos]


def test_tokenizers_without_bytes_are_refused():
    tokenizer = small_tokenizers.word_piece()
    with pytest.raises(GrammarError, match="fixed bytes"):
        Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [0])


def test_a_model_without_a_stop_token_is_refused():
    tokenizer = small_tokenizers.byte_level()
    tokenizer.eos_token_id = None
    with pytest.raises(GrammarError, match="stop token"):
        Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [])


WITHOUT = """
import json, sys
from pathlib import Path

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "xgrammar"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
from octavo.messages import GrammarSpec
from octavo.structured_output.client import HelperSetup
from octavo.structured_output.process import _make_backend

backend = _make_backend(HelperSetup("llguidance", sys.argv[1], 512, [2], 2**30))
for kind, text in json.loads(sys.argv[2]):
    backend.compile(GrammarSpec(kind, text)).start().forced_tokens(8)
print("done")
"""


def test_llguidance_needs_no_other_library():
    tag = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
    grammars = [(kind, text) for kind, text, _, _ in GRAMMARS.values()]
    grammars.append(("structural_tag", json.dumps(tag)))
    command = [sys.executable, "-c", WITHOUT, STORIES, json.dumps(grammars)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_what_llguidance_reads_wrongly_is_refused():
    """It allows 2 between 2 and 2.5."""
    for spec in (
        GrammarSpec("json", '{"exclusiveMinimum": 2, "allOf": [{"maximum": 2.5}]}'),
        GrammarSpec("json", '{"exclusiveMaximum": 2, "minimum": 1.5}'),
    ):
        with pytest.raises(GrammarError, match="not supported"):
            ALL_BYTES["llguidance"].compile(spec)


def test_an_object_may_have_a_thousand_optional_properties():
    properties = {f"p{i}": {"type": "integer"} for i in range(1000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    compiled = ALL_BYTES["llguidance"].compile(GrammarSpec("json", json.dumps(schema)))
    assert accepts(compiled, '{"p0": 1, "p999": 1}')
