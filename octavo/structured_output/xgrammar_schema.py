"""Check that xgrammar supports each keyword of a JSON schema; it ignores the rest silently.

The check accepts combinations that work, as measured against a validator. It rejects all others, so
that another backend receives the schema.
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.errors import GrammarError
from octavo.structured_output.json_schema import (
    are_disjoint,
    check_depth,
    counts_repeated,
    type_of,
)
from octavo.structured_output.regex import Mark, Set, max_repeat, parse, to_xgrammar_pattern

_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset({"pattern", "format"}),
    "integer": _NUMBER | {"multipleOf"},
    "number": _NUMBER,
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"}),
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "unevaluatedProperties",
        }
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
_LENGTHS = ("minLength", "maxLength")
_OF_TYPES = frozenset(_LENGTHS).union(*_KEYWORDS.values())
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_NEVER = (
    "not",
    "if",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
    "disallow",
    "divisibleBy",
)
_FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template"),
    }
)
# Beyond this the library ignores `multipleOf`.
_MAX_MULTIPLE = 1000
# In patterns; beyond 128 the library lets an earlier repeated part occur again after it.
_MAX_REPEAT = 100
# Characters that JSON has to escape, which the library does not do in patterns.
_ESCAPED = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))


def prepare_schema(schema: Any) -> None:
    """Reject a schema that xgrammar does not support; rewrite its patterns for xgrammar.

    Raises:
        GrammarError: a keyword is unsupported; the message names it.
    """
    check_depth(schema)
    todo, seen = [schema], {id(schema)}
    while todo:
        value = todo.pop()
        if not isinstance(value, dict):
            continue
        if value is not schema and "$id" in value:
            raise _refusal("$id inside of a schema")
        for inner in _check(value, schema):
            if id(inner) not in seen:
                seen.add(id(inner))
                todo.append(inner)


def _read_pattern(pattern: str) -> str:
    """Return a pattern of a schema in the library's syntax, without its `^` and `$`.

    Raises:
        GrammarError: the library would misread the pattern, or not escape the matched text.
    """
    tokens = parse(pattern)
    if max_repeat(tokens) > _MAX_REPEAT:
        raise _refusal(f"more than {_MAX_REPEAT} repeats in the pattern {pattern[:80]!r}")
    inside = tokens[tokens[:1] == [Mark("^")] : len(tokens) - (tokens[-1:] == [Mark("$")])]
    for mark in ("^", "$", "(?i)", "(?i:"):
        if Mark(mark) in inside:
            raise _refusal(f"{mark} inside of the regular expression {pattern[:80]!r}")
    for token in inside:
        if isinstance(token, Set) and any(
            first <= b and a <= last for first, last in _ESCAPED for a, b in token.ranges
        ):
            raise _refusal(
                f"the pattern {pattern[:80]!r}, which may match characters that JSON escapes "
                "(quotation marks, backslashes, control characters)"
            )
    return "^" + to_xgrammar_pattern(inside) + "$"


def _check(schema: dict[str, Any], root: Any) -> list[Any]:
    """Check a schema; return the relevant schemas inside of it."""
    for key in _NEVER:
        if key in schema and not (schema[key] is False and key in ("not", "uniqueItems")):
            raise _refusal(key)
    combining = [key for key in _COMBINING if key in schema]
    constraints = [key for key in schema if key in _OF_TYPES]
    if combining:
        key = combining[0]
        is_enum = key in ("enum", "const")
        others = (
            combining[1:] + constraints + (["type"] if "type" in schema and not is_enum else [])
        )
        if others:
            raise _refusal(f"{others[0]} together with {key}")
        return _check_combining(schema, key, root)
    types = schema.get("type")
    if types is None:
        if not constraints:
            return []
        # The library infers the type; it does not generate values of other types.
        if "properties" in schema or "additionalProperties" in schema:
            types = "object"
        elif "items" in schema or "prefixItems" in schema:
            types = "array"
        else:
            raise _refusal(f"{constraints[0]} without type")
    types = types if isinstance(types, list) else [types]
    if not types or any(not isinstance(t, str) or t not in _KEYWORDS for t in types):
        raise _refusal(f"the type {types!r}"[:100])
    inner: list[Any] = []
    if "string" in types:
        _check_string(schema)
    if "multipleOf" in schema:
        _check_multiple(schema, types)
    if "array" in types:
        if "maxItems" in schema and schema.keys().isdisjoint(("items", "unevaluatedItems")):
            raise _refusal("maxItems without items")
        if _is_negative(schema.get("minItems")):
            raise _refusal("a negative minItems")
        inner += [schema[k] for k in ("items", "unevaluatedItems") if k in schema]
        inner += schema["prefixItems"] if isinstance(schema.get("prefixItems"), list) else []
    if "object" in types:
        inner += _check_object(schema)
    return inner


def _check_combining(schema: dict[str, Any], key: str, root: Any) -> list[Any]:
    value = schema[key]
    if key == "$ref":
        return [_resolve(value, root)]
    if key in ("enum", "const"):
        types, values = schema.get("type"), value if key == "enum" else [value]
        if types is not None and isinstance(values, list):
            allowed = types if isinstance(types, list) else [types]
            for item in values:
                name = type_of(item)
                if name not in allowed and not (name == "integer" and "number" in allowed):
                    raise _refusal(f"a value in {key} that is not of its type {types!r}"[:100])
        return []
    if not isinstance(value, list) or not value:
        raise _refusal(f"{key} without schemas")
    if key == "allOf" and len(value) > 1:
        raise _refusal("allOf with several schemas")
    if key == "oneOf" and not are_disjoint(value, root):
        raise _refusal("oneOf whose schemas may hold at once")
    return value


def _check_multiple(schema: dict[str, Any], types: list[Any]) -> None:
    multiple = schema["multipleOf"]
    if "number" in types:
        raise _refusal("multipleOf with numbers that are not whole")
    if not isinstance(multiple, int) or not 0 < multiple <= _MAX_MULTIPLE:
        raise _refusal(f"multipleOf that is not a whole number up to {_MAX_MULTIPLE}")
    for key in sorted(_NUMBER & schema.keys()):
        raise _refusal(f"multipleOf together with {key}")


def _check_string(schema: dict[str, Any]) -> None:
    for key in _LENGTHS:
        if key in schema:  # the library lets control characters through
            raise _refusal(key)
    if "pattern" in schema and "format" in schema:
        raise _refusal("format together with pattern")
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _read_pattern(schema["pattern"])
    if "format" in schema and schema["format"] not in _FORMATS:
        raise _refusal(f"the format {schema['format']!r}"[:100])


def _check_object(schema: dict[str, Any]) -> list[Any]:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    names, additional = schema.get("propertyNames"), schema.get("additionalProperties")
    for key, value in (("properties", properties), ("patternProperties", patterns)):
        if not isinstance(value, dict):
            raise _refusal(f"{key} that is not an object")
    required = schema.get("required", [])
    for name in required if isinstance(required, list) else []:
        if name not in properties:
            raise _refusal(f"required {str(name)[:80]!r}, which is not in properties")
    if patterns:
        if properties or len(patterns) > 1 or isinstance(additional, dict):
            raise _refusal("patternProperties together with other properties")
        patterns = {_read_pattern(pattern): value for pattern, value in patterns.items()}
        schema["patternProperties"] = patterns
    rest = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
    if "maxProperties" in schema and names is None and schema.keys().isdisjoint(rest):
        raise _refusal("maxProperties without properties")
    if properties and (additional is True or additional == {}):
        raise _refusal("properties together with others of any kind")  # "\\u0061" next to "a"
    if isinstance(additional, dict) and any(
        json.dumps(name, ensure_ascii=False) != f'"{name}"' for name in properties
    ):
        raise _refusal("additionalProperties together with a name that JSON escapes")
    if counts_repeated(schema):
        raise _refusal("minProperties, where a property may occur twice")
    if names is not None:
        for key in rest:
            if schema.get(key, True) is not True:
                raise _refusal(f"propertyNames together with {key}")
        if not isinstance(names, dict) or not names.keys() <= {
            *_KEYWORDS["string"],
            *_LENGTHS,
            "type",
        }:
            raise _refusal("propertyNames that are more than a string")
        _check_string(names)
    inner = [schema[k] for k in ("additionalProperties", "unevaluatedProperties") if k in schema]
    return [*properties.values(), *patterns.values(), *inner]


def _resolve(reference: Any, root: Any) -> Any:
    """Return the target of a reference."""
    if reference == "#":
        return root
    found = root
    if not isinstance(reference, str) or not re.fullmatch(r"#(/[^~%/]+)+", reference):
        raise _refusal(f"the $ref {str(reference)[:80]!r}")
    for part in reference[2:].split("/"):
        if not isinstance(found, dict) or part not in found:
            raise _refusal(f"the $ref {reference[:80]!r}, which points nowhere")
        found = found[part]
    return found


def _is_negative(value: Any) -> bool:
    return isinstance(value, (int, float)) and value < 0


def _refusal(what: str) -> GrammarError:
    return GrammarError(
        f"xgrammar does not support {what}; leave it out, or let another backend be chosen."
    )
