"""Ways to write tool calls.

Each way has `begins`, the texts that may begin a call, and `read`, which reads the text that
follows one of them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from octavo.parsers.forms import (
    ID,
    SPACES,
    Form,
    any_of,
    const,
    listed,
    members,
    optional,
    schema,
    sequence,
    spaced,
    tag,
)
from octavo.parsers.parts import CallArguments, CallStart, Part
from octavo.parsers.reader import Markers, Reader, Steps, ignore

_NAME = re.compile(r"[\w.:/-]*")
_MOST_NULL = 64
"""Maximum number of characters, white space included, of an argument that may become null."""
_SPACES = re.compile(r"\s*")
_BETWEEN = re.compile("(?<=>) (?=<)")
"""White space between two marks."""
_MOST_NAME = 256
_TEXT_OR_NULL = {"string", "null"}
NAME_KEYS = ("name", "tool_name", "function_name", "function")
ARGUMENTS_KEYS = ("arguments", "parameters", "args")
ID_KEYS = ("id", "tool_call_id", "call_id")


def _encodable(text: str) -> str:
    """Return a text with escapes in place of lone surrogates, which UTF-8 cannot express."""
    return text.encode("utf-8", "backslashreplace").decode()


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of properties, each with the definitions that it may refer to."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties") or {}
    return {
        key: part | shared if shared and isinstance(part, dict) else part
        for key, part in properties.items()
    }


def text_schema(schema: object) -> tuple[Mapping[str, Any], bool] | None:
    """Return the schema of a text, and True if null is allowed, too.

    None if the JSON schema allows a value that is neither a text nor null, or only null.
    """
    if not isinstance(schema, Mapping):
        return None
    kind = schema.get("type")
    if kind == "string":
        return schema, False
    if isinstance(kind, list) and {*map(str, kind)} == _TEXT_OR_NULL:
        return schema, True
    branches = schema.get("anyOf") or schema.get("oneOf")
    if kind is None and isinstance(branches, list) and len(branches) == 2:
        others = [branch for branch in branches if branch != {"type": "null"}]
        if len(others) == 1 and isinstance(others[0], Mapping):
            return (others[0], True) if others[0].get("type") == "string" else None
    return None


class Sink:
    """Receiver of the calls of an answer.

    Args:
        parts: list to which the parts are added.
        schemas: JSON schemas of the parameters by the name of the function.
        only_known: True if a call of a function that `schemas` lacks is no call.
        held: True if a grammar holds calls to their schemas; see `AnswerParser`.
    """

    def __init__(
        self,
        parts: list[Part],
        schemas: Mapping[str, Any],
        only_known: bool = False,
        held: bool = False,
    ) -> None:
        self._parts = parts
        self.held = held
        self.schemas = schemas
        self.count = 0
        """Number of calls so far."""
        self.is_bare = False
        """True while a call without a marker is read, which must name a tool."""
        self.rest = ""
        """Text that was read after the last call, and that is no call."""
        self._only_known = only_known
        self._properties: Mapping[str, Any] = {}
        self._separator = ""

    def next_call(self, call: Steps[bool], reader: Reader, first: int) -> Steps[bool]:
        """Read the next call after a marker.

        A text that follows a call after the same marker, and is no call itself, becomes `rest`.

        Args:
            call: reads the call.
            reader: reader of the answer.
            first: `count` at the marker.

        Returns:
            False if the text is no call, or the call is not whole.
        """
        before = self.count
        if (yield from call):
            reader.keep()
            return True
        if first < before == self.count:
            yield from reader.spaces()
            self.rest = reader.kept()
        elif self.count > before:
            reader.kept()  # the parts have the text of a call that is not whole
        return False

    def close_calls(self, end: str, reader: Reader) -> Steps[None]:
        """Read the end of the calls after a marker, if they have one.

        Separators after the last call become a part of `rest` if no end follows them.
        """
        if end:
            yield from reader.spaces()
            if (yield from reader.literal(end)):
                reader.keep()
        self.rest += reader.kept()

    def accepts(self, name: str) -> bool:
        """Return True if a call may have this name."""
        return name in self.schemas or not (self.is_bare or self._only_known)

    def start(self, name: str, call_id: str | None = None) -> None:
        """Begin a call."""
        name = _encodable(name)
        call_id = None if call_id is None else _encodable(call_id)
        self.count += 1
        self._separator = "{"
        schema = self.schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._parts.append(CallStart(name, call_id))

    def arguments(self, text: str) -> None:
        """Add a text to the arguments."""
        if text:
            self._parts.append(CallArguments(_encodable(text)))

    def key(self, key: str) -> None:
        """Begin the next argument, in a format that writes each argument by itself."""
        self.arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "

    def close(self) -> None:
        """End the arguments that `key` began."""
        self.arguments("{}" if self._separator == "{" else "}")

    def is_text(self, key: str) -> bool:
        """Return True if the schema allows only a text, or a text or null, as the argument."""
        return text_schema(self._properties.get(key)) is not None

    def may_be_null(self, key: str) -> bool:
        """Return True if the schema allows a text or null as the argument."""
        found = text_schema(self._properties.get(key))
        return found is not None and found[1]


Tag = Form


def _schema_tag(begin: str, given: Mapping[str, Any], end: str) -> Tag:
    return tag(begin, schema(dict(given)), end)


class Calls(Protocol):
    """Way to write tool calls."""

    @property
    def begins(self) -> tuple[str, ...]:
        """Texts that may begin a call."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts and patterns of a call's marks."""

    @property
    def trigger(self) -> str | None:
        """Text that begins each call that has a marker; None: no call has one."""

    def triggered(self, schemas: Mapping[str, Any], parallel: bool) -> list[Tag]:
        """Return the calls that may follow free text, as tags that begin with `trigger`.

        Args:
            schemas: JSON schemas of the arguments by the name of the function.
            parallel: the model may write several calls.

        Raises:
            UnsupportedError: no grammar describes arguments of this schema.
        """

    def tag(self, name: str, schema: Mapping[str, Any]) -> Tag:
        """Return a call of a function as a tag of a structural tag (xgrammar's notation).

        Args:
            name: name of the function.
            schema: JSON schema of its arguments.

        Raises:
            UnsupportedError: no grammar describes arguments of this schema.
        """

    def read(self, marker: str, reader: Reader, sink: Sink) -> Steps[bool]:
        """Read calls after a text of `begins`.

        Returns:
            False if this is no call; then `sink` has received nothing.
        """


BARE = ("{", "[")
"""Beginnings of calls without a marker: calls if they begin the text and name a tool."""


@dataclass(frozen=True)
class JsonCalls:
    """Calls that are JSON objects with a name and arguments, or a list of such objects."""

    begins: tuple[str, ...]
    end: str = ""
    named_by_key: bool = False
    """True if an object's only key is the function's name, and its value the arguments."""
    as_list: bool = True
    """True if the model writes a list of objects."""
    keys: tuple[str, str] = ("name", "arguments")
    """Keys that the model writes."""
    space: str = ""
    """White space that the model writes next to `begins` and `end`."""

    @property
    def trigger(self) -> str | None:
        """Implement `Calls`."""
        marked = [text for text in self.begins if text not in BARE]
        if not marked:
            return None
        # The marker is a word that a text may contain, too: only the bracket makes it a call.
        return f"{marked[0]}[" if marked[0].isalpha() else marked[0]

    def triggered(self, schemas: Mapping[str, Any], parallel: bool) -> list[Tag]:
        """Implement `Calls`."""
        trigger = self.trigger
        assert trigger is not None
        if not self.as_list and self.end:
            return [self.tag(name, schema) for name, schema in schemas.items()]
        one = self._object_form(schemas)
        if not self.as_list:
            return [tag(trigger, sequence(SPACES, one, SPACES), "")]
        opening = [] if trigger.endswith("[") else [SPACES, const("[")]
        inner = [SPACES, listed(one, parallel), SPACES, const("]")]
        end = [SPACES, const(self.end)] if self.end else []
        return [tag(trigger, sequence(*opening, *inner, *end), "")]

    def _object_form(self, schemas: Mapping[str, Any]) -> Form:
        """Return an object that is a call of one of the functions."""
        first, second = self.keys
        if self.named_by_key:
            members = [
                sequence(const(f"{_quote(name)}:"), SPACES, schema(given))
                for name, given in schemas.items()
            ]
            return sequence(const("{"), SPACES, any_of(members), SPACES, const("}"))
        id_keys = any_of(const(_quote(key)) for key in ID_KEYS)
        member = sequence(id_keys, const(":"), SPACES, const('"'), ID, const('"'))
        calls = [
            sequence(
                const(f"{_quote(name)},"), SPACES, const(f'"{second}":'), SPACES, schema(given)
            )
            for name, given in schemas.items()
        ]
        return sequence(
            *(const("{"), SPACES, optional(sequence(member, const(","), SPACES))),
            *(const(f'"{first}":'), SPACES, any_of(calls)),
            *(optional(sequence(SPACES, const(","), SPACES, member)), SPACES, const("}")),
        )

    def tag(self, name: str, schema: Mapping[str, Any]) -> Tag:
        """Implement `Calls`."""
        first, second = self.keys
        begin = f'{{"{first}": {_quote(name)}, "{second}": '
        if self.named_by_key:
            begin = f"{{{_quote(name)}: "
        end = "}"
        if self.as_list:
            begin, end = f"[{begin}", "}]"
        if self._begin not in BARE:
            begin = f"{self._begin}{self.space}{begin}"
            end = f"{end}{self.space}{self.end}"
        return _schema_tag(begin, schema, end)

    @property
    def texts(self) -> tuple[str, ...]:
        """Implement `Calls`."""
        return (*self.begins, self.end)

    @property
    def _begin(self) -> str:
        return self.begins[0]

    @cached_property
    def _end(self) -> Markers:
        return Markers([self.end] if self.end else [])

    def read(self, marker: str, reader: Reader, sink: Sink) -> Steps[bool]:
        """Implement `Calls`."""
        before = sink.count
        sink.is_bare = marker in BARE
        yield from reader.spaces()
        closing = marker == "[" or (marker != "{" and (yield from reader.literal("[")))
        opened = marker == "{"
        while True:
            yield from reader.spaces()
            char = yield from reader.char()
            if opened or char == "{":
                if not opened:
                    reader.take(1)
                opened = False
                call = self._object(reader, sink, may_nest=True)
                if not (yield from sink.next_call(call, reader, before)):
                    break
                if sink.held and not (sink.is_bare or closing or self.end):
                    break  # the grammar has one call after each marker
            elif char and (char == "," or (char == ";" and not closing)):
                reader.take(1)
            else:
                if char == "]" and closing:
                    reader.take(1)
                    if sink.count > before:
                        reader.keep()
                break
        if sink.count == before:
            return False
        yield from sink.close_calls(self.end, reader)
        return True

    def _object(self, reader: Reader, sink: Sink, *, may_nest: bool) -> Steps[bool]:
        """Read an object after its brace; return False if it is no call, or is not whole.

        `may_nest`: the key "function" may have an object with name and arguments.
        """
        name: str | None = None
        call_id: str | None = None
        held: list[str] | None = None
        started = False
        while True:
            yield from reader.spaces()
            char = yield from reader.char()
            if char == ",":
                reader.take(1)
                continue
            if char == "}":
                reader.take(1)
                break
            key = yield from reader.json_string()
            yield from reader.spaces()
            if key is None or not (yield from reader.literal(":")):
                return False
            yield from reader.spaces()
            char = yield from reader.char()
            if self.named_by_key and name is None:
                name = key
                if not sink.accepts(name):
                    return False
                sink.start(name)
                started = True
                if not (yield from self._arguments(reader, sink.arguments)):
                    return False
            elif key in NAME_KEYS and name is None:
                if key == "function" and char == "{" and may_nest:
                    reader.take(1)
                    return (yield from self._object(reader, sink, may_nest=False)) and (
                        yield from self._rest(reader)
                    )
                name = yield from reader.json_string()
                if name is None or not sink.accepts(name):
                    return False
                if held is not None:
                    sink.start(name, call_id)
                    sink.arguments("".join(held))
                    started = True
            elif key in ARGUMENTS_KEYS and not started and held is None:
                if name is None:
                    held = []
                    if not (yield from self._arguments(reader, held.append)):
                        return False
                else:
                    sink.start(name, call_id)
                    started = True
                    if not (yield from self._arguments(reader, sink.arguments)):
                        return False
            elif key in ID_KEYS and char == '"' and not started:
                call_id = yield from reader.json_string()
            elif sink.is_bare and name is None and key not in ("type", *ID_KEYS):
                return False  # an object of another kind: do not wait for its end
            elif not (yield from reader.json_value(ignore)):
                return False
        if not started:
            if name is None:
                return False
            sink.start(name, call_id)
            sink.arguments("{}")
        return True

    def _arguments(self, reader: Reader, emit: Callable[[str], None]) -> Steps[bool]:
        """Read arguments: a JSON value, or a text that contains it."""
        char = yield from reader.char()
        if char == '"':
            text = yield from reader.json_string()
            if text is None:
                return False
            emit(text if text.strip() else "{}")
            return True
        if char == "n" and (yield from reader.literal("null")):
            emit("{}")
            return True
        if not (yield from reader.json_value(emit)):
            # Text that is no JSON belongs to the arguments, too, up to the end of the call.
            yield from reader.until(self._end, emit)
            return False
        return True

    def _rest(self, reader: Reader) -> Steps[bool]:
        """Read the other members of an object, and its end."""
        while True:
            yield from reader.spaces()
            if (yield from reader.literal("}")):
                return True
            if (yield from reader.literal(",")):
                continue
            if (yield from reader.json_string()) is None:
                return False
            yield from reader.spaces()
            if not (yield from reader.literal(":")):
                return False
            yield from reader.spaces()
            if not (yield from reader.json_value(ignore)):
                return False


_FIELD = re.compile(r"\{(name|id|key|text)\}")


class _Pattern:
    """Literals and fields in the order in which they are read.

    Args:
        pattern: text with fields `{name}`, `{id}` and `{text}` (words) and `{key}` (any text up to
            the literal after it). White space stands for any white space.
    """

    def __init__(self, pattern: str) -> None:
        self._steps: list[tuple[str, str]] = []
        for i, piece in enumerate(_FIELD.split(pattern)):
            if i % 2:
                self._steps.append((piece, ""))
                continue
            for word in re.split(r"(\s+)", piece):
                if word:
                    self._steps.append(("spaces", "") if word.isspace() else ("literal", word))
        self.first = next((literal for kind, literal in self._steps if kind == "literal"), "")

    def read(self, reader: Reader, fields: dict[str, str], skip: int = 0) -> Steps[bool]:
        """Read the pattern without its first `skip` steps, and add its fields to `fields`.

        Returns:
            False at the first difference between text and pattern.
        """
        steps = iter(self._steps[skip:])
        for kind, literal in steps:
            if kind == "spaces":
                yield from reader.spaces()
            elif kind == "literal":
                if not (yield from reader.literal(literal)):
                    return False
            elif kind == "key":
                pieces: list[str] = []
                _, following = next(steps)
                if (yield from reader.until(Markers([following]), pieces.append)) is None:
                    return False
                fields[kind] = "".join(pieces).strip()
            else:
                word = yield from reader.run(_NAME, _MOST_NAME)
                if not 0 < len(word) <= _MOST_NAME or not (yield from reader.char()):
                    return False
                fields[kind] = word
        return True

    def skim(self, reader: Reader) -> Steps[None]:
        """Read the literals of the pattern as far as they are the next text."""
        for kind, literal in self._steps:
            yield from reader.spaces()
            if kind == "literal":
                yield from reader.literal(literal)


def _name_of(call_id: str) -> str:
    """Return the name in an id such as functions.get_weather:0."""
    return call_id.removeprefix("functions.").rpartition(":")[0] or call_id


@dataclass(frozen=True)
class PatternCalls:
    """Calls that follow a pattern; see `_Pattern` for the fields.

    The arguments are one JSON value between the two parts of `call`, or each argument follows the
    pattern `argument`. Without `{name}` in the pattern, `{id}` contains the function's name.
    """

    call: tuple[str, str]
    """Patterns before and after the arguments."""
    argument: tuple[str, str] | None = None
    """Pattern before a value, with `{key}`, and the text after it. A field `{text}` is "true" if
    the value is a text; without it, the schema decides. If the text begins with a newline, the
    newlines around a value are not part of it."""
    section: tuple[str, str] | None = None
    """Texts before the first call, and after the last one."""

    @property
    def trigger(self) -> str | None:
        """Implement `Calls`."""
        return self._begin.first

    def triggered(self, schemas: Mapping[str, Any], parallel: bool) -> list[Tag]:
        """Implement `Calls`: the texts of a section are free."""
        return [self._triggered(name, schema, parallel) for name, schema in schemas.items()]

    def _triggered(self, name: str, given: Mapping[str, Any], parallel: bool) -> Tag:
        trigger, (begin, end) = self._begin.first, self.call
        head = begin[begin.index(trigger) + len(trigger) :]
        call_id = ID if "{name}" in begin else sequence(const(f"functions.{name}:"), ID)
        opening: list[Form] = []
        for i, piece in enumerate(_FIELD.split(head)):
            if i % 2:
                opening.append(const(name) if piece == "name" else call_id)
            else:
                opening += spaced(piece)
        # Each argument brings its white space: two in a row would hide an optional next argument.
        inner = (
            [schema(given), SPACES]
            if self.argument is None
            else [self._arguments_format(given, SPACES)]
        )
        closing = spaced(end)
        if not parallel and self.section is not None:
            closing.append(optional(sequence(SPACES, const(self.section[1]))))
        return tag(trigger, sequence(*opening, SPACES, *inner, *closing), "")

    def tag(self, name: str, schema: Mapping[str, Any]) -> Tag:
        """Implement `Calls`."""
        begin, end = self.call
        call_id = "call00000" if "{name}" in begin else f"functions.{name}:0"
        begin = begin.replace("{name}", name).replace("{id}", call_id)
        if self.section is not None:
            begin, end = self.section[0] + begin, end + self.section[1]
        if self.argument is None:
            return _schema_tag(begin, schema, end)
        return {
            "type": "tag",
            "begin": begin,
            "content": self._arguments_format(schema),
            "end": end,
        }

    def _arguments_format(
        self, schema: Mapping[str, Any], spaces: Form | None = None
    ) -> dict[str, Any]:
        """Return the arguments in the order of the schema, with `spaces` after each."""
        assert self.argument is not None
        required = schema.get("required") or ()
        elements: list[dict[str, Any]] = []
        for key, part in _properties(schema).items():
            begin, end = self.argument
            text = text_schema(part)
            begin = begin.replace("{key}", key).replace("{text}", "true" if text else "false")
            if end.startswith("\n"):
                begin += "\n"
            content: dict[str, Any] = {"type": "json_schema", "json_schema": part}
            if text is not None:
                content, (of_text, may_be_null) = {"type": "any_text"}, text
                if isinstance(of_text.get("enum"), list):
                    texts = ["null" if v is None else str(v) for v in of_text["enum"]]
                    texts += ["null"] if may_be_null and "null" not in texts else []
                    values = [{"type": "const_string", "value": text} for text in texts]
                    content = {"type": "or", "elements": values}
            heads: list[str] = []
            if spaces is not None:
                *heads, begin = _BETWEEN.split(begin)
            form: Form = {"type": "tag", "begin": begin, "content": content, "end": end}
            if spaces is not None:
                before = [part for head in heads for part in (const(head), spaces)]
                form = sequence(*before, form, spaces)
            elements.append(form if key in required else {"type": "optional", "content": form})
        if not elements:
            return {"type": "const_string", "value": ""}
        return {"type": "sequence", "elements": elements}

    @cached_property
    def _begin(self) -> _Pattern:
        return _Pattern(self.call[0])

    @cached_property
    def _end(self) -> _Pattern:
        return _Pattern(self.call[1])

    @cached_property
    def _argument(self) -> _Pattern:
        assert self.argument is not None
        return _Pattern(self.argument[0])

    @cached_property
    def begins(self) -> tuple[str, ...]:
        """Implement `Calls`."""
        return (
            (self._begin.first,) if self.section is None else (self.section[0], self._begin.first)
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """Implement `Calls`."""
        return (*self.call, *(self.argument or ()), *(self.section or ()))

    def read(self, marker: str, reader: Reader, sink: Sink) -> Steps[bool]:
        """Implement `Calls`."""
        before = sink.count
        if marker == self._begin.first:
            return (yield from self._call(reader, sink)) or sink.count > before
        while True:
            yield from reader.spaces()
            if not (yield from reader.literal(self._begin.first)):
                break
            if not (yield from sink.next_call(self._call(reader, sink), reader, before)):
                break
        if sink.count == before:
            return False
        assert self.section is not None
        yield from reader.literal(self.section[1])
        return True

    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        """Read a call after its first literal; return False if it is none, or is not whole."""
        fields: dict[str, str] = {}
        if not (yield from self._begin.read(reader, fields, 1)):
            return False
        call_id = fields.get("id")
        yield from reader.spaces()
        if self.argument is None:
            if (yield from reader.char()) != "{":
                return False
        elif not (yield from reader.follows(self._argument.first)):
            # Without arguments it is a call only if it names a tool, and ends like a call.
            known = fields["name"] in sink.schemas
            if not known or not (yield from reader.follows(self._end.first)):
                return False
        name = fields.get("name") or _name_of(call_id or "")
        if not sink.accepts(name):
            return False
        sink.start(name, call_id)
        if self.argument is None:
            if not (yield from reader.json_value(sink.arguments)):
                # Text that is no JSON belongs to the arguments, too, up to the end of the call.
                ends = [self._end.first] if self._end.first else []
                yield from reader.until(Markers(ends), sink.arguments)
                return False
        elif not (yield from self._arguments(reader, sink, self.argument[1])):
            return False
        yield from self._end.skim(reader)
        return True

    def _arguments(self, reader: Reader, sink: Sink, close: str) -> Steps[bool]:
        markers, trims = Markers([close.strip()]), close != close.strip()
        after = (self._argument.first, self._end.first)
        while True:
            yield from reader.spaces()
            if not (yield from reader.literal(self._argument.first)):
                break
            fields: dict[str, str] = {}
            if not (yield from self._argument.read(reader, fields, 1)):
                return False
            is_text = fields["text"] == "true" if "text" in fields else None
            value = _Value(sink, fields["key"], is_text, trims)
            # The text may contain `close`, too: another argument or the call's end must follow it.
            while True:
                if (yield from reader.until(markers, value.add)) is None:
                    return False
                spaces = yield from reader.run(_SPACES, 2**16)
                closed = False
                for text in after:
                    closed = closed or (yield from reader.follows(text))
                if closed or reader.ended:
                    break
                value.add(close.strip() + spaces)
            value.end()
        if not (yield from reader.follows(self._end.first)) and reader.ended:
            return False
        sink.close()
        return True


class _Value:
    """Receiver of an argument's text, which becomes JSON.

    Args:
        sink: receives the JSON.
        key: name of the argument.
        is_text: True if the value is a text; None: the schema decides.
        trims: a newline at the beginning and at the end is not part of the text.
    """

    def __init__(self, sink: Sink, key: str, is_text: bool | None, trims: bool) -> None:
        self._sink = sink
        self._trims = trims
        self._is_text = sink.is_text(key) if is_text is None else is_text
        self._held: list[str] = []
        sink.key(key)
        self._begun = False
        self._newline = ""
        self._may_be_null = is_text is None and sink.may_be_null(key)
        """True if the text so far may become null."""
        if self._is_text and not self._may_be_null:
            sink.arguments('"')

    def add(self, text: str) -> None:
        """Add a piece of the text."""
        if not self._is_text:
            self._held.append(text)
            return
        if self._trims:
            if not self._begun:
                text = text.removeprefix("\n")
            text = self._newline + text
            self._newline = ""
            if text.endswith("\n"):
                text, self._newline = text[:-1], "\n"
        self._begun = True
        if self._may_be_null:
            text = "".join([*self._held, text])
            if len(text) <= _MOST_NULL and "null".startswith(text.strip()):
                self._held = [text]
                return
            self._may_be_null = False
            self._sink.arguments('"')
        self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        """End the value."""
        if self._may_be_null:
            text = "".join(self._held)
            self._sink.arguments(
                "null" if text.strip() == "null" else json.dumps(text, ensure_ascii=False)
            )
            return
        if self._is_text:
            self._sink.arguments('"')
            return
        self._sink.arguments(to_json("".join(self._held).strip()))


def _refuse(constant: str) -> None:
    """Refuse NaN and infinities, which JSON does not have."""
    raise ValueError(constant)


def to_json(text: str) -> str:
    """Return a value as JSON: the text itself if it is JSON, or a Python literal, or a string."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class PythonCalls:
    """Calls of Python functions, in a list or one in each line."""

    begins: tuple[str, ...]
    end: str = ""

    @property
    def trigger(self) -> str | None:
        """Implement `Calls`."""
        return next((text for text in self.begins if text not in BARE), None)

    def triggered(self, schemas: Mapping[str, Any], parallel: bool) -> list[Tag]:
        """Implement `Calls`."""
        trigger = self.trigger
        assert trigger is not None
        calls = [
            sequence(const(f"{name}("), self.arguments_form(schema), const(")"))
            for name, schema in schemas.items()
        ]
        # In a format without an end marker, the bracket ends the calls.
        bracket = [optional(const(mark)) if self.end else const(mark) for mark in "[]"]
        end = [SPACES, const(self.end)] if self.end else []
        inner = [SPACES, listed(any_of(calls), parallel), SPACES]
        return [tag(trigger, sequence(SPACES, bracket[0], *inner, bracket[1], *end), "")]

    def tag(self, name: str, schema: Mapping[str, Any]) -> Tag:
        """Implement `Calls`."""
        begin = self.begins[0] if self.begins[0] not in BARE else ""
        return tag(f"{begin}[{name}(", self.arguments_form(schema), f")]{self.end}")

    def arguments_form(self, given: Mapping[str, Any]) -> Form:
        """Return the arguments, the required ones first."""
        required = given.get("required") or ()
        parts = sorted(_properties(given).items(), key=lambda item: item[0] not in required)
        items = [(tag(f"{key}=", schema(part), ""), key in required) for key, part in parts]
        return members(items, ", ")

    @property
    def texts(self) -> tuple[str, ...]:
        """Implement `Calls`."""
        return (*self.begins, self.end)

    def read(self, marker: str, reader: Reader, sink: Sink) -> Steps[bool]:
        """Implement `Calls`."""
        before = sink.count
        sink.is_bare = marker in BARE
        yield from reader.spaces()
        bracket = marker == "[" or (yield from reader.literal("["))
        while True:
            yield from reader.spaces()
            char = yield from reader.char()
            if char == ",":
                reader.take(1)
                continue
            call = self._call(reader, sink)
            if not char.isidentifier() or not (yield from sink.next_call(call, reader, before)):
                break
        if sink.count == before:
            return False
        if bracket and (yield from reader.literal("]")):
            reader.keep()
        yield from sink.close_calls(self.end, reader)
        return True

    def _call(self, reader: Reader, sink: Sink) -> Steps[bool]:
        name = yield from reader.run(_NAME, _MOST_NAME)
        if len(name) > _MOST_NAME or not (yield from reader.literal("(")):
            return False
        yield from reader.spaces()
        char = yield from reader.char()
        if not sink.accepts(name) or not (char == ")" or char.isidentifier()):
            return False
        sink.start(name)
        while True:
            yield from reader.spaces()
            char = yield from reader.char()
            if char == ",":
                reader.take(1)
                continue
            if char == ")":
                reader.take(1)
                break
            key = yield from reader.run(_NAME, _MOST_NAME)
            yield from reader.spaces()
            if not key or not (yield from reader.literal("=")):
                return False
            pieces: list[str] = []
            whole = yield from reader.python_value(pieces.append)
            if not whole:
                return False
            sink.key(key)
            sink.arguments(_from_python("".join(pieces).strip()))
        sink.close()
        return True


def _from_python(text: str) -> str:
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return to_json(text)


@dataclass(frozen=True)
class OwnCalls:
    """Calls that a function of the format reads."""

    begins: tuple[str, ...]
    others: tuple[str, ...]
    """Other texts of a call's marks."""
    read_calls: Callable[[Reader, Sink], Steps[bool]] = field(compare=False)

    call: tuple[str, str]
    """Texts before and after the arguments of a call, with `{name}`."""
    arguments_form: Callable[[Mapping[str, Any]], Form] = field(default=schema, compare=False)
    """Returns the form of arguments that follow a schema."""

    @property
    def trigger(self) -> str | None:
        """Implement `Calls`."""
        return self.begins[-1]

    def triggered(self, schemas: Mapping[str, Any], parallel: bool) -> list[Tag]:
        """Implement `Calls`."""
        return [self.tag(name, schema) for name, schema in schemas.items()]

    def tag(self, name: str, schema: Mapping[str, Any]) -> Tag:
        """Implement `Calls`."""
        begin, end = self.call
        return tag(begin.replace("{name}", name), self.arguments_form(schema), end)

    @property
    def texts(self) -> tuple[str, ...]:
        """Implement `Calls`."""
        return (*self.begins, *self.others)

    def read(self, marker: str, reader: Reader, sink: Sink) -> Steps[bool]:
        """Implement `Calls`."""
        return (yield from self.read_calls(reader, sink))
