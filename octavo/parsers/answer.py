"""Parser of an answer with reasoning and tool calls, for one format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

from octavo.errors import UnsupportedError
from octavo.parsers.bare_calls import bare_calls, begins_with, has_bare_calls, like_a_call
from octavo.parsers.calls import BARE, Calls, JsonCalls, PythonCalls, Sink
from octavo.parsers.forms import Form, any_of, const, optional, sequence, tag
from octavo.parsers.parts import Part, Reasoning, Text
from octavo.parsers.reader import Markers, Reader, Steps


class HasSpecialTokens(Protocol):
    """Part of a tokenizer's interface that formats need."""

    all_special_ids: frozenset[int]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the texts of tokens."""


@dataclass(frozen=True)
class Format:
    """Way in which a family of models writes reasoning and tool calls."""

    name: str
    thoughts: tuple[str, str] | None = None
    """Texts before and after reasoning."""
    calls: Calls | None = None
    silent: tuple[str, ...] = ()
    """Texts that are not part of an answer."""
    after_thoughts: str = "\n\n"
    """Text that may stand between reasoning and what follows it."""

    def opens_thoughts(self, prompt: str) -> bool:
        """Return True if a prompt ends inside of reasoning."""
        if self.thoughts is None:
            return False
        begin, end = self.thoughts
        return prompt.rfind(begin) > prompt.rfind(end) and prompt.rstrip().endswith(begin.rstrip())

    def structural_tag(
        self,
        schemas: Mapping[str, Any],
        *,
        required: bool = False,
        parallel: bool = True,
        thinks: bool = False,
    ) -> dict[str, Any] | None:
        """Return the form of an answer with calls, as a structural tag in xgrammar's notation.

        Args:
            schemas: JSON schemas of the parameters by the name of the function.
            required: True if the answer, after reasoning, consists of calls.
            parallel: True if the answer may have several calls.
            thinks: True if the prompt ends inside of reasoning.

        Returns:
            The structural tag. None if calls are not required, and no grammar describes the
            arguments of all schemas.

        Raises:
            UnsupportedError: calls are required, and no grammar describes arguments of a schema.
        """
        assert self.calls is not None
        empty = {"type": "object", "properties": {}}
        schemas = {name: schema or empty for name, schema in schemas.items()}
        if not required:
            try:
                content = (
                    self._either(schemas, parallel, thinks)
                    if has_bare_calls(self.calls)
                    else self._triggered(schemas, parallel)
                )
            except UnsupportedError:
                return None
            return {"type": "structural_tag", "format": content}
        tags = [self.calls.tag(name, schema) for name, schema in schemas.items()]
        calls: dict[str, Any] = {"type": "tags_with_separator", "tags": tags, "separator": "\n"}
        calls |= {"at_least_one": True, "stop_after_first": not parallel}
        elements = [*self._thought({"type": "any_text"}, thinks), calls]
        return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}

    def _thought(self, inner: Form, thinks: bool) -> list[Form]:
        """Return the reasoning that may come first, and the text after it."""
        if self.thoughts is None:
            return []
        begin, end = self.thoughts
        thought = tag("" if thinks else begin, inner, end)
        return [thought if thinks else optional(thought), optional(const(self.after_thoughts))]

    def _triggered(self, schemas: Mapping[str, Any], parallel: bool) -> Form:
        """Return free text with calls after their marker."""
        assert self.calls is not None
        section = getattr(self.calls, "section", None)
        texts = [*(self.thoughts or ()), *self.silent, *(section or ())]
        return {
            "type": "triggered_tags",
            "triggers": [self.calls.trigger],
            "tags": self.calls.triggered(schemas, parallel),
            "stop_after_first": not parallel,
            "texts": [text.strip() for text in texts],
        }

    def _either(self, schemas: Mapping[str, Any], parallel: bool, thinks: bool) -> Form:
        """Return reasoning, and then calls without a marker or a text that begins like no call."""
        calls = self.calls
        assert isinstance(calls, JsonCalls | PythonCalls)
        text: Form = {"type": "any_text"}
        if calls.trigger is not None:
            text = self._triggered(schemas, parallel) | {"texts": []}
        beginnings = [like_a_call(calls, schemas)]
        if self.thoughts is not None:
            beginnings.append(begins_with(self.thoughts[0]))
        answer = any_of(
            [bare_calls(calls, schemas, parallel), text | {"not_first": "|".join(beginnings)}]
        )
        return sequence(*self._thought(text, thinks), answer)

    def special_ids(self, tokenizer: HasSpecialTokens) -> list[int]:
        """Return the ids of a tokenizer's special tokens that belong to the format."""
        texts = [*self.in_thoughts.markers, *self.silent]
        if self.calls is not None:
            texts += self.calls.texts
        ids = sorted(tokenizer.all_special_ids)
        special = zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)
        return [i for i, token in special if any(token in text for text in texts)]

    @cached_property
    def _call_begins(self) -> tuple[str, ...]:
        return () if self.calls is None else self.calls.begins

    @cached_property
    def in_text(self) -> Markers:
        """Markers in a text."""
        return Markers([*self._call_begins, *(self.thoughts or ())[:1], *self.silent])

    @cached_property
    def in_thoughts(self) -> Markers:
        """Markers in reasoning."""
        begins = [begin for begin in self._call_begins if begin not in BARE]
        return Markers([*begins, *(self.thoughts or ())])


class AnswerParser:
    """Parser of one choice; see `Parser`.

    White space next to a marker belongs to the marker. All text that is no marker and no call
    becomes text or reasoning, even if it begins like a call.

    Args:
        answer_format: format of the model.
        schemas: JSON schemas of the parameters by the name of the function; None: the request has
            no tools, and all that looks like a call is text.
        thinks: True if the prompt ends inside of reasoning.
        only_known: True if a call of a function that `schemas` lacks is text.
        held: True if a grammar holds calls to their schemas. Then a call without its marker is
            text, since the grammar did not hold it. Exception: in a format without a marker, calls
            at the beginning of the answer are calls.
    """

    def __init__(
        self,
        answer_format: Format,
        schemas: Mapping[str, Any] | None = None,
        thinks: bool = False,
        only_known: bool = False,
        held: bool = False,
    ) -> None:
        self._format = answer_format
        self._reader = Reader()
        self._out = _Output()
        self._sink = Sink(self._out.parts, schemas or {}, only_known, held)
        self._calls = answer_format.calls if schemas is not None else None
        self._held = held
        self._kind: type[Part] = Reasoning if thinks else Text
        if thinks:
            self._out.marker()
        self._sought: Markers | None = None
        """Markers for which a text is searched now; None within a call."""
        self._steps = self._read()
        next(self._steps)

    def feed(self, text: str) -> list[Part]:
        """Implement `Parser`."""
        sought = self._sought
        if sought is not None and self._reader.is_empty and sought.cannot_begin_in(text):
            # The same result as that of `_read`, in a fraction of the time.
            out = self._out
            if out.written and not out.spaces and text and not text[-1].isspace():
                return [self._kind(text)]
            out.write(self._kind, text)
            return out.collect()
        self._reader.add(text)
        return self._go()

    def end(self) -> list[Part]:
        """Implement `Parser`."""
        self._reader.ended = True
        return self._go()

    def _go(self) -> list[Part]:
        next(self._steps, None)
        return self._out.collect()

    def _may_be_bare(self) -> bool:
        """Return True if a call without its marker may begin here."""
        if self._held:
            return has_bare_calls(self._calls) and not self._out.begun
        return not self._out.written

    def _read(self) -> Steps[None]:
        yield
        reader, out, thoughts = self._reader, self._out, self._format.thoughts
        while True:
            in_thoughts = self._kind is Reasoning
            markers = self._format.in_thoughts if in_thoughts else self._format.in_text
            kind = self._kind
            self._sought = markers
            marker = yield from reader.until(markers, partial(out.write, kind))
            self._sought = None
            if marker is None:
                out.end(kind)
                return
            if thoughts is not None and marker in thoughts:
                if in_thoughts and marker == thoughts[0] and out.written:
                    out.write(kind, marker)
                    continue
                self._kind = Reasoning if marker == thoughts[0] else Text
                out.marker()
            elif marker in self._format.silent:
                out.marker()
            elif self._calls is None or (marker in BARE and not self._may_be_bare()):
                out.write(kind, marker)
            else:
                reader.keep()
                if (yield from self._calls.read(marker, reader, self._sink)):
                    reader.kept()
                    out.marker()
                    out.begun |= not in_thoughts
                    if self._sink.rest:
                        out.write(kind, self._sink.rest)
                        self._sink.rest = ""
                else:
                    out.write(kind, marker + reader.kept())


class _Output:
    """Collector of an answer's parts, which omits white space next to markers."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.written = False
        """True if the current block has text."""
        self.begun = False
        """True if there was text or a call outside of reasoning."""
        self._after_marker = False
        self.spaces: list[str] = []
        """White space that belongs to a marker, if one follows."""

    def write(self, kind: type[Part], text: str) -> None:
        """Add a text."""
        if self._after_marker and not self.written:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self.parts.append(kind("".join([*self.spaces, body])))
            self.spaces.clear()
            self.written = True
            self.begun |= kind is Text
        if len(text) > len(body):
            self.spaces.append(text[len(body) :])

    def marker(self) -> None:
        """Begin a new block."""
        self.spaces.clear()
        self._after_marker, self.written = True, False

    def end(self, kind: type[Part]) -> None:
        """End the answer."""
        if self.spaces:
            self.parts.append(kind("".join(self.spaces)))
            self.spaces.clear()

    def collect(self) -> list[Part]:
        """Return the parts since the last call."""
        parts = self.parts[:]
        self.parts.clear()
        return parts
