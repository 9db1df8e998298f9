"""Parts of an answer, which a parser makes from the engine's text."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Part(msgspec.Struct, frozen=True, gc=False):
    """Piece of an answer's text; the subclass is its kind."""

    text: str


class Role(Part, frozen=True, gc=False):
    """Role of the message."""


class Text(Part, frozen=True, gc=False):
    """Text for the reader."""


class Reasoning(Part, frozen=True, gc=False):
    """Thoughts of the model."""


class CallStart(Part, frozen=True, gc=False):
    """Name of the function of a new tool call; the calls of an answer are numbered from 0."""

    id: str | None = None
    """Id of the call if the model wrote one."""


class CallArguments(Part, frozen=True, gc=False):
    """Piece of the JSON text of the newest call's arguments."""


class Parser(Protocol):
    """Parser of the text of one choice, which may arrive in pieces."""

    def feed(self, text: str) -> list[Part]:
        """Parse the next piece; return the new parts that later pieces cannot change."""

    def end(self) -> list[Part]:
        """Return the remaining parts, after the last piece."""
