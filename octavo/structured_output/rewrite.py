"""Rewrite JSON schemas to equivalent ones with fewer keywords, since no backend supports all.

`not`, `if`, `oneOf`, `dependentRequired`, `dependentSchemas`, `dependencies` and `contains` become
`anyOf` and `allOf` where that is exact. Elsewhere the keyword stays, and the backend rejects it by
name. Unknown formats are annotations, as in JSON schema; with `strict` they are rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.errors import GrammarError
from octavo.structured_output.json_schema import (
    are_disjoint,
    check_depth,
    refer,
    schemas_of,
    subschemas,
)

FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "uri-template"),
    }
)
"""Formats that are checked; all others are annotations."""
_TYPES = ("array", "boolean", "null", "number", "object", "string")
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "format", "deprecated", "readOnly"),
        *("writeOnly", "$comment", "$schema", "$defs", "definitions", "$id"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    }
)
# Type of a bound, the bound that contradicts it, and the difference between the two.
_BOUNDS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
_COUNTS = tuple(
    f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")
)
_CONSTRAINTS = frozenset(
    {
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const"),
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("required", "propertyNames", "minProperties", "maxProperties", "dependentRequired"),
        *("dependentSchemas", "dependencies", "items", "prefixItems", "additionalItems"),
        *("unevaluatedItems", "contains", "minItems", "maxItems", "uniqueItems"),
    }
)
_NAMING = ("properties", "patternProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_EVALUATING = frozenset(
    {
        *(*_IN_PLACE, "not", "if", "then", "else", "dependentSchemas", "dependencies"),
        *("$ref", "$dynamicRef", "$recursiveRef"),
    }
)
# Maximum number of alternatives of one schema, all keywords multiplied, and of new schemas.
_MAX_ALTERNATIVES, _MAX_SCHEMAS = 64, 5000
# Maximum length of a negated enum's texts: the opposite is a nested regular expression.
_MAX_CHARS = 300
# Maximum number of positions of the item of `contains`.
_MAX_POSITIONS = 16


class _NotExactError(Exception):
    """Schema without an exact opposite."""


def rewrite(root: Any, additional_properties: bool, strict: bool) -> None:
    """Rewrite a schema so that backends support more of it.

    Args:
        root: the schema, which is changed.
        additional_properties: allow properties and items that a schema neither names nor forbids.
        strict: reject a `format` that backends cannot enforce, instead of ignoring it.

    Raises:
        GrammarError: the schema is nested too deeply, or has such a format.
    """
    check_depth(root)
    if not isinstance(root, dict):
        return
    if strict:
        _check_formats(root)
    _Rewriter(root).run()
    _settle_additional(root, additional_properties)


def _check_formats(root: dict[str, Any]) -> None:
    for schema in schemas_of(root):
        name = schema.get("format")
        if isinstance(name, str) and name not in FORMATS:
            raise GrammarError(
                f"The format {name[:80]!r} cannot be enforced, which strict requires; leave the "
                f"format or strict out, or use one of {', '.join(sorted(FORMATS))}."
            )


class _Rewriter:
    def __init__(self, root: dict[str, Any]) -> None:
        self._schemas, self._num_schemas = list(schemas_of(root)), 0
        # With an $id inside, references may have other targets than those that `refer` finds.
        has_ids = any("$id" in schema for schema in self._schemas if schema is not root)
        self._root = None if has_ids else root
        for schema in self._schemas:
            _simplify(schema)
        # New schemas would count as evaluated ones.
        self._is_evaluated = any(
            "unevaluatedProperties" in schema or "unevaluatedItems" in schema
            for schema in self._schemas
        )

    def run(self) -> None:
        """Rewrite all schemas of the document."""
        for schema in self._schemas:
            if not self._is_evaluated:
                _settle_names(schema)
            self._rewrite(schema)

    def _rewrite(self, schema: dict[str, Any]) -> None:
        left = _MAX_ALTERNATIVES
        for keyword in ("oneOf", "not", "if", *_DEPENDENT, "contains"):
            if keyword not in schema or (self._is_evaluated and keyword != "oneOf"):
                continue
            try:
                found = getattr(self, _METHODS[keyword])(schema, keyword)
            except _NotExactError:
                continue
            factors = [alternatives for alternatives in found if not _is_always_met(alternatives)]
            for alternatives in factors:
                left //= max(1, len(alternatives))
            if not left:
                return
            for name in _REMOVED.get(keyword, (keyword,)):
                schema.pop(name, None)
            for alternatives in factors:
                _add(schema, alternatives)

    def _one_of(self, schema: dict[str, Any], keyword: str) -> list[list[Any]]:
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise _NotExactError
        if are_disjoint(branches, self._root):
            return [branches]
        if self._is_evaluated:
            raise _NotExactError
        alternatives = []
        for i, branch in enumerate(branches):
            parts: list[Any] = [branch]
            for other in branches[:i] + branches[i + 1 :]:
                if not are_disjoint([branch, other], self._root):
                    parts.append(_any_of(self._negate(other)))
            alternatives.append({"allOf": parts} if len(parts) > 1 else branch)
        return [alternatives]

    def _not(self, schema: dict[str, Any], keyword: str) -> list[list[Any]]:
        return [_fitting(self._negate(schema[keyword]), schema)]

    def _if(self, schema: dict[str, Any], keyword: str) -> list[list[Any]]:
        condition = schema[keyword]
        if "then" not in schema and "else" not in schema:
            return []
        opposite = _fitting(self._negate(condition), schema)
        met = [condition, schema["then"]] if "then" in schema else [condition]
        return [
            [
                {"allOf": met},
                *({"allOf": [o, schema["else"]]} if "else" in schema else o for o in opposite),
            ]
        ]

    def _dependent(self, schema: dict[str, Any], keyword: str) -> list[list[Any]]:
        dependents = schema[keyword]
        if not isinstance(dependents, dict):
            raise _NotExactError
        found = []
        for name, wanted in dependents.items():
            if isinstance(wanted, list):
                wanted = {"required": wanted}
            absent = {"type": "object", "properties": {name: False}}
            present = {"allOf": [{"type": "object", "required": [name]}, wanted]}
            found.append(_fitting([_but("object"), absent, present], schema))
        return found

    def _contains(self, schema: dict[str, Any], keyword: str) -> list[list[Any]]:
        least, most = schema.get("minContains", 1), schema.get("maxItems")
        if "maxContains" in schema or "unevaluatedItems" in schema or least not in (0, 1):
            raise _NotExactError
        if least == 0:
            return []
        if not isinstance(most, int) or not 0 < most <= _MAX_POSITIONS:
            raise _NotExactError
        places = [
            {"type": "array", "prefixItems": [True] * i + [schema[keyword]], "minItems": i + 1}
            for i in range(most)
        ]
        return [_fitting([_but("array"), *places], schema)]

    def _negate(self, schema: Any, depth: int = 0) -> list[Any]:
        """Return schemas of which a value meets one exactly if it does not meet the given one.

        Raises:
            _NotExactError: the schema has no exact opposite, or one with too many schemas.
        """
        self._num_schemas += 1
        if self._num_schemas > _MAX_SCHEMAS or depth > 32:
            raise _NotExactError
        if isinstance(schema, bool):
            return [] if schema else [True]
        if not isinstance(schema, dict):
            raise _NotExactError
        found: list[Any] = []
        for keyword, value in schema.items():
            if keyword not in _ANNOTATIONS:
                found += self._negate_keyword(keyword, value, depth)
        if len(found) > _MAX_ALTERNATIVES:
            raise _NotExactError
        return found

    def _negate_keyword(self, keyword: str, value: Any, depth: int) -> list[Any]:
        if keyword == "type":
            types = set(value if isinstance(value, list) else [value])
            if "integer" in types and "number" not in types:
                raise _NotExactError
            return [_but(*types)]
        if keyword in _BOUNDS and isinstance(value, (int, float)) and not isinstance(value, bool):
            kind, other, away = _BOUNDS[keyword]
            if away and (not isinstance(value, int) or value + away < 0):
                raise _NotExactError
            return [{"type": kind, other: value + away}]
        if keyword == "required" and isinstance(value, list):
            return [{"type": "object", "properties": {name: False}} for name in value]
        if keyword == "properties" and isinstance(value, dict):
            return [
                {"type": "object", "required": [name], "properties": {name: opposite}}
                for name, inner in value.items()
                for opposite in self._negate(inner, depth + 1)
            ]
        if keyword in ("const", "enum"):
            return _negate_values([value] if keyword == "const" else value)
        if keyword == "not":
            return [value]
        if keyword == "$ref":
            return self._negate(refer(value, self._root), depth + 1)
        if keyword == "allOf" and isinstance(value, list):
            return [opposite for inner in value for opposite in self._negate(inner, depth + 1)]
        if keyword == "anyOf" and isinstance(value, list):
            return [{"allOf": [_any_of(self._negate(inner, depth + 1)) for inner in value]}]
        raise _NotExactError


_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
_METHODS = {
    "oneOf": "_one_of",
    "not": "_not",
    "if": "_if",
    "contains": "_contains",
    **dict.fromkeys(_DEPENDENT, "_dependent"),
}
_REMOVED = {"if": ("if", "then", "else"), "contains": ("contains", "minContains")}


def _simplify(schema: dict[str, Any]) -> None:
    """Remove keywords without effect from a schema, and write whole numbers as integers."""
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    for keyword, names in (("if", ("then", "else")), ("contains", ("minContains", "maxContains"))):
        if keyword not in schema:
            for name in names:
                schema.pop(name, None)
    for name in _COUNTS:
        value = schema.get(name)
        if isinstance(value, float) and value.is_integer():
            schema[name] = int(value)
    if schema.keys().isdisjoint(_EVALUATING):  # no schema beside these evaluates a part
        if "unevaluatedProperties" in schema:
            schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
        if "unevaluatedItems" in schema and "contains" not in schema:
            rest = "additionalItems" if isinstance(schema.get("items"), list) else "items"
            schema.setdefault(rest, schema.pop("unevaluatedItems"))


def _settle_names(schema: dict[str, Any]) -> None:
    """Replace `propertyNames` with a pattern or values, if the schema itself names nothing."""
    names, rest = schema.get("propertyNames"), schema.get("additionalProperties", True)
    if names is True:
        names = {}
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return
    limits = {key: value for key, value in names.items() if key not in (*_ANNOTATIONS, "type")}
    values = limits.get("enum", [limits["const"]] if "const" in limits else None)
    if limits and not schema.keys().isdisjoint(_NAMING):
        return
    if len(limits) == 1 and isinstance(values, list):
        schema["properties"] = {value: rest for value in values if isinstance(value, str)}
    elif list(limits) == ["pattern"] and "required" not in schema:
        schema["patternProperties"] = {limits["pattern"]: rest}
    elif limits or "format" in names:
        return
    del schema["propertyNames"]
    if limits:
        schema["additionalProperties"] = False


def _but(*types: str) -> dict[str, Any]:
    return {"type": [t for t in _TYPES if t not in types]}


def _any_of(alternatives: list[Any]) -> Any:
    if not alternatives:
        return False
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _is_always_met(alternatives: list[Any]) -> bool:
    return any(a is True or a == {} for a in alternatives)


def _fitting(alternatives: list[Any], schema: dict[str, Any]) -> list[Any]:
    """Return the alternatives except those that the type of a schema rules out."""
    types = schema.get("type")
    if types is None:
        return alternatives
    allowed = set(types if isinstance(types, list) else [types])
    allowed |= {"number", "integer"} if allowed & {"number", "integer"} else set()

    def fits(alternative: Any) -> bool:
        named = alternative.get("type") if isinstance(alternative, dict) else None
        return named is None or bool(allowed & set(named if isinstance(named, list) else [named]))

    return [a for a in alternatives if fits(a)]


def _add(schema: dict[str, Any], alternatives: list[Any]) -> None:
    """Require one of some schemas in addition to the keywords of a schema."""
    if "anyOf" not in schema and len(alternatives) > 1:
        schema["anyOf"] = alternatives
    else:
        schema["allOf"] = [*schema.get("allOf", []), _any_of(alternatives)]


def _negate_values(values: Any) -> list[Any]:
    """Return schemas that match all except the given values."""
    if not isinstance(values, list):
        raise _NotExactError
    texts = [value for value in values if isinstance(value, str)]
    found: list[Any] = []
    kinds = set()
    for value in values:
        if value is None:
            kinds.add("null")
        elif isinstance(value, bool):
            kinds.add("boolean")
        elif not isinstance(value, str):
            raise _NotExactError
    if sum(map(len, texts)) > _MAX_CHARS:
        raise _NotExactError
    if texts:
        kinds.add("string")
        found.append({"type": "string", "pattern": _pattern_of_others(texts)})
    if "boolean" in kinds:
        found += [{"const": v} for v in (True, False) if v not in [w for w in values if w is v]]
    return [_but(*kinds), *found]


def _pattern_of_others(texts: Iterable[str]) -> str:
    """Return a regular expression for every text except the given ones."""
    tree: dict[str, Any] = {}
    for text in set(texts):
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^{_others(tree)}$"


def _others(node: dict[str, Any]) -> str:
    chars = sorted(char for char in node if char)
    if not chars:
        return r"[\s\S]+"
    ways = [rf"[^{''.join(map(_escape, chars))}][\s\S]*"]
    ways += [_escape(char) + _others(node[char]) for char in chars]
    ways += [""] if "" not in node else []
    return f"(?:{'|'.join(ways)})"


def _escape(char: str) -> str:
    return char if char.isalnum() else f"\\u{{{ord(char):x}}}"


def _settle_additional(root: dict[str, Any], allowed: bool) -> None:
    """State for each schema whether it allows properties and items that it does not name."""
    todo, seen = [root], set[int]()
    joined = _joined(root)
    while todo:
        schema = todo.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        todo += subschemas(schema)
        todo.append(refer(schema.get("$ref"), root))
        if id(schema) in joined:
            continue
        parts = [schema] if _is_choice(schema) else _in_place([schema], root)
        if any(isinstance(p.get(k), dict) for p in parts for k in _NAMING):
            _settle_properties(schema, parts, allowed)
        if isinstance(schema.get("prefixItems"), list) and schema.keys().isdisjoint(
            ("items", "unevaluatedItems")
        ):
            schema["items"] = allowed


def _settle_properties(schema: dict[str, Any], parts: list[Any], allowed: bool) -> None:
    """State for a schema whether it allows properties that no combined schema names.

    Properties that only the combined schemas name are added to the schema.

    Args:
        schema: schema to modify, unless it already states this.
        parts: all schemas that apply to the same value, `schema` included.
        allowed: True to allow additional properties.
    """
    if not schema.keys().isdisjoint(("additionalProperties", "unevaluatedProperties")):
        return
    others = [part for part in parts if part is not schema]
    names = {
        name
        for part in parts
        for name in (*(part.get("properties") or ()), *(part.get("required") or ()))
    }
    properties = schema.get("properties", {})
    missing = dict.fromkeys(sorted(names - set(properties)), True)
    least = schema.get("minProperties", 0)
    is_open = (
        allowed
        or "propertyNames" in schema
        or any("additionalProperties" in p or "patternProperties" in p for p in others)
        or ("patternProperties" in schema and (missing or "minProperties" in schema))
        or not isinstance(least, (int, float))
        or least > len(properties) + len(missing)
    )
    if is_open and "patternProperties" in schema:
        missing = {}  # the missing names would have to match the patterns
    if missing:
        schema["properties"] = properties | missing
    if allowed or not is_open:
        schema["additionalProperties"] = allowed


def _in_place(todo: list[Any], root: Any) -> list[Any]:
    """Return schemas and all schemas that apply to the same values."""
    found, todo, seen = list[Any](), list(todo), set[int]()
    while todo:
        part = todo.pop()
        if id(part) not in seen and isinstance(part, dict):
            seen.add(id(part))
            found.append(part)
            todo += _beside(part, root)
    return found


def _beside(schema: dict[str, Any], root: Any) -> list[Any]:
    """Return the schemas in a schema that apply to the same value."""
    found = [inner for keyword in _IN_PLACE for inner in schema.get(keyword) or []]
    found += [schema[k] for k in ("if", "then", "else", "not") if k in schema]
    if isinstance(schema.get("dependentSchemas"), dict):
        found += schema["dependentSchemas"].values()
    return [*found, refer(schema.get("$ref"), root)]


def _is_choice(schema: dict[str, Any]) -> bool:
    """Return True if a schema only refers to others, of which one applies at a time."""
    parts = schema.keys() & _CONSTRAINTS
    return len(parts) == 1 and (
        not parts.isdisjoint(("anyOf", "oneOf", "$ref"))
        or ("allOf" in parts and len(schema["allOf"]) == 1)
    )


def combined(root: Any) -> list[Any]:
    """Return the schemas of a document that are combined with others for the same value."""
    found = list[Any]()
    for schema in schemas_of(root):
        if not _is_choice(schema):
            found += _beside(schema, root)
    return _in_place(found, root)


def _joined(root: dict[str, Any]) -> set[int]:
    """Return the ids of combined schemas and of all schemas inside of them.

    They cannot state which properties are additional, since others may name them.
    """
    joined, todo = set[int](), combined(root)
    while todo:
        schema = todo.pop()
        if isinstance(schema, dict) and id(schema) not in joined:
            joined.add(id(schema))
            todo += subschemas(schema)
            todo.append(refer(schema.get("$ref"), root))
    return joined
