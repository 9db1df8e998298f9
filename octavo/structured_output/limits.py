"""Bounds on the size of a grammar, checked before a library reads it.

Grammar processes have limits of time and memory (`compiler.py`), but a grammar that reaches them
has already used seconds of a processor. Counting finds most of those grammars in milliseconds. The
bounds were measured with both libraries; grammars for real use are far below them.

Texts are split into tokens and not parsed, so the counts of invalid grammars may be wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from octavo.structured_output.base import is_ebnf
from octavo.structured_output.json_schema import parse_choices, parse_json

MAX_TOKENS = 20_000
"""Maximum number of texts, classes, names, groups, repetitions and alternatives of a grammar or of
all patterns."""
MAX_EXPANDED = 2**18
"""Maximum number of characters, classes and names of a grammar or of all patterns, each times its
repetitions."""
MAX_OPTIONAL = 64
"""Maximum number of optional parts in a row; the work grows faster than their square."""
MAX_CLASS_WEIGHT = 500_000
"""Maximum weight of all classes: their characters times their repetitions; more if long."""
MAX_RULES = 2_000
"""Maximum number of rules of a grammar; this also bounds a chain of rules."""
MAX_LITERALS = 2**18
"""Maximum number of characters of all choices, of all values in enum and const, or of all tags."""
MAX_VALUES = 30_000
"""Maximum number of choices, or of values in all enum and const."""
MAX_SCHEMAS = 8_000
"""Maximum number of schemas inside of a schema."""
MAX_PROPERTIES = 5_000
"""Maximum number of properties of one object."""
MAX_REQUIRED = 10_000
"""Maximum number of required names in all objects."""
MAX_BRANCHES = 2_000
"""Maximum number of branches in one anyOf, oneOf or allOf."""
MAX_BRANCH_NAMES = 50_000
"""Maximum product of a oneOf's branches and the required names of all branches."""
MAX_REFERENCES = 200
"""Maximum number of references in a row that point only to the next one."""
MAX_PATTERNS = 1_000
"""Maximum number of patterns in a schema."""
MAX_TAGS = 2_000
"""Maximum number of tags of a structural tag: each argument of a tool may be one."""
MAX_TRIGGERS = 500
"""Maximum number of triggers of a structural tag."""

# A class of this length weighs twice its characters; longer ones weigh more.
_CLASS_CHARS = 700
# A repetition with more digits than this is beyond every bound.
_MAX_DIGITS = 9
_DIGITS = re.compile(r"\d+")

# No pattern backtracks, so the time is linear even for unclosed brackets.
_CLASS = r"(?P<cls>\[\^?\]?(?:[^\]\\]++|\\.)*+\]?)"
_REPEAT = r"(?P<repeat>(?:[?*+]|\{\d*+,?\d*+\})[?+]?)"
_STRING = r"(?P<string>\"(?:[^\"\\]++|\\.)*+\"?|'(?:[^'\\]++|\\.)*+'?)"
_REGEX = re.compile(
    rf"{_CLASS}|{_REPEAT}|(?P<open>\((?:\?[:=!<])?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<atom>\\(?:[pPux]\{[^}]*+\}?|.|$))|(?P<text>[^\\\[()|?*+{]++|\{)",
    re.DOTALL,
)
_EBNF = re.compile(
    rf"\#[^\n]*+|{_STRING}|{_CLASS}|{_REPEAT}|(?P<open>\()|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<rule>[\w-]++\s*+::=)|(?P<atom>[\w-]++)",
    re.DOTALL,
)
_LARK = re.compile(
    rf"//[^\n]*+|(?P<regex>/(?:[^/\\\n]++|\\.)++/)|{_STRING}"
    r"|(?P<rule>^[?!]?[\w-]++[^:|\n]*+:)"
    r"|(?P<repeat>[?*+]|~[ \t]*+\d++(?:\.\.\d++)?)|(?P<open>[(\[])|(?P<close>[)\]])|(?P<bar>\|)"
    r"|(?P<atom>[\w-]++)",
    re.DOTALL | re.MULTILINE,
)

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# Keywords that hold values, not schemas.
_DATA = frozenset({"const", "default", "example", "examples", "enum", "required", "type"})
_DEFINITIONS = ("$defs", "definitions")
_BRANCHES = ("anyOf", "oneOf", "allOf")


def check_size(spec: GrammarSpec) -> None:
    """Reject a grammar that is too large after expansion.

    Raises:
        GrammarError: a bound is exceeded (the message names it), or required JSON is invalid.
    """
    size = _Size()
    if spec.kind == "regex":
        size.add_pattern(spec.text, _REGEX)
    elif spec.kind == "grammar":
        size.add_pattern(spec.text, _EBNF if is_ebnf(spec.text) else _LARK)
    elif spec.kind == "choice":
        size.add_values(parse_choices(spec.text))
    elif spec.kind == "json":
        size.add_schema(parse_json(spec.text))
    elif spec.kind == "structural_tag":
        size.add_tags(parse_json(spec.text))


class _Size:
    """Counts of the parts of a grammar."""

    def __init__(self) -> None:
        self._tokens = self._rules = self._expanded = self._patterns = 0
        self._class_weight = 0.0
        self._values = self._literals = self._schemas = self._required = 0

    def add_pattern(self, text: str, syntax: re.Pattern[str]) -> None:
        """Count a regular expression, or a grammar.

        Args:
            text: its text.
            syntax: one of `_REGEX`, `_EBNF` and `_LARK`.
        """
        # For the innermost open group: the part before the last one, and the last part. Each is a
        # count and the weight of its classes.
        outer: list[tuple[int, float]] = []
        size, weight, last, last_weight = 0, 0.0, 0, 0.0
        num_optional, is_needed = 0, False
        for token in syntax.finditer(text):
            self._tokens += 1
            if self._tokens > MAX_TOKENS:
                raise GrammarError(
                    f"The grammar is too large: it has more than {MAX_TOKENS} texts, classes, "
                    "names, groups and repetitions."
                )
            kind = token.lastgroup
            if kind == "repeat":
                count, is_optional = _read_repetition(token[0])
                last, last_weight = last * count, last_weight * count
                _check("characters and names after repetition", size + last, MAX_EXPANDED)
                if is_optional:
                    num_optional, is_needed = num_optional + 1, False
                    _check("optional parts in a row", num_optional, MAX_OPTIONAL)
                continue
            if kind is None:  # a comment
                continue
            if kind == "close":
                last, last_weight = size + last, weight + last_weight
                size, weight = outer.pop() if outer else (0, 0.0)
                continue
            size, weight = size + last, weight + last_weight
            last, last_weight = 0, 0.0
            if kind == "open":
                outer.append((size, weight))
                size, weight = 0, 0.0
            elif kind in ("bar", "rule"):
                self._rules += kind == "rule"
                num_optional, is_needed = 0, False
            else:
                if is_needed:
                    num_optional = 0
                is_needed, last = True, 1
                length = token.end() - token.start()
                if kind == "cls":
                    last_weight = float(length)
                    self._class_weight += length * length / _CLASS_CHARS
                elif kind == "string":
                    last = max(1, length - 2)
                elif kind == "regex":
                    self.add_pattern(token[0][1:-1], _REGEX)
                elif kind == "text" and length > 1:
                    size += length - 1
                    num_optional = 0
        for group_size, group_weight in [*outer, (last, last_weight)]:
            size, weight = size + group_size, weight + group_weight
        self._expanded += size
        self._class_weight += weight
        _check("rules", self._rules, MAX_RULES)
        _check("characters and names after repetition", self._expanded, MAX_EXPANDED)
        _check("characters in classes after repetition", int(self._class_weight), MAX_CLASS_WEIGHT)

    def add_values(self, values: list[Any]) -> None:
        """Count values of enum, const or choice."""
        self._values += len(values)
        _check("choices or values of enum and const", self._values, MAX_VALUES)
        for value in values:
            self._add_literals(value if isinstance(value, str) else json.dumps(value))

    def add_schema(self, root: Any) -> None:
        """Count a JSON schema."""
        todo, references = [root], dict[str, Any]()
        while todo:
            schema = todo.pop()
            if not isinstance(schema, dict):
                continue
            self._schemas += 1
            _check("schemas", self._schemas, MAX_SCHEMAS)
            for key, value in schema.items():
                if key == "enum" and isinstance(value, list):
                    self.add_values(value)
                elif key == "const":
                    self.add_values([value])
                elif key == "pattern" and isinstance(value, str):
                    self._add_patterns([value])
                elif key == "required" and isinstance(value, list):
                    self._required += len(value)
                    _check("required names", self._required, MAX_REQUIRED)
                elif key in _DATA:
                    continue
                elif isinstance(value, list):
                    todo += value
                    if key in _BRANCHES:
                        _check(f"branches in {key}", len(value), MAX_BRANCHES)
                    if key == "oneOf":
                        _check_names(value)
                elif isinstance(value, dict):
                    if key not in _MAPS:
                        todo.append(value)
                        continue
                    todo += value.values()
                    if key == "properties":
                        _check("properties of an object", len(value), MAX_PROPERTIES)
                    elif key == "patternProperties":
                        self._add_patterns(value)
                    elif key in _DEFINITIONS:
                        references.update(_references(key, value))
        _check_references(references)

    def add_tags(self, tag: Any) -> None:
        """Count a structural tag, of either form."""
        todo, num_tags = [tag], 0
        patterns = set[str]()  # a library computes equal ones once
        while todo:
            value = todo.pop()
            if isinstance(value, list):
                todo += value
            elif isinstance(value, str):
                self._add_literals(value)
            elif isinstance(value, dict):
                num_tags += "begin" in value
                _check("tags", num_tags, MAX_TAGS)
                for key, inner in value.items():
                    if key in ("schema", "json_schema"):
                        self.add_schema(inner)
                    elif key in ("pattern", "not_first") and isinstance(inner, str):
                        if inner not in patterns:
                            patterns.add(inner)
                            self._add_patterns([inner])
                    elif key == "grammar" and isinstance(inner, str):
                        self.add_pattern(inner, _EBNF)
                    else:
                        todo.append(inner)
                        if key == "triggers" and isinstance(inner, list):
                            _check("triggers", len(inner), MAX_TRIGGERS)

    def _add_patterns(self, patterns: Iterable[str]) -> None:
        for pattern in patterns:
            self._patterns += 1
            _check("patterns", self._patterns, MAX_PATTERNS)
            self.add_pattern(pattern, _REGEX)

    def _add_literals(self, text: str) -> None:
        self._literals += len(text)
        _check("characters of choices, of enum and const, or of tags", self._literals, MAX_LITERALS)


def _check_names(branches: list[Any]) -> None:
    lists = [branch.get("required") for branch in branches if isinstance(branch, dict)]
    num_names = sum(len(names) for names in lists if isinstance(names, list))
    product = len(branches) * num_names
    _check("branches in oneOf times their required names", product, MAX_BRANCH_NAMES)


def _references(key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the targets of the definitions that are references."""
    return {
        f"#/{key}/{name}": schema["$ref"]
        for name, schema in definitions.items()
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str)
    }


def _check_references(references: dict[str, str]) -> None:
    """Reject long chains of references; empty `references`."""
    lengths = dict[str, int]()
    while references:
        chain = [next(iter(references))]
        while (then := references.pop(chain[-1], None)) is not None:
            chain.append(then)
        known = lengths.get(chain[-1], 0)
        _check("references in a row", known + len(chain) - 1, MAX_REFERENCES)
        lengths.update((name, known + i) for i, name in enumerate(reversed(chain)))


def _read_repetition(text: str) -> tuple[int, bool]:
    """Return the maximum count of a repetition, or the minimum if it has no end.

    The second value is True if the repeated part may be missing.
    """
    if text[0] in "?*+":
        return 1, text[0] != "+"
    numbers = [int(digits[:_MAX_DIGITS]) for digits in _DIGITS.findall(text)]
    low = 0 if "{," in text else numbers[0] if numbers else 0
    return max([1, *numbers]), low == 0


def _check(what: str, value: int, bound: int) -> None:
    """Reject a value beyond a bound.

    Raises:
        GrammarError: the value exceeds the bound.
    """
    if value > bound:
        raise GrammarError(
            f"The grammar is too large: it has {value} {what}; at most {bound} are allowed."
        )
