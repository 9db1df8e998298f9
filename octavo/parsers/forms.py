"""Formats of structural tags, in xgrammar's notation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.errors import UnsupportedError

Form = dict[str, Any]

SPACES: Form = {"type": "regex", "pattern": "[ \\n]{0,20}"}
"""White space that a model may write between the parts of a call; bounded, so that it ends."""
ID: Form = {"type": "regex", "pattern": "[A-Za-z0-9_.-]{1,64}"}
"""Id of a call."""
MAX_OPTIONAL = 32
"""Maximum number of optional members of which any may be the first one."""
_SPACE = re.compile(r"(\s+)")


def const(text: str) -> Form:
    """Return the form of a text."""
    return {"type": "const_string", "value": text}


def schema(value: object) -> Form:
    """Return the form of JSON that follows a schema."""
    return {"type": "json_schema", "json_schema": value}


def sequence(*forms: Form) -> Form:
    """Return forms one after the other."""
    return {"type": "sequence", "elements": list(forms)}


def any_of(forms: Iterable[Form]) -> Form:
    """Return one of several forms."""
    return {"type": "or", "elements": list(forms)}


def optional(form: Form) -> Form:
    """Return a form that may be missing."""
    return {"type": "optional", "content": form}


def listed(form: Form, parallel: bool) -> Form:
    """Return a form that occurs once or, if `parallel`, several times, with or without commas.

    The form is written once, since it may be large; parsers accept a list without commas.
    """
    if not parallel:
        return form
    comma = optional(sequence(SPACES, const(",")))
    return {"type": "plus", "content": sequence(form, comma, SPACES)}


def members(items: Sequence[tuple[Form, bool]], comma: str) -> Form:
    """Return the form of items in their order, with commas between them.

    Args:
        items: form of each item, and True if the item is required.
        comma: text between two items.

    Raises:
        UnsupportedError: none of more than `MAX_OPTIONAL` items is required. The form would grow
            with the square of their number.
    """
    if not items:
        return const("")
    first = next((i for i, (_, required) in enumerate(items) if required), None)
    if first is None:  # any of them may be the first one
        if len(items) > MAX_OPTIONAL:
            raise UnsupportedError(
                f"A function has {len(items)} optional arguments and no required one; in this "
                f"model's form of calls a grammar describes at most {MAX_OPTIONAL} of them.",
                "tools",
            )
        starts = [[(items[i][0], True), *items[i + 1 :]] for i in range(len(items))]
        return any_of([*(members(rest, comma) for rest in starts), const("")])
    before = [optional(sequence(form, const(comma))) for form, _ in items[:first]]
    after = []
    for form, required in items[first + 1 :]:
        following = sequence(const(comma), form)
        after.append(following if required else optional(following))
    return sequence(*before, items[first][0], *after)


def size(form: object) -> int:
    """Return the number of objects and lists of a form in JSON; a shared part counts each time."""
    sizes: dict[int, int] = {}

    def count(value: object) -> int:
        inner = value.values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list):
            return 0
        if id(value) not in sizes:
            sizes[id(value)] = 1 + sum(map(count, inner))  # type: ignore[call-overload]
        return sizes[id(value)]

    return count(form)


def tag(begin: str, content: Form, end: str) -> Form:
    """Return a form between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def spaced(text: str) -> list[Form]:
    """Return the form of a text, in which any white space may stand for each white space."""
    return [SPACES if part.isspace() else const(part) for part in _SPACE.split(text) if part]
