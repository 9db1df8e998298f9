"""Reader of a text that arrives in pieces.

A function that reads is a generator (`Steps`). It yields when it needs more text, and continues
once there is more text, or the text has ended. So it is written as if the text were whole. The time
is linear in the length of the text: a function leaves no more unread than a marker's beginning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

_SPACES = re.compile(r"\s*")
_IN_STRING = re.compile(r'["\\]')
_OUT_OF_STRING = re.compile(r"[^\s\w.+:,-]")
_SCALAR = re.compile(r"[\w.+-]*")


def ignore(text: str) -> None:
    """Drop a text."""


class Markers:
    """Texts that `Reader.until` looks for; one may contain another only at its end.

    Args:
        markers: the texts.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(dict.fromkeys(markers))
        for one in self.markers:
            for other in self.markers:
                assert one == other or one not in other[:-1], (one, other)
        self._search = re.compile("|".join(map(re.escape, self.markers))).search
        self._starts = {marker[:n] for marker in self.markers for n in range(1, len(marker))}
        self._firsts = frozenset(marker[0] for marker in self.markers)
        self.cannot_begin_in = self._firsts.isdisjoint
        """Function of a text: True if certainly no marker begins in the text."""
        self._longest = max(map(len, self.markers), default=1)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """Return the first marker from a position on."""
        return self._search(text, at) if self.markers else None

    def certain(self, text: str, at: int) -> int:
        """Return the position up to which the text from `at` on is no beginning of a marker."""
        for i in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[i] in self._firsts and text[i:] in self._starts:
                return i
        return len(text)


class Reader:
    """Text that arrives in pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.ended = False
        """True if no more text will arrive."""
        self._kept: list[str] | None = None

    @property
    def is_empty(self) -> bool:
        """True if all text that has arrived is read."""
        return self._at == len(self._text)

    def add(self, text: str) -> None:
        """Add the next piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def keep(self) -> None:
        """Keep the text that is read from now on."""
        self._kept = []

    def kept(self) -> str:
        """Return the text that was read since `keep`, and stop keeping it."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def take(self, count: int) -> str:
        """Read `count` characters, which have arrived."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(text)
        return text

    def char(self) -> Steps[str]:
        """Return the next character without reading it; an empty text at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def spaces(self) -> Steps[None]:
        """Read white space."""
        while True:
            match = _SPACES.match(self._text, self._at)
            assert match is not None
            self.take(match.end() - self._at)
            if self._at < len(self._text) or self.ended:
                return
            yield

    def literal(self, text: str) -> Steps[bool]:
        """Read a text if it is the next one; return False without reading if it is not."""
        found = yield from self.follows(text)
        if found:
            self.take(len(text))
        return found

    def follows(self, text: str) -> Steps[bool]:
        """Return True if a text is the next one; read nothing."""
        while True:
            found = self._text[self._at : self._at + len(text)]
            if found == text:
                return True
            if self.ended or not text.startswith(found):
                return False
            yield

    def run(self, pattern: re.Pattern[str], most: int) -> Steps[str]:
        """Read the longest text of characters that `pattern` (of the form `[...]*`) matches.

        Reading stops after `most` characters, or up to one piece of the text later.
        """
        pieces: list[str] = []
        length = 0
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            pieces.append(self.take(match.end() - self._at))
            length += len(pieces[-1])
            if self._at < len(self._text) or self.ended or length > most:
                return "".join(pieces)
            yield

    def until(self, markers: Markers, emit: Emit) -> Steps[str | None]:
        """Read up to the first marker, and the marker itself.

        Args:
            markers: texts to look for.
            emit: receives the text before the marker, as it arrives.

        Returns:
            The marker, or None at the end of the text.
        """
        while True:
            found = markers.find(self._text, self._at)
            if found is not None:
                if found.start() > self._at:
                    emit(self.take(found.start() - self._at))
                return self.take(len(found.group()))
            end = len(self._text) if self.ended else markers.certain(self._text, self._at)
            if end > self._at:
                emit(self.take(end - self._at))
            if self.ended:
                return None
            yield

    def python_value(self, emit: Emit) -> Steps[bool]:
        """Read a Python literal up to a comma, or to a bracket that it did not open.

        Args:
            emit: receives its text as it arrives.

        Returns:
            False if the text ends before.
        """
        depth, quote = 0, ""
        while True:
            text, size, i = self._text, len(self._text), self._at
            done = False
            while i < size:
                char = text[i]
                if quote:
                    if char == "\\":
                        if i + 1 == size and not self.ended:
                            break
                        i += 1
                    elif char == quote:
                        quote = ""
                elif char in "'\"":
                    quote = char
                elif char in "([{":
                    depth += 1
                elif (char in ")]}" and depth == 0) or (char == "," and depth == 0):
                    done = True
                    break
                elif char in ")]}":
                    depth -= 1
                i += 1
            i = min(i, size)
            if i > self._at:
                emit(self.take(i - self._at))
            if done or self.ended:
                return done
            yield

    def json_string(self) -> Steps[str | None]:
        """Read a JSON string, and return its value; None if it is none."""
        if not (yield from self.literal('"')):
            return None
        pieces = ['"']
        while True:
            i, size = self._at, len(self._text)
            closed = False
            while i < size and not closed:
                match = _IN_STRING.search(self._text, i)
                if match is None:
                    i = size
                elif match.group() == '"':
                    i, closed = match.end(), True
                elif match.end() < size:
                    i = match.end() + 1
                else:
                    break
            if self.ended and not closed:
                i = size
            pieces.append(self.take(i - self._at))
            if closed or self.ended:
                break
            yield
        try:
            value = json.loads("".join(pieces), strict=False)
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def json_value(self, emit: Emit) -> Steps[bool]:
        """Read a JSON value.

        Args:
            emit: receives its text as it arrives.

        Returns:
            False if the text ends before the value does, or if the next character cannot belong
            to it.
        """
        first = yield from self.char()
        if first not in ("{", "[", '"'):
            empty = True
            while True:
                match = _SCALAR.match(self._text, self._at)
                assert match is not None
                if match.end() > self._at:
                    emit(self.take(match.end() - self._at))
                    empty = False
                if self._at < len(self._text) or self.ended:
                    return not empty
                yield
        depth, inside = 0, False
        while True:
            text, size, i = self._text, len(self._text), self._at
            state = ""
            while i < size:
                match = (_IN_STRING if inside else _OUT_OF_STRING).search(text, i)
                if match is None:
                    i = size
                    break
                char, i = match.group(), match.end()
                if char == "\\":
                    if i == size and not self.ended:
                        i -= 1
                        break
                    i = min(i + 1, size)
                elif char == '"':
                    inside = not inside
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                else:
                    state, i = "wrong", match.start()
                    break
                if depth == 0 and not inside:
                    state = "whole"
                    break
            if i > self._at:
                emit(self.take(i - self._at))
            if state or self.ended:
                return state == "whole"
            yield
