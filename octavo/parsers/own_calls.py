"""Readers of calls that no pattern describes."""

from __future__ import annotations

import json
import re

from octavo.parsers.calls import Sink
from octavo.parsers.reader import Markers, Reader, Steps

_NAME = re.compile(r"[\w.:-]*")
_BARE = re.compile(r"[^\s,:{}\[\]<]*")
_MOST_NAME = 256
_QUOTE = '<|"|>'
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
