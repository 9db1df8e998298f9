"""Schemas with keywords that no backend has, checked by a validator."""

from __future__ import annotations

import itertools
import json
import time

import jsonschema
import pytest

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from octavo.structured_output.json_schema import are_disjoint
from tests.structured_output.test_backends import ALL_BYTES, accepts

SCALARS = [None, True, False, 0, 1, 2, 1.5, "", "x", "xy", "xyz", "z"]
OBJECTS = [
    dict(zip(names, values, strict=True))
    for names in ("a", "b", "ab", "c")
    for values in itertools.product(["x", 1, None, ""], repeat=len(names))
]
VALUES = [*SCALARS, {}, *OBJECTS, [], *([v] for v in SCALARS), [1, "x"], ["x", 1], ["x", "x", 1]]
OBJECT = {"type": "object", "properties": {"a": True, "b": True}}
# Rewritten schemas; the grammar allows exactly the valid ones of `VALUES`.
EXACT = [
    {"not": {"type": ["string", "null"]}},
    {"not": {"enum": ["x", "xy", "", None, True]}},
    {"type": "string", "not": {"const": "xy"}},
    {"type": "string", "not": {"minLength": 2}},
    {"type": "integer", "not": {"minimum": 1}},
    {"not": {"type": "object", "required": ["a", "b"]}},
    {"type": "object", "not": {"properties": {"a": {"type": "string", "minLength": 1}}}},
    {"not": {"anyOf": [{"type": "string"}, {"type": "array"}, {"not": {"required": ["a"]}}]}},
    {"not": {"allOf": [{"type": "object"}, {"required": ["a"]}]}},
    {"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "string", "maxLength": 2}}},
    {"not": {}},
    {"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 2}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], **OBJECT},
    {"oneOf": [True, True, {"type": "string"}]},
    {"oneOf": [True, {"type": "string"}, False]},
    {"type": "array", "maxItems": 2.0, "uniqueItems": False, "then": False, "maxContains": 0},
    {"oneOf": [{"type": "number"}, {"type": ["number", "null"]}, {"type": "string"}]},
    {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {
        kind: {"properties": {"a": {"const": kind}}, "required": ["a"], "type": "object"}
        for kind in "xy"}},
    {"if": {"type": "string"}, "then": {"maxLength": 1}},
    {"if": {"type": "object", "required": ["a"]}, "then": {"required": ["b"]},
     "else": {"not": {"type": "array"}}},
    {**OBJECT, "if": {"properties": {"a": {"const": "x"}}, "required": ["a"]},
     "then": {"properties": {"b": {"type": "integer"}}}, "else": {"required": ["b"]}},
    {"if": True, "then": {"type": "string"}, "else": False},
    {"dependentRequired": {"a": ["b"]}},
    {**OBJECT, "dependentRequired": {"a": ["b"], "b": ["a"]}},
    {**OBJECT, "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
    {**OBJECT, "dependencies": {"a": ["b"]}},
    {"type": "array", "maxItems": 3, "contains": {"type": "integer"}},
    {"type": "array", "maxItems": 2, "contains": {"const": "x"}, "minContains": 0},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    {"propertyNames": {"enum": ["a", "c"]}, "additionalProperties": {"type": "string"}},
    {"propertyNames": {"const": "a"}, "required": ["a"]},
    {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": True, "properties": {"a": {"type": "null"}}},
    {**OBJECT, "unevaluatedProperties": False},
    {"properties": {"a": True}, "unevaluatedProperties": {"type": "string"}},
    {"additionalProperties": {"type": "null"}, "unevaluatedProperties": False},
    {"type": "array", "prefixItems": [True], "unevaluatedItems": {"type": "integer"}},
    {"items": {"type": "string"}, "unevaluatedItems": False},
]  # fmt: skip
# Schemas without an exact rewriting; no backend accepts them.
REFUSED = [
    ({"not": {"type": "integer"}}, "not"),
    ({"not": {"pattern": "x"}}, "not"),
    ({"not": {"uniqueItems": True}}, "not"),
    ({"not": {"enum": [1]}}, "not"),
    ({"if": {"format": "date", "multipleOf": 2}, "then": False}, "if"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"type": "array", "maxItems": 2, "contains": {}, "maxContains": 1}, "ontains"),
    ({"not": {"properties": {"a": {"const": "x"}}}, "unevaluatedProperties": False}, "not"),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames|maxLength"),
    (
        {"type": "object", "properties": {"a": True}, "propertyNames": {"const": "a"}},
        "propertyNames",
    ),
    ({"type": "array", "contains": True, "unevaluatedItems": False}, "contains"),
    (
        {"dependentRequired": {name: ["b"] for name in "cdefghij"}, "type": "object"},
        "dependentRequired",
    ),
]


@pytest.mark.parametrize("schema", EXACT, ids=lambda s: json.dumps(s)[:60])
def test_what_is_rewritten_means_the_same(schema):
    draft = jsonschema.Draft7Validator if "dependencies" in schema else None
    is_valid = (draft or jsonschema.Draft202012Validator)(schema).is_valid
    valid = [is_valid(value) for value in VALUES]
    spec = GrammarSpec("json", json.dumps(schema), additional_properties=True)
    if not any(valid):
        with pytest.raises(GrammarError, match="nsatisfiable"):
            ALL_BYTES["llguidance"].compile(spec)
        return
    compiled = ALL_BYTES["llguidance"].compile(spec)
    judged = zip(VALUES, valid, strict=True)
    assert [v for v, right in judged if accepts(compiled, json.dumps(v)) != right] == []


@pytest.mark.parametrize(("schema", "name"), REFUSED, ids=lambda v: json.dumps(v)[:60])
@pytest.mark.parametrize("backend", ALL_BYTES)
def test_what_has_no_exact_rewriting_is_refused_by_name(backend, schema, name):
    with pytest.raises(GrammarError, match=name):
        ALL_BYTES[backend].compile(GrammarSpec("json", json.dumps(schema)))


@pytest.mark.parametrize("backend", ALL_BYTES)
def test_unknown_formats_are_annotations(backend):
    schema = {"type": "string", "format": "phone number"}
    compiled = ALL_BYTES[backend].compile(GrammarSpec("json", json.dumps(schema)))
    assert accepts(compiled, '"x"')
    compiled = ALL_BYTES[backend].compile(
        GrammarSpec("json", json.dumps(schema | {"format": "date"}))
    )
    assert not accepts(compiled, '"x"')


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "uri-reference",
            [
                "",
                "/a/b?c=%20#d",
                "//u:p@x.org:80/",
                "//[::1]/",
                "http://x/a:b",
                "a/b:c",
                "mailto:x",
            ],
            ["a b", "1:b", "//a@b@c/", "//x:y/", "%2", "a#b#c", "\\\\x"],
        ),
        (
            "uri-template",
            ["", "/a/{b}", "{?x,y*}{+p:3}", "%20{a.b}é"],
            ["{a", "a}", "{}", "{a b}", "<"],
        ),
    ],
)
def test_formats_that_llguidance_does_not_know(name, right, wrong):
    spec = GrammarSpec("json", json.dumps({"type": "string", "format": name}))
    compiled = ALL_BYTES["llguidance"].compile(spec)
    assert [t for t in right if not accepts(compiled, json.dumps(t, ensure_ascii=False))] == []
    assert [t for t in wrong if accepts(compiled, json.dumps(t, ensure_ascii=False))] == []


@pytest.mark.parametrize("backend", ALL_BYTES)
def test_strict_refuses_unknown_formats(backend):
    for text, spec in (("date", '"2020-01-02"'), ("phone number", None)):
        schema = {"$defs": {"a": {"format": text, "type": "string"}}, "$ref": "#/$defs/a"}
        grammar = GrammarSpec("json", json.dumps(schema), strict=True)
        if spec is not None:
            assert accepts(ALL_BYTES[backend].compile(grammar), spec)
            continue
        with pytest.raises(GrammarError, match="format 'phone number' cannot be enforced"):
            ALL_BYTES[backend].compile(grammar)


PERSON = {
    "$defs": {"Pet": {"type": "object", "properties": {"kind": {"type": "string"}}}},
    "type": "object",
    "properties": {"name": {"type": "string"}, "pet": {"$ref": "#/$defs/Pet"}},
    "required": ["name"],
}
ADDITIONAL = [
    (PERSON, ['{"name": "x", "pet": {"kind": "y"}}'], ['{"name": "x", "age": 1}',
                                                       '{"name": "x", "pet": {"age": 1}}']),
    ({"anyOf": [PERSON["$defs"]["Pet"], {"type": "null"}]}, ['{"kind": "x"}'], ['{"age": 1}']),
    ({"type": "array", "prefixItems": [{"type": "integer"}]}, ["[1]"], ["[1, 2]"]),
    ({"type": "object"}, ['{"age": 1}'], []),
]  # fmt: skip


@pytest.mark.parametrize("backend", ALL_BYTES)
@pytest.mark.parametrize(("schema", "named", "additional"), ADDITIONAL)
def test_additional_properties_are_allowed_if_asked_for(backend, schema, named, additional):
    """The default is vLLM's, by xgrammar."""
    text = json.dumps(schema)
    compiled = ALL_BYTES[backend].compile(GrammarSpec("json", text))
    assert [t for t in named if not accepts(compiled, t)] == []
    assert [t for t in additional if accepts(compiled, t)] == []
    for other in ALL_BYTES.values():
        try:
            compiled = other.compile(GrammarSpec("json", text, additional_properties=True))
        except GrammarError:
            continue
        assert [t for t in [*named, *additional] if not accepts(compiled, t)] == []


def test_combined_schemas_allow_what_one_of_them_names():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "allOf": [{"required": ["b"]}],
        "if": {"properties": {"a": {"minimum": 3}}, "required": ["a"]},
        "then": {"properties": {"c": {"type": "null"}}},
    }
    compiled = ALL_BYTES["llguidance"].compile(GrammarSpec("json", json.dumps(schema)))
    for text in ('{"a": 3, "b": 1, "c": null}', '{"a": 1, "b": 1, "c": 2}'):
        assert accepts(compiled, text)
    for text in ('{"a": 3, "b": 1, "c": 2}', '{"b": 1, "d": 1}', '{"a": 1}'):
        assert not accepts(compiled, text)


def test_large_lists_of_required_properties_are_compared_in_linear_time():
    names = [f"property {i}" for i in range(40_000)]
    branch = {"type": "object", "properties": dict.fromkeys(names, True), "required": names}
    began = time.process_time()
    assert not are_disjoint([branch, json.loads(json.dumps(branch))], branch)
    assert time.process_time() - began < 2
