"""Interfaces of the grammar backends."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec

MAX_FORCED = 8
"""Maximum number of tokens of a request that are drafted because its grammar forces them."""

# Texts, comments, character classes; and outside of them a token, e.g. <[10]>, !<think>.
_EBNF_PARTS = re.compile(r'"(?:\\.|[^"\\])*"?|#.*|(!?<[^<>\s]+>)|\[(?:\\.|[^\]\\])*\]?')


class Grammar(ABC):
    """State of one request in its grammar. Only one thread at a time may use it.

    Its methods raise GrammarError if the grammar exceeds the backend's limits.
    """

    @abstractmethod
    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Advance by the tokens up to the first that the grammar does not allow.

        Returns:
            Number of accepted tokens. A stop token is accepted where the grammar may end; it ends
            the grammar.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the acceptance of the last tokens."""

    @abstractmethod
    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Write the allowed next tokens: int32 [ceil(vocab / 32)], as in `Ops.apply_bitmask_`.

        After the end of the grammar only stop tokens are allowed.
        """

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """True if a stop token has ended the grammar."""

    @abstractmethod
    def forced_tokens(self, most: int) -> list[int]:
        """Return tokens of the text that the grammar forces, as the tokenizer would split it.

        The engine uses them as drafts.

        Args:
            most: maximum number of tokens.
        """


class CompiledGrammar(ABC):
    """A grammar for a tokeniser, shared by all requests with it."""

    stop_token_ids: frozenset[int]
    """Stop tokens, which end the grammar."""

    @abstractmethod
    def start(self) -> Grammar:
        """Return the state of a request without output. Any thread may call it."""


class GrammarBackend(ABC):
    """Compiler of grammars. Several threads may call its methods."""

    name: str

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar.

        Raises:
            GrammarError: the grammar is invalid, too large, or has a part that this backend does
                not support; the message names it.
        """


def check_satisfiable(compiled: CompiledGrammar, vocab_size: int, name: str) -> None:
    """Reject a grammar that allows no first token.

    Raises:
        GrammarError: no text satisfies the grammar.
    """
    row = np.zeros(-(-vocab_size // 32), np.int32)
    compiled.start().fill_bitmask(row)
    if not row.any():
        raise GrammarError(f"{name}: the grammar allows no text; correct it.")


def is_ebnf(text: str) -> bool:
    """Return True if a grammar is written in EBNF (GBNF) rather than Lark."""
    return any(
        line.split("::=", 1)[0].strip().replace("_", "").replace("-", "").isalnum()
        for line in text.splitlines()
        if "::=" in line
    )


def check_ebnf(text: str) -> None:
    """Reject llama.cpp's tokens in EBNF, which no backend supports.

    Raises:
        GrammarError: the text has such a token.
    """
    for part in _EBNF_PARTS.finditer(text):
        if part[1]:
            raise GrammarError(
                f"The grammar names a token, {part[1][:50]}, as llama.cpp does; tokens are not "
                'supported in EBNF. Write the text of the token in quotes, e.g. "<think>".'
            )
