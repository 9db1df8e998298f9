"""What of a JSON schema xgrammar honours; the rest it would ignore without a word.

The check goes by what is known to work, measured against a validator: a keyword beside others that
are not known to work with it is refused, so that another backend gets the schema.
"""

from __future__ import annotations

import re
from typing import Any

from octavo.errors import RequestError
from octavo.structured_output.json_schema import PARAM, are_disjoint, check_depth, type_of

_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
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
_OF_TYPES = frozenset().union(*_KEYWORDS.values())
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
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)


def check_schema(schema: Any) -> None:
    """Refuses a schema with something in it that xgrammar would not honour.

    Raises:
        RequestError: names the keyword.
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


def check_pattern(pattern: str) -> None:
    """Refuses a regular expression with something in it that xgrammar would not honour.

    Raises:
        RequestError: names it.
    """
    in_class, i = False, 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif (char == "^" and i > 0) or (char == "$" and i < len(pattern) - 1):
            raise _refusal(f"{char} inside of the regular expression {pattern[:80]!r}")
        elif pattern.startswith(("(?=", "(?!", "(?<"), i):
            raise _refusal(f"{pattern[i : i + 3]}...) in the regular expression {pattern[:80]!r}")
        i += 1


def _check(schema: dict[str, Any], root: Any) -> list[Any]:
    """Checks a schema; returns those inside of it that count."""
    for key in _NEVER:
        if key in schema and schema[key] is not False:
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
            raise _refusal(f"{others[0]} beside {key}")
        return _check_combining(schema, key, root)
    types = schema.get("type")
    if types is None:
        if not constraints:
            return []
        # What it takes such a schema for; values of other types it does not generate.
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
    if "number" in types and "multipleOf" in schema:
        raise _refusal("multipleOf with numbers that are not whole")
    if "array" in types:
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
    if key == "oneOf" and not are_disjoint(value):
        raise _refusal("oneOf whose schemas may hold at once")
    return value


def _check_string(schema: dict[str, Any]) -> None:
    fixed = [key for key in ("pattern", "format") if key in schema]
    others = fixed[1:] + [key for key in ("minLength", "maxLength") if key in schema]
    if fixed and others:
        raise _refusal(f"{others[0]} beside {fixed[0]}")
    if isinstance(schema.get("pattern"), str):
        check_pattern(schema["pattern"])
    if "format" in schema and schema["format"] not in _FORMATS:
        raise _refusal(f"the format {schema['format']!r}"[:100])


def _check_object(schema: dict[str, Any]) -> list[Any]:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    names, additional = schema.get("propertyNames"), schema.get("additionalProperties")
    for key, value in (("properties", properties), ("patternProperties", patterns)):
        if not isinstance(value, dict):
            raise _refusal(f"{key} that is no object")
    required = schema.get("required", [])
    for name in required if isinstance(required, list) else []:
        if name not in properties:
            raise _refusal(f"required {str(name)[:80]!r}, which is not in properties")
    if patterns:
        if properties or len(patterns) > 1 or isinstance(additional, dict):
            raise _refusal("patternProperties beside other properties")
        for pattern in patterns:
            check_pattern(pattern)
    if names is not None:
        rest = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
        for key in rest:
            if schema.get(key, True) is not True:
                raise _refusal(f"propertyNames beside {key}")
        if not isinstance(names, dict) or not names.keys() <= _KEYWORDS["string"] | {"type"}:
            raise _refusal("propertyNames that are more than a string")
        _check_string(names)
    inner = [schema[k] for k in ("additionalProperties", "unevaluatedProperties") if k in schema]
    return [*properties.values(), *patterns.values(), *inner]


def _resolve(reference: Any, root: Any) -> Any:
    """What a reference points at."""
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


def _refusal(what: str) -> RequestError:
    return RequestError(
        f"xgrammar does not support {what}; leave it out, or let another backend be chosen.",
        PARAM,
    )
