"""Analysis of JSON schemas that several backends need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from octavo.errors import GrammarError

MAX_DEPTH = 64
"""Maximum nesting of lists and objects."""

# Maximum number of schemas of a oneOf, and of pairs of schemas in them, that are compared.
_MAX_BRANCHES, _MAX_PAIRS = 32, 50_000

# Keywords with schemas: as values of an object, in a list, or alone.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "additionalItems",
)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        GrammarError: the text is not JSON, nested too deeply, or has strings of invalid Unicode.
    """
    try:
        value = json.loads(text)
        text.encode()
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _too_deep() from None
    except UnicodeEncodeError:
        raise GrammarError(
            "The grammar has a string that is not valid Unicode: it holds half of a surrogate "
            "pair, such as \\ud800."
        ) from None
    except ValueError as error:
        raise GrammarError(f"The grammar is not valid JSON: {error}.") from None
    return value


def parse_choices(text: str) -> list[str]:
    """Return the texts of a JSON list.

    Raises:
        GrammarError: the text is not a list, or the list is empty or contains a non-text value.
    """
    choices = parse_json(text)
    if not isinstance(choices, list) or not choices:
        raise GrammarError("choice must be a list with at least one text.")
    for choice in choices:
        if not isinstance(choice, str):
            raise GrammarError(f"choice must be a list of texts; {choice!r:.80} is not a text.")
    return choices


def check_depth(value: Any) -> None:
    """Reject a value that is nested too deeply.

    Raises:
        GrammarError: the value is nested more than `MAX_DEPTH` deep.
    """
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        values = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for inner in values for v in inner if isinstance(v, (dict, list))]
        level = [v for v in level if v]
        if not level:
            return
    raise _too_deep()


def subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas directly inside of a schema."""
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from schema[key].values()
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    for key in _SINGLE:
        if isinstance(schema.get(key), dict):
            yield schema[key]


def schemas_of(root: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema, those inside of it, and the targets of its local references."""
    todo, seen = [root], set[int]()
    while todo:
        value = todo.pop()
        if not isinstance(value, dict) or id(value) in seen:
            continue
        seen.add(id(value))
        todo += subschemas(value)
        if "$ref" in value:
            todo.append(refer(value["$ref"], root))
        yield value


def refer(reference: Any, root: Any) -> Any:
    """Return the target of a reference within a document; None if it does not exist."""
    if reference == "#":
        return root
    found = root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def counts_repeated(schema: dict[str, Any]) -> bool:
    """Return True if a property that is written twice could count as two of `minProperties`.

    Backends count the written properties.
    """
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    known = len({str(name) for name in required}) if isinstance(required, list) else 0
    return bool(
        isinstance(least, (int, float))
        and least > max(1, known)
        and (schema.get("additionalProperties", True) is not False or "patternProperties" in schema)
    )


def are_disjoint(branches: list[Any], root: Any) -> bool:
    """Return True if it is provable that no value satisfies two of the schemas."""
    return len(branches) <= _MAX_BRANCHES and _Exclusion(root).all_exclude(branches)


class _Exclusion:
    """Comparison of the schemas of one document; each schema and pair is examined once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[tuple[int, int], bool] = {}
        self._read: dict[int, tuple[set[str] | None, set[str] | None]] = {}

    def all_exclude(self, branches: list[Any]) -> bool:
        """Return True if each schema excludes each other one."""
        return all(self._excludes(a, b) for i, a in enumerate(branches) for b in branches[:i])

    def _excludes(self, a: Any, b: Any) -> bool:
        a, b = self._resolve(a), self._resolve(b)
        if not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        pair = (id(a), id(b))
        if pair not in self._found:
            self._found[pair] = False  # a schema inside of itself: unknown
            if len(self._found) > _MAX_PAIRS:
                return False
            self._found[pair] = self._compare(a, b)
        return self._found[pair]

    def _compare(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        (types_a, values_a), (types_b, values_b) = (
            self._types_and_values(a),
            self._types_and_values(b),
        )
        if types_a is not None and types_b is not None and types_a.isdisjoint(types_b):
            return True
        if values_a is not None and values_b is not None:
            return values_a.isdisjoint(values_b)
        if types_a != {"object"} or types_b != {"object"}:
            return False
        properties_a, properties_b = a.get("properties"), b.get("properties")
        required_a, required_b = a.get("required"), b.get("required")
        if not (isinstance(properties_a, dict) and isinstance(properties_b, dict)):
            return False
        if not (isinstance(required_a, list) and isinstance(required_b, list)):
            return False
        names = {k for k in required_b if isinstance(k, str)}
        return any(
            self._excludes(properties_a[key], properties_b[key])
            for key in required_a
            if isinstance(key, str) and key in names and key in properties_a and key in properties_b
        )

    def _types_and_values(self, schema: dict[str, Any]) -> tuple[set[str] | None, set[str] | None]:
        if id(schema) not in self._read:
            self._read[id(schema)] = (_types(schema), _values(schema))
        return self._read[id(schema)]

    def _resolve(self, schema: Any) -> Any:
        """Return the target of a schema's reference; other keywords do not matter here."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            target = refer(schema["$ref"], self._root)
            if target is None:
                break
            schema = target
        return schema


def _types(schema: dict[str, Any]) -> set[str] | None:
    named = schema.get("type")
    if named is None:
        values = _values(schema)
        return None if values is None else {type_of(json.loads(v)) for v in values} | {"number"}
    types = {t for t in (named if isinstance(named, list) else [named]) if isinstance(t, str)}
    return types | {"integer", "number"} if types & {"integer", "number"} else types


def _values(schema: dict[str, Any]) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    # 1 and 1.0 are the same number.
    return {json.dumps(float(v) if _is_small(v) else v, sort_keys=True) for v in values}


def type_of(value: Any) -> str:
    """Return JSON schema's name of a value's type; "integer" for whole numbers."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {
        int: "integer",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names[type(value)]


def _is_small(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**53


def _too_deep() -> GrammarError:
    return GrammarError(f"The grammar is nested more than {MAX_DEPTH} deep; flatten it.")
