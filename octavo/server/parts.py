"""Parts of an answer: a parser makes them from the engine's text, a writer turns them into JSON."""

from __future__ import annotations

from typing import Protocol

import msgspec

from octavo.outputs import CompletionOutput, RequestOutput


class Part(msgspec.Struct, frozen=True, gc=False):
    """Piece of an answer's text; the subclass is its kind."""

    text: str


class Role(Part, frozen=True, gc=False):
    """Role of the message."""


class Text(Part, frozen=True, gc=False):
    """Text for the reader."""


class Reasoning(Part, frozen=True, gc=False):
    """Thoughts of the model before its answer."""


class Parser(Protocol):
    """Parser of the text of one choice, which may arrive in pieces."""

    def feed(self, text: str) -> list[Part]:
        """Parse the next piece; return the new parts that later pieces cannot change."""

    def end(self) -> list[Part]:
        """Return the remaining parts, after the last piece."""


class Delta(msgspec.Struct, gc=False):
    """New parts of one choice; without streaming, all its parts."""

    index: int
    """Number of the choice in the answer."""
    prompt: int
    """Number of the prompt in the request."""
    parts: list[Part]
    completion: CompletionOutput
    """Tokens, logprobs, finish and stop reason of the choice. Its text is in `parts`."""
    output: RequestOutput
    """Output that contains `completion`, with data about the prompt."""


def fold(parts: list[Part]) -> dict[type[Part], str]:
    """Return the joined text of each kind of part."""
    texts: dict[type[Part], str] = {}
    for part in parts:
        kind = type(part)
        texts[kind] = texts[kind] + part.text if kind in texts else part.text
    return texts
