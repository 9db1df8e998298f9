"""What every grammar backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.messages import GrammarSpec


class Grammar(ABC):
    """Where one request stands in its grammar. Not to be used by two threads at once."""

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

    nbytes: int
    """Memory that it takes, about."""

    @abstractmethod
    def start(self) -> Grammar:
        """The state of a request without output."""


class GrammarBackend(ABC):
    """Compiles grammars. Its methods may be called by several threads."""

    name: str

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compiles a grammar.

        Raises:
            RequestError: it is invalid, too large, or has a part that this backend cannot honour;
                the message names it, `param` is the field that it came in.
        """
