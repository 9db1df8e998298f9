"""A grammar backend of tests: words over the tokens' ids, by rules as plain as can be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from octavo.structured_output.base import CompiledGrammar, Grammar, GrammarBackend

STOP = 1


class ToyGrammar(Grammar):
    """Token i of an answer must be one of `rule(i)`; none: the answer ends there."""

    def __init__(self, rule: Callable[[int], Sequence[int]]) -> None:
        self.rule, self.tokens = rule, []

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if self.is_terminated or token not in (self.rule(len(self.tokens)) or [STOP]):
                return count
            self.tokens.append(token)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        row[:] = 0
        for token in [STOP] if self.is_terminated else self.rule(len(self.tokens)) or [STOP]:
            row[token // 32] |= np.uint32(1 << token % 32).view(np.int32)

    @property
    def is_terminated(self) -> bool:
        return STOP in self.tokens

    def forced_tokens(self, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and len(self.rule(len(self.tokens) + len(found))) == 1:
            found += self.rule(len(self.tokens) + len(found))
        return found


class ToyCompiled(CompiledGrammar):
    nbytes = 1000
    stop_token_ids = frozenset({STOP})

    def __init__(self, rule: Callable[[int], Sequence[int]]) -> None:
        self.rule = rule

    def start(self) -> Grammar:
        return ToyGrammar(self.rule)


class ToyBackend(GrammarBackend):
    """A grammar's text is a list of the tokens allowed at each place: "3,4 5 6,7".

    "bad ..." is refused; "slow ..." waits for `go`.
    """

    def __init__(self, name: str = "xgrammar") -> None:
        self.name = name
        self.compiled: list[str] = []
        self.go = threading.Event()
        self.running = threading.Semaphore(0)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        kind, _, rest = spec.text.partition(" ")
        if kind == "bad":
            raise GrammarError(f"{self.name} cannot {rest}")
        self.running.release()
        if kind == "slow":
            assert self.go.wait(20)
        else:
            rest = spec.text
        self.compiled.append(spec.text)
        places = [[int(t) for t in place.split(",")] for place in rest.split()]
        return ToyCompiled(lambda i: places[i] if i < len(places) else [])


def spec(text: str, backend: str = "auto") -> GrammarSpec:
    return GrammarSpec("grammar", text, backend)
