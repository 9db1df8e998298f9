"""Exclusion of sequences of tokens that an answer already contains."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.kernels.base import Ops
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, NewRow, StepRows
from octavo.system.tensor import Tensor

KEY = "no_repeat_ngram_size"
"""Key of the size in `extra_args`."""


def read_size(value: object) -> int:
    """Return the size of the sequences; 0: all may occur again.

    Raises:
        RequestError: it is not a whole number from 0.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RequestError(
            f"extra_args.{KEY}={str(value)[:40]} is not allowed; it is a whole number, 0 or more.",
            "extra_args",
        )
    return value


class NGrams:
    """Tokens so far, and those that would complete a sequence of `size` tokens again.

    These are the rules of transformers' `NoRepeatNGramLogitsProcessor`: the prompt counts, which is
    the decoder's part of an encoder-decoder's.

    Args:
        size: number of tokens of a sequence, at least 1.
        tokens: the tokens so far.
    """

    def __init__(self, size: int, tokens: Sequence[int]) -> None:
        self._size, self._count = size, len(tokens)
        self._tokens = np.empty(max(64, 2 * len(tokens)), np.int32)
        self._tokens[: self._count] = tokens

    def append(self, token: int) -> None:
        """Add a token."""
        if self._count == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self._count] = token
        self._count += 1

    def banned(self) -> LongArray:
        """Return the tokens that may not come next, int64 [tokens], without duplicates."""
        tokens, before = self._tokens[: self._count], self._size - 1
        if before >= len(tokens):
            return np.empty(0, np.int64)
        # Places of all tokens that follow `before` others
        at: NDArray[np.int64] = np.arange(before, len(tokens))
        for k in range(1, before + 1):
            at = at[tokens[at - k] == tokens[-k]]
        return np.unique(tokens[at]).astype(np.int64)


class RepeatedNGrams(LogitsProcessor):
    """Processor of `no_repeat_ngram_size` in `extra_args`."""

    extra_args = frozenset({KEY})
    needs_tokens = True

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._rows: dict[int, NGrams] = {}

    def add_row(self, new: NewRow) -> bool:
        """Read the request's size.

        Raises:
            RequestError: it is wrong.
        """
        size = read_size((new.params.extra_args or {}).get(KEY, 0))
        if size:
            self._rows[new.row] = NGrams(size, new.token_ids)
        return size > 0

    def remove_row(self, row: int) -> None:
        """Drop the tokens."""
        self._rows.pop(row, None)

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Add a token to each of some answers."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._rows[row].append(token)

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Exclude the tokens."""
        banned = [self._rows[row].banned() for row in step.rows.tolist()]
        columns = np.concatenate(banned)
        if len(columns):
            at = np.repeat(step.at, [len(some) for some in banned])
            ops.set_at_(logits, at, columns, -math.inf)
