"""Processors that exclude or favour single tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.messages import NO_TOKEN, BadWordsTokenIds
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, NewRow, StepRows
from octavo.system.tensor import Tensor

IntArray = NDArray[np.int32]

# Padding of the tail of generated tokens: differs from all tokens and from bad words' padding.
_NOTHING_YET = -2


class GrammarBitmask(LogitsProcessor):
    """Processor with the tokens that the grammars of some rows allow in one step.

    It is created for one step.

    Args:
        at: int64 [G], rows of the logits, without duplicates.
        words: int32 [G, ceil(V / 32)] as in `Ops.apply_bitmask_`.
    """

    def __init__(self, at: LongArray, words: IntArray) -> None:
        self.at, self.words = at, words

    def add_row(self, new: NewRow) -> bool:
        """Return False: it keeps no state."""
        return False

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Exclude all other tokens."""
        ops.apply_bitmask_(logits, ops.to_device(self.words), ops.to_device(step.at))


class AllowedTokenIds(LogitsProcessor):
    """Processor of `allowed_token_ids`: excludes all other tokens."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._bitmasks: dict[int, IntArray] = {}

    def add_row(self, new: NewRow) -> bool:
        """Refer to the request's bitmask."""
        if new.params.allowed_token_ids is None:
            return False
        self._bitmasks[new.row] = np.frombuffer(new.params.allowed_token_ids, np.int32)
        return True

    def remove_row(self, row: int) -> None:
        """Drop the bitmask."""
        self._bitmasks.pop(row, None)

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Exclude all other tokens."""
        words = np.stack([self._bitmasks[row] for row in step.rows.tolist()])
        ops.apply_bitmask_(logits, ops.to_device(words), ops.to_device(step.at))


@dataclass(slots=True)
class _Words:
    """Bad words of a row, and the end of its generated tokens."""

    prefixes: IntArray
    """[words, longest - 1], all tokens except the last, padded on the left with `NO_TOKEN`."""
    last: IntArray
    """[words], last token of each."""
    tail: IntArray
    """[longest - 1], the last generated tokens, padded on the left with `_NOTHING_YET`."""

    def append(self, token: int) -> None:
        if len(self.tail):
            self.tail[:-1] = self.tail[1:]
            self.tail[-1] = token

    def banned(self) -> LongArray:
        """Return the tokens that would complete a bad word."""
        prefixes, last = self.prefixes, self.last
        if len(self.tail):  # one token rules out most words
            newest = prefixes[:, -1]
            some = (newest == self.tail[-1]) | (newest == NO_TOKEN)
            prefixes, last = prefixes[some], last[some]
        matches = (prefixes == self.tail) | (prefixes == NO_TOKEN)
        tokens: LongArray = last[matches.all(axis=1)].astype(np.int64)
        return tokens


class BadWords(LogitsProcessor):
    """Processor of `bad_words`: excludes the last token of a word after its other tokens."""

    needs_tokens = True

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._words: dict[int, _Words] = {}
        self._banned: dict[int, LongArray] = {}
        """Excluded tokens by row; only rows with some."""

    def add_row(self, new: NewRow) -> bool:
        """Refer to the request's words; the prompt does not count."""
        if new.params.bad_words is None:
            return False
        self._words[new.row] = _make_words(new.params.bad_words, new.output_token_ids)
        self._find(new.row)
        return True

    def remove_row(self, row: int) -> None:
        """Drop the words."""
        self._words.pop(row, None)
        self._banned.pop(row, None)

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Advance by one token."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._words[row].append(token)
            self._find(row)

    def select(self, step: StepRows) -> StepRows:
        """Return the rows that just generated the beginning of a word, or have one-token words."""
        return step.take(np.asarray([row in self._banned for row in step.rows.tolist()], np.bool_))

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Exclude the tokens."""
        ops.set_at_(logits, *_entries(step, self._banned), -math.inf)

    def _find(self, row: int) -> None:
        banned = self._words[row].banned()
        if len(banned):
            self._banned[row] = banned
        else:
            self._banned.pop(row, None)


class MinTokens(LogitsProcessor):
    """Processor of `min_tokens`: excludes stop tokens until enough tokens have been generated."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._min_tokens = np.zeros(max_num_rows, np.int64)
        self._stop_ids: dict[int, LongArray] = {}

    def add_row(self, new: NewRow) -> bool:
        """Keep the stop tokens that the model can generate."""
        if new.params.min_tokens <= len(new.output_token_ids):
            return False
        stops = [t for t in new.params.all_stop_token_ids if t < self.vocab_size]
        if not stops:
            return False
        self._min_tokens[new.row] = new.params.min_tokens
        self._stop_ids[new.row] = np.asarray(stops, np.int64)
        return True

    def remove_row(self, row: int) -> None:
        """Drop the stop tokens."""
        self._stop_ids.pop(row, None)

    def select(self, step: StepRows) -> StepRows:
        """Return the rows with fewer tokens than the minimum."""
        return step.take(step.num_output_tokens < self._min_tokens[step.rows])

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Exclude the stop tokens."""
        ops.set_at_(logits, *_entries(step, self._stop_ids), -math.inf)


class LogitBias(LogitsProcessor):
    """Processor of `logit_bias`: adds to the logits of given tokens."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._token_ids: dict[int, LongArray] = {}
        self._values: dict[int, NDArray[np.float32]] = {}

    def add_row(self, new: NewRow) -> bool:
        """Refer to the request's values."""
        if new.params.logit_bias is None:
            return False
        ids, values = new.params.logit_bias
        self._token_ids[new.row] = np.frombuffer(ids, np.int32).astype(np.int64)
        self._values[new.row] = np.frombuffer(values, np.float32)
        return True

    def remove_row(self, row: int) -> None:
        """Drop the values."""
        self._token_ids.pop(row, None)
        self._values.pop(row, None)

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Add the values."""
        values = np.concatenate([self._values[row] for row in step.rows.tolist()])
        ops.add_at_(logits, *_entries(step, self._token_ids), values)


def _entries(step: StepRows, token_ids: dict[int, LongArray]) -> tuple[LongArray, LongArray]:
    """Return each row's tokens as places in the logits: rows and columns, int64 [E]."""
    ids = [token_ids[row] for row in step.rows.tolist()]
    return np.repeat(step.at, [len(some) for some in ids]), np.concatenate(ids)


def _make_words(words: BadWordsTokenIds, output: Sequence[int]) -> _Words:
    last = np.frombuffer(words.last, np.int32)
    prefixes = np.frombuffer(words.prefixes, np.int32).reshape(len(last), -1)
    longest = prefixes.shape[1]
    result = _Words(prefixes, last, np.full(longest, _NOTHING_YET, np.int32))
    for token in output[max(0, len(output) - longest) :]:
        result.append(token)
    return result
