"""Grammar of answers whose calls have no marker: a call from the first character on, or a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.parsers.calls import (
    ARGUMENTS_KEYS,
    ID_KEYS,
    NAME_KEYS,
    Calls,
    JsonCalls,
    PythonCalls,
)
from octavo.parsers.forms import ID, SPACES, Form, any_of, const, optional, schema, sequence

_SEPARATOR: Form = {"type": "regex", "pattern": "[ \\n]{0,20}[,;]?[ \\n]{0,20}"}
_COMMA: Form = {"type": "regex", "pattern": "[ \\n]{0,20},[ \\n]{0,20}"}
_TYPE = const('"type": "function"')
# The parser's white space, which is Python's.
_SPACE = "".join(f"\\u{{{i:x}}}" for i in range(0x3001) if chr(i).isspace())
_S = f"[{_SPACE}]*"
_WHOLE = r'"(?:[^"\\]|\\[\s\S])*"'
# A key or name with an escape that may stand for a letter.
_ESCAPED = r'"(?:[^"\\]|\\[^u\/])*\\[u\/]'


def bare_calls(calls: JsonCalls | PythonCalls, schemas: Mapping[str, Any], parallel: bool) -> Form:
    """Return the form of an answer that consists of calls without a marker.

    Args:
        calls: way to write calls; `begins[0]` is "{" or "[".
        schemas: JSON schemas of the arguments by the name of the function; not empty.
        parallel: the model may write several calls.

    Raises:
        UnsupportedError: no grammar describes arguments of this schema.
    """
    # A text may begin like a call up to the end of the name. So everything before the arguments of
    # the first call is one terminal for each function. The lexer keeps it as an alternative to the
    # text's terminal.
    in_list = calls.begins[0] == "["
    opening = [SPACES, const("["), SPACES] if in_list else [SPACES]
    first = any_of(sequence(*opening, *call) for call in _each(calls, schemas))
    elements = [first]
    if parallel:
        other = any_of(sequence(*call) for call in _each(calls, schemas))
        separator = _COMMA if in_list else _SEPARATOR
        elements.append({"type": "star", "content": sequence(separator, other)})
    return sequence(*elements, SPACES, *([const("]"), SPACES] if in_list else []))


def _each(calls: JsonCalls | PythonCalls, schemas: Mapping[str, Any]) -> Iterable[list[Form]]:
    """Yield the parts of a call of each function."""
    if isinstance(calls, PythonCalls):
        for name, given in schemas.items():
            yield [const(f"{name}("), calls.arguments_form(given), const(")")]
        return
    first, second = calls.keys
    id_keys = any_of(const(json.dumps(key)) for key in ID_KEYS)
    call_id = sequence(id_keys, const(":"), SPACES, const('"'), ID, const('"'))
    before = optional(sequence(any_of([call_id, _TYPE]), const(","), SPACES))
    for name, given in schemas.items():
        yield [
            *(const("{"), SPACES, before, const(f'"{first}":'), SPACES),
            *(const(f"{json.dumps(name, ensure_ascii=False)},"), SPACES, const(f'"{second}":')),
            *(SPACES, schema(given)),
            *(optional(sequence(SPACES, const(","), SPACES, call_id)), SPACES, const("}")),
        ]


def like_a_call(calls: JsonCalls | PythonCalls, names: Iterable[str]) -> str:
    """Return a regular expression of the beginnings of texts that the parser reads as calls.

    It also matches some texts that are no calls: JSON objects whose first key is a key of calls
    other than that of the name, such as {"arguments": ...}.

    Args:
        calls: way to write calls; `begins[0]` is "{" or "[".
        names: names of the functions.
    """
    opening = rf"{_S}\{calls.begins[0]}"
    if isinstance(calls, PythonCalls):
        return rf"{opening}[{_SPACE},]*(?:{_any(names)})\("
    if calls.begins[0] == "[":
        opening += rf"[{_SPACE},]*\{{"
    quoted = _any(json.dumps(name, ensure_ascii=False)[1:-1] for name in names)
    skipped = _any(["type", *ID_KEYS])
    members = rf'(?:"(?:{skipped})"{_S}:{_S}(?:{_WHOLE}|[^"{{}}\[\],{_SPACE}]+)[{_SPACE},]*)*'
    others = [*(key for key in NAME_KEYS if key != calls.keys[0]), *ARGUMENTS_KEYS]
    ends = [
        _ESCAPED,
        rf'"{calls.keys[0]}"{_S}:{_S}(?:"(?:{quoted})"|{_ESCAPED})',
        rf'"(?:{_any(others)})"',
        rf'"(?:{skipped})"{_S}:{_S}[{{\[]',
    ]
    return rf"{opening}[{_SPACE},]*{members}(?:{'|'.join(ends)})"


def begins_with(text: str) -> str:
    """Return a regular expression of texts that begin with a text, after white space."""
    return _S + _escape(text.strip())


def has_bare_calls(calls: Calls | None) -> bool:
    """Return True if calls are written without a marker."""
    return isinstance(calls, JsonCalls | PythonCalls) and calls.begins[0] in ("{", "[")


def _any(texts: Iterable[str]) -> str:
    return "|".join(map(_escape, texts))


def _escape(text: str) -> str:
    return re.sub(r"[!-/:-@\[-`{-~]", r"\\\g<0>", text)
