"""Cases of the suite of tool calls and reasoning: texts of models, and their parts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

FILE = Path(__file__).with_name("cases.jsonl")
FILLER = "%FILLER%"
"""Placeholder in a long case's text and arguments, which a long text replaces."""


class Call(msgspec.Struct, frozen=True):
    """Call that a text contains."""

    name: str
    arguments: dict[str, Any]
    text: str | None = None
    """Text of the arguments; None: the format has an element for each argument, and the server
    makes the JSON."""


class Case(msgspec.Struct, frozen=True, omit_defaults=True):
    """Text that a model writes, and its parts."""

    id: str
    format: str
    text: str
    content: list[str] = []
    """Blocks of text, in order; between blocks a server may leave white space."""
    reasoning: list[str] = []
    """Blocks of reasoning."""
    calls: list[Call] = []
    subject: str | None = None
    """Law with cases of its own that the case tries; None: only the laws of every case."""
    cuts: bool = False
    """True if the suite also tries an answer that max_tokens cuts."""
    tools: list[dict[str, Any]] = []
    """Tools of the request, in OpenAI's form."""

    @property
    def is_long(self) -> bool:
        """True if the text has a place for a long text."""
        return FILLER in self.text

    def filled(self, size: int) -> Case:
        """Return the case with a text of `size` characters in its place."""
        filler = ("word < [x] { " * (size // 13 + 1))[:size].rstrip().ljust(size, ".")
        whole = msgspec.json.encode(self).decode().replace(FILLER, filler)
        return msgspec.json.decode(whole, type=Case)


def read_cases(file: Path = FILE) -> list[Case]:
    """Return all cases of a file."""
    lines = file.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Case) for line in lines if line]


def formats_of(cases: Iterable[Case]) -> list[str]:
    """Return the names of the formats of cases."""
    return sorted({case.format for case in cases})
