"""Exclusion of sequences of tokens that an answer already contains."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.kernels.base import Ops
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, NewRow, StepRows
from octavo.system.tensor import Tensor

KEY = "no_repeat_ngram_size"
"""Key of the size in `extra_args`."""

# Base of the hashes, and its inverse modulo 2**64.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
_MASK = 2**64 - 1


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
    the decoder's part of an encoder-decoder's. The tokens before each token have a polynomial hash
    modulo 2**64 (Karp and Rabin, "Efficient randomized pattern-matching algorithms", 1987), so the
    work for a token does not depend on the size. Two sequences of a text have the same hash by
    chance with a probability of 2**-64.

    Args:
        size: number of tokens of a sequence, at least 1.
        tokens: the tokens so far.
    """

    def __init__(self, size: int, tokens: Sequence[int]) -> None:
        before = min(size - 1, len(tokens) + 2**32)  # more than any answer has
        self._before = before
        self._drop = pow(_BASE, before + 1, 2**64)
        self._last: deque[int] = deque(tokens[max(0, len(tokens) - before) :], before)
        """The tokens before the next one that count."""
        self._hash = 0
        """Their hash."""
        for token in self._last:
            self._hash = (self._hash + token) * _BASE & _MASK
        hashes, following = _hash_all(before, tokens)
        self._count = len(hashes)
        room = np.zeros(self._count + 64, np.uint64)
        self._hashes = np.concatenate([hashes, room])
        """Hash of the `before` tokens before each of some tokens."""
        self._following = np.concatenate([following, room.astype(np.int64)])
        """These tokens."""

    def append(self, token: int) -> None:
        """Add a token."""
        oldest = 0
        if len(self._last) == self._before:
            if self._count == len(self._hashes):
                self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
                self._following = np.concatenate([self._following, np.zeros_like(self._following)])
            self._hashes[self._count], self._following[self._count] = self._hash, token
            self._count += 1
            oldest = self._last[0] if self._before else token
        self._hash = ((self._hash + token) * _BASE - oldest * self._drop) & _MASK
        self._last.append(token)

    def banned(self) -> LongArray:
        """Return the tokens that may not come next, int64 [tokens], without duplicates."""
        if len(self._last) < self._before:
            return np.empty(0, np.int64)
        same = self._hashes[: self._count] == np.uint64(self._hash)
        return np.unique(self._following[: self._count][same])


def _hash_all(before: int, tokens: Sequence[int]) -> tuple[NDArray[np.uint64], LongArray]:
    """Return the hash of the `before` tokens before each token, and the token.

    Tokens that do not have as many before them are left out, and so are pairs that occur again.
    """
    count = len(tokens)
    if count <= before:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    ids = np.array(tokens, np.int64)
    # sums[i]: the sum of tokens[k] * _BASE**-k over k < i
    sums = np.zeros(count + 1, np.uint64)
    np.cumsum(ids.astype(np.uint64) * _powers(_INVERSE, count), out=sums[1:])
    hashes = (sums[before:count] - sums[: count - before]) * _powers(_BASE, count)[before:]
    following = ids[before:]
    first = np.unique(hashes * np.uint64(_BASE) + following.astype(np.uint64), return_index=True)[1]
    return hashes[first], following[first]


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """Return the powers of a number from 0, modulo 2**64: [count]."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


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
        """Exclude the tokens; those of a prompt may have no logits."""
        banned = [self._rows[row].banned() for row in step.rows.tolist()]
        banned = [some[some < self.vocab_size] for some in banned]
        columns = np.concatenate(banned)
        if len(columns):
            at = np.repeat(step.at, [len(some) for some in banned])
            ops.set_at_(logits, at, columns, -math.inf)
