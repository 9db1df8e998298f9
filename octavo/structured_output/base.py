"""What every grammar backend is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec

MAX_FORCED = 8
"""Most tokens of a request that are drafted because its grammar leaves no other way."""

# Texts, comments, character classes; and outside of these a token, e.g. <[10]>, !<think>.
_EBNF_PARTS = re.compile(r'"(?:\\.|[^"\\])*"?|#.*|(!?<[^<>\s]+>)|\[(?:\\.|[^\]\\])*\]?')


class Grammar(ABC):
    """Where one request stands in its grammar. Not to be used by two threads at once.

    Its methods raise GrammarError where the grammar takes more than the backend's limits.
    """

    @abstractmethod
    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Advances by tokens, up to the first that the grammar does not allow.

        Returns:
            How many were accepted. A stop token where the grammar may end is accepted, and ends it.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens."""

    @abstractmethod
    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Writes which tokens may come next: int32 [ceil(vocab / 32)], as in `Ops.apply_bitmask_`.

        Once the grammar has ended stop tokens are allowed, and nothing else.
        """

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether a stop token has ended it."""

    @abstractmethod
    def forced_tokens(self, most: int) -> list[int]:
        """Tokens of the text that must come next, as the tokeniser would have it: drafts.

        Args:
            most: no more than these.
        """


class CompiledGrammar(ABC):
    """A grammar for a tokeniser, shared by all requests with it."""

    stop_token_ids: frozenset[int]
    """Tokens that end it."""

    @abstractmethod
    def start(self) -> Grammar:
        """The state of a request without output. From any thread."""


class GrammarBackend(ABC):
    """Compiles grammars. Its methods may be called by several threads."""

    name: str

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compiles a grammar.

        Raises:
            GrammarError: it is invalid, too large, or has a part that this backend cannot honour;
                the message names it.
        """


def check_satisfiable(compiled: CompiledGrammar, vocab_size: int, name: str) -> None:
    """Refuses a grammar that allows no first token.

    Raises:
        GrammarError: nothing satisfies it.
    """
    row = np.zeros(-(-vocab_size // 32), np.int32)
    compiled.start().fill_bitmask(row)
    if not row.any():
        raise GrammarError(f"{name}: the grammar allows no text at all; mend it.")


def is_ebnf(text: str) -> bool:
    """Whether a grammar is written in EBNF (GBNF) rather than Lark."""
    return any(
        line.split("::=", 1)[0].strip().replace("_", "").replace("-", "").isalnum()
        for line in text.splitlines()
        if "::=" in line
    )


def check_ebnf(text: str) -> None:
    """Refuse llama.cpp's tokens in EBNF, which no backend has.

    Raises:
        GrammarError: there is one.
    """
    for part in _EBNF_PARTS.finditer(text):
        if part[1]:
            raise GrammarError(
                f"The grammar names a token, {part[1][:50]}, as llama.cpp does; tokens are not "
                'supported in EBNF. Write the text of the token in quotes, e.g. "<think>".'
            )
