"""Readers of calls that no pattern describes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.errors import UnsupportedError
from octavo.parsers.calls import Sink, text_schema
from octavo.parsers.forms import Form, any_of, const, members, optional, schema, sequence, size, tag
from octavo.parsers.reader import Markers, Reader, Steps

_NAME = re.compile(r"[\w.:-]*")
_BARE = re.compile(r"[^\s,:{}\[\]<]*")
_MOST_NAME = 256
_QUOTE = '<|"|>'
_MOST_FORMS = 20_000
_MESSAGE = Markers(["<|message|>"])
_CALL = Markers(["<|call|>"])


def read_harmony(reader: Reader, sink: Sink) -> Steps[bool]:
    """Read a call of gpt-oss after "to=functions.": its name, a channel and the arguments."""
    name = yield from reader.run(_NAME, _MOST_NAME)
    if not 0 < len(name) <= _MOST_NAME or not sink.accepts(name):
        return False
    yield from reader.spaces()
    for header in ("<|channel|>", "<|constrain|>", "<|message|>"):
        if (yield from reader.follows(header)):
            break
    else:
        return False
    header_pieces: list[str] = []
    if (yield from reader.until(_MESSAGE, header_pieces.append)) is None:
        return False
    yield from reader.spaces()
    if (yield from reader.char()) != "{":
        return False
    sink.start(name)
    if not (yield from reader.json_value(sink.arguments)):
        yield from reader.until(_CALL, sink.arguments)
    yield from reader.literal("<|call|>")
    return True


def read_gemma(reader: Reader, sink: Sink) -> Steps[bool]:
    """Read a call of Gemma 4: call:name{key:<|"|>text<|"|>,other:3}."""
    if not (yield from reader.literal("call:")):
        return False
    name = yield from reader.run(_NAME, _MOST_NAME)
    if not 0 < len(name) <= _MOST_NAME or not (yield from reader.follows("{")):
        return False
    if not sink.accepts(name):
        return False
    sink.start(name)
    quote, depth = Markers([_QUOTE]), 0
    while True:
        char = yield from reader.char()
        if char and char in "{[]},:":
            sink.arguments(reader.take(1) + (" " if char in ",:" else ""))
            depth += (char in "{[") - (char in "]}")
            if depth == 0:
                break
        elif (yield from reader.literal(_QUOTE)):
            sink.arguments('"')
            whole = yield from reader.until(
                quote, lambda text: sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            if whole is None:
                return True
            sink.arguments('"')
        elif char and char.isspace():
            yield from reader.spaces()
        else:
            word = yield from reader.run(_BARE, 2**20)
            if not word or not (yield from reader.char()):
                return True
            is_key = yield from reader.follows(":")
            sink.arguments(json.dumps(word, ensure_ascii=False) if is_key else word)
    yield from reader.literal("<tool_call|>")
    return True


def gemma_arguments(given: Mapping[str, Any]) -> Form:
    """Return the form of Gemma 4's arguments: an object, its keys sorted, without white space.

    Raises:
        UnsupportedError: the schema has a part that is no text, number, true, false or null, nor a
            list or an object of these; or the form is too large.
    """
    form = _gemma_object(given)
    if size(form) > _MOST_FORMS:  # nested lists and optional members multiply
        raise UnsupportedError(
            "A function's arguments are nested too deeply for a grammar of this model's calls; use "
            'tool_choice="auto" without strict, or a flatter schema.',
            "tools",
        )
    return form


def _gemma_object(given: Mapping[str, Any]) -> Form:
    required, items = given.get("required") or (), []
    properties = given.get("properties") or {}
    for key in sorted(properties, key=str.lower):
        if not _BARE.fullmatch(key):
            raise _no_form(key)
        form = sequence(const(f"{key}:"), _gemma_value(properties[key], key))
        items.append((form, key in required))
    return sequence(const("{"), members(items, ","), const("}"))


def _gemma_value(part: Any, key: str) -> Form:
    text = text_schema(part)
    if text is not None and not isinstance(text[0].get("enum"), list):
        form = tag(_QUOTE, {"type": "any_text"}, _QUOTE)
        return any_of([form, const("null")]) if text[1] else form
    if not isinstance(part, Mapping):
        raise _no_form(key)
    kind, values = part.get("type"), (part if text is None else text[0]).get("enum")
    if isinstance(values, list):
        values = [*values, None] if text is not None and text[1] else values
        if any(isinstance(value, dict | list) for value in values):
            raise _no_form(key)
        return any_of(
            const(f"{_QUOTE}{v}{_QUOTE}" if isinstance(v, str) else json.dumps(v)) for v in values
        )
    if kind in ("integer", "number", "boolean", "null"):
        return schema(part)
    if kind == "object" and part.get("properties"):
        return _gemma_object(part)
    if kind == "array" and "items" in part:
        item = _gemma_value(part["items"], key)
        more = {"type": "star", "content": sequence(const(","), item)}
        return sequence(const("["), optional(sequence(item, more)), const("]"))
    raise _no_form(key)


def _no_form(key: str) -> UnsupportedError:
    return UnsupportedError(
        f"The argument {key[:80]!r} has a schema that no grammar describes in this model's form of "
        'calls; use tool_choice="auto" without strict, or a schema of texts, numbers, true, false, '
        "null, lists and objects with properties.",
        "tools",
    )
