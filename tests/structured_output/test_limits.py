"""Bounds on the sizes of grammars: each rejects its excess, and none hinders honest ones."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from octavo.sampling_params import MAX_GRAMMAR_NBYTES
from octavo.structured_output.client import Compile, HelperSetup
from octavo.structured_output.limits import check_size
from octavo.structured_output.llguidance_backend import LLGuidanceBackend
from octavo.structured_output.process import GrammarServer
from octavo.structured_output.vocabulary import Vocabulary
from tests.structured_output.large_grammars import HONEST, LARGE
from tests.structured_output.toys import STOP, ToyBackend


def schema(value):
    return GrammarSpec("json", json.dumps(value))


def ebnf(text):
    return GrammarSpec("grammar", text)


def refs(count):
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": chain, "$ref": "#/$defs/d0"}


def branches(count, names):
    return {"oneOf": [{"required": [f"n{i}" for i in range(names)]}] * count}


def tags(count, triggers=1):
    tag = {"begin": "<a>", "schema": {}, "end": "</a>"}
    return GrammarSpec(
        "structural_tag", json.dumps({"structures": [tag] * count, "triggers": ["<"] * triggers})
    )


TOO_LARGE = [
    # Regular expressions
    (GrammarSpec("regex", "a?" * 200_000), "65 optional parts in a row; at most 64"),
    (GrammarSpec("regex", "(x*y{0,9}z??)" * 22), "65 optional parts in a row; at most 64"),
    (GrammarSpec("regex", "((a{100}){100}){100}"), "1000000 characters and names after"),
    (GrammarSpec("regex", "a{" + "9" * 5_000 + "}"), "999999999 characters and names after"),
    (GrammarSpec("regex", "(abc|[d-f]){,100000}"), "400000 characters and names after"),
    (GrammarSpec("regex", "b" * 300_000), "300000 characters and names after"),
    (GrammarSpec("regex", f"[{'a' * 2_000}]{{300}}"), "606325 characters in classes after"),
    (GrammarSpec("regex", "a|" * 20_000), "more than 20000 texts, classes, names, groups"),
    (GrammarSpec("regex", "(" * 20_001), "more than 20000 texts, classes, names, groups"),
    # Grammars
    (ebnf("".join(f"r{i} ::= r{i + 1}\n" for i in range(2_001))), "2001 rules; at most 2000"),
    (ebnf("".join(f"r{i}: r{i + 1}\n" for i in range(2_001))), "2001 rules; at most 2000"),
    (ebnf("root ::= " + '"a"? ' * 65), "65 optional parts in a row"),
    (ebnf('root ::= (("a"{1,999} "b"){1,999})'), "999000 characters and names after"),
    (ebnf("start: " + '"a"? ' * 65), "65 optional parts in a row"),
    (ebnf('start: (("a"~1..999) "b")~999'), "999000 characters and names after"),
    (ebnf("start: /(a{1000}){1000}/"), "1000000 characters and names after"),
    (ebnf("start: " + "a b\n" * 20_000), "more than 20000 texts, classes, names, groups"),
    # Choices
    (
        GrammarSpec("choice", json.dumps(["a"] * 30_001)),
        "30001 choices or values of enum and const",
    ),
    (
        GrammarSpec("choice", json.dumps(["a" * 2**18, "b"])),
        "262145 characters of choices, of enum",
    ),
    # JSON schemas
    (schema({"items": [{}] * 8_000}), "8001 schemas; at most 8000"),
    (schema({"properties": {f"p{i}": {} for i in range(5_001)}}), "5001 properties of an object"),
    (schema({"items": {"required": ["a"] * 10_001}}), "10001 required names; at most 10000"),
    (schema({"anyOf": [{}] * 2_001}), "2001 branches in anyOf; at most 2000"),
    (schema(branches(30, 60)), "54000 branches in oneOf times their required names"),
    (schema({"not": {"enum": list(range(30_001))}}), "30001 choices or values of enum and const"),
    (schema({"const": {"a": "b" * 2**18}}), "characters of choices, of enum and const"),
    (schema({"allOf": [{"pattern": "a"}] * 1_001}), "1001 patterns; at most 1000"),
    (schema({"patternProperties": {f"a{i}": {} for i in range(1_001)}}), "1001 patterns"),
    (schema({"items": {"pattern": "(a{1000}){1000}"}}), "1000000 characters and names after"),
    (schema(refs(201)), "201 references in a row; at most 200"),
    # Structural tags
    (tags(2_001), "2001 tags; at most 2000"),
    (tags(1, triggers=501), "501 triggers; at most 500"),
    (
        GrammarSpec("structural_tag", '{"format": {"type": "regex", "pattern": "a{1000000}"}}'),
        "1000000 characters and names after",
    ),
    (
        GrammarSpec(
            "structural_tag", '{"format": {"type": "grammar", "grammar": "root ::= [a]{1000000}"}}'
        ),
        "1000000 characters and names after",
    ),
]


@pytest.mark.parametrize(("spec", "message"), TOO_LARGE, ids=[m for _, m in TOO_LARGE])
def test_bounds(spec, message):
    with pytest.raises(GrammarError, match=r"^The grammar is too large: it has ") as error:
        check_size(spec)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_object"),
        GrammarSpec("regex", "a?" * 64 + "b" + "c?" * 64),
        GrammarSpec("regex", r"\(?" + "[?*+{}()|]{1,1000}" * 10 + r"\{9999999\}"),
        GrammarSpec("regex", "(ab){1,50000}"),
        ebnf("root ::= a # " + '"a"? ' * 65 + '\na ::= "' + "?*" * 1_000 + '" [?*{9999999}]'),
        ebnf('?start: "a"? "b" // ' + '"a"? ' * 65 + '\n!b: /a?\\/b/ "{9999999}"'),
        schema({"type": "array", "minItems": 10**9, "items": {"type": "array", "maxItems": 10**9}}),
        schema({"type": "string", "maxLength": 2**31 - 1}),
        schema({"properties": {"enum": {}, "pattern": {"description": "a{9999999}"}}}),
        schema({"examples": [{"items": [{}] * 20_000}], "default": [{}] * 20_000}),
        schema(refs(200)),
        schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        schema({"pattern": 5, "required": 5, "enum": {}, "items": True, "anyOf": [5], "$ref": []}),
    ],
)
def test_what_is_within_the_bounds(spec):
    check_size(spec)


@pytest.fixture(scope="module")
def backend():
    tokens = [bytes([i]) for i in range(256)] + [b""]
    return LLGuidanceBackend(Vocabulary(tokens, [256], lambda text: list(text.encode())))


@pytest.mark.parametrize("name", HONEST)
def test_honest_grammars_compile(name, backend):
    check_size(HONEST[name])
    backend.compile(HONEST[name])


def test_large_grammars_are_counted_quickly():
    for name, spec in LARGE.items():
        assert len(spec.text.encode()) <= MAX_GRAMMAR_NBYTES, name
        began = time.process_time()
        with contextlib.suppress(GrammarError):
            check_size(spec)
        assert time.process_time() - began < 3.0, name  # about 10 ms; hours if it were quadratic


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 250_000, "[" * 500_000, "{1" * 250_000, "1" * 500_000]
)
@pytest.mark.parametrize("kind", ["regex", "root ::= ", "start: "])
def test_invalid_texts_take_linear_time(kind, text):
    spec = GrammarSpec("regex", text) if kind == "regex" else ebnf(kind + text)
    began = time.process_time()
    with contextlib.suppress(GrammarError):
        check_size(spec)
    assert time.process_time() - began < 3.0  # about 10 ms; minutes if it were quadratic


def test_a_grammar_process_refuses_it_before_its_library_reads_it():
    backend = ToyBackend()
    server = GrammarServer(backend, HelperSetup("xgrammar", "", 40, [STOP], 2**30))
    answer = server._compile(Compile(0, GrammarSpec("regex", "a?" * 65)))
    assert "65 optional parts in a row" in answer.error
    assert backend.compiled == []
