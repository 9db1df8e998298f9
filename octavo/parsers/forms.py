"""Formats of structural tags, in xgrammar's notation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Form = dict[str, Any]

SPACES: Form = {"type": "regex", "pattern": "[ \\n]{0,20}"}
"""White space that a model may write between the parts of a call; bounded, so that it ends."""
ID: Form = {"type": "regex", "pattern": "[A-Za-z0-9_.-]{1,64}"}
"""Id of a call."""
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


def tag(begin: str, content: Form, end: str) -> Form:
    """Return a form between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def spaced(text: str) -> list[Form]:
    """Return the form of a text, whose white space may be any."""
    return [SPACES if part.isspace() else const(part) for part in _SPACE.split(text) if part]
