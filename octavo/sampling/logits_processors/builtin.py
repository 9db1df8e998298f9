"""The processors that exclude or favour single tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.kernels.memory import to_device
from octavo.messages import NO_TOKEN, BadWordsTokenIds, CoreSamplingParams
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, StepRows

IntArray = NDArray[np.int32]

# Padding of the tail of generated tokens: equal to no token, nor to the padding of bad words.
_NOTHING_YET = -2


class GrammarBitmask(LogitsProcessor):
    """What the grammars of some rows allow in one step: made for it, and given with it.

    Args:
        at: int64 [G], rows of the logits; none twice.
        words: int32 [G, ceil(V / 32)] as in `Ops.apply_bitmask_`.
    """

    def __init__(self, at: LongArray, words: IntArray) -> None:
        self.at, self.words = at, words

    def add_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> bool:
        """It keeps nothing."""
        return False

    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Excludes all other tokens."""
        # What came in a message cannot be written to, which torch warns of.
        words = np.require(self.words, requirements="W")
        ops.apply_bitmask_(logits, to_device(words, logits.device), _at(step, logits))


class AllowedTokenIds(LogitsProcessor):
    """`allowed_token_ids`: excludes all other tokens."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._bitmasks: dict[int, IntArray] = {}

    def add_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> bool:
        """Refers to the request's bitmask."""
        if params.allowed_token_ids is None:
            return False
        self._bitmasks[row] = np.frombuffer(params.allowed_token_ids, np.int32)
        return True

    def remove_row(self, row: int) -> None:
        """Lets go of the bitmask."""
        self._bitmasks.pop(row, None)

    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Excludes all other tokens."""
        words = np.stack([self._bitmasks[row] for row in step.rows.tolist()])
        ops.apply_bitmask_(logits, to_device(words, logits.device), _at(step, logits))


@dataclass(slots=True)
class _Words:
    """A row's bad words, and the end of what it has generated."""

    prefixes: IntArray
    """[words, longest - 1], all but the last token, padded on the left with `NO_TOKEN`."""
    last: IntArray
    """[words]"""
    tail: IntArray
    """[longest - 1], the last generated tokens, padded on the left with `_NOTHING_YET`."""

    def append(self, token: int) -> None:
        if len(self.tail):
            self.tail[:-1] = self.tail[1:]
            self.tail[-1] = token

    def banned(self) -> LongArray:
        """The tokens that would complete a bad word."""
        prefixes, last = self.prefixes, self.last
        if len(self.tail):  # most words can be ruled out by one token
            newest = prefixes[:, -1]
            some = (newest == self.tail[-1]) | (newest == NO_TOKEN)
            prefixes, last = prefixes[some], last[some]
        matches = (prefixes == self.tail) | (prefixes == NO_TOKEN)
        tokens: LongArray = last[matches.all(axis=1)].astype(np.int64)
        return tokens


class BadWords(LogitsProcessor):
    """`bad_words`: excludes the last token of each word whose other tokens were just generated."""

    needs_tokens = True

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._words: dict[int, _Words] = {}
        self._banned: dict[int, LongArray] = {}
        """By row; rows where nothing is excluded now are not there."""

    def add_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> bool:
        """Refers to the request's words; the prompt does not count."""
        if params.bad_words is None:
            return False
        self._words[row] = _make_words(params.bad_words, token_ids[num_prompt_tokens:])
        self._find(row)
        return True

    def remove_row(self, row: int) -> None:
        """Lets go of the words."""
        self._words.pop(row, None)
        self._banned.pop(row, None)

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Moves on by one token."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._words[row].append(token)
            self._find(row)

    def select(self, step: StepRows) -> StepRows:
        """The rows that have just generated the beginning of a word, or have words of one token."""
        return step.take(np.asarray([row in self._banned for row in step.rows.tolist()], np.bool_))

    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Excludes the tokens."""
        logits[_entries(step, self._banned, logits)] = -math.inf

    def _find(self, row: int) -> None:
        banned = self._words[row].banned()
        if len(banned):
            self._banned[row] = banned
        else:
            self._banned.pop(row, None)


class MinTokens(LogitsProcessor):
    """`min_tokens`: excludes stop tokens until that many tokens have been generated."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._min_tokens = np.zeros(max_num_rows, np.int64)
        self._stop_ids: dict[int, LongArray] = {}

    def add_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> bool:
        """Keeps the stop tokens that the model can generate."""
        if params.min_tokens <= len(token_ids) - num_prompt_tokens:
            return False
        stops = [t for t in params.all_stop_token_ids if t < self.vocab_size]
        if not stops:
            return False
        self._min_tokens[row] = params.min_tokens
        self._stop_ids[row] = np.asarray(stops, np.int64)
        return True

    def remove_row(self, row: int) -> None:
        """Lets go of the stop tokens."""
        self._stop_ids.pop(row, None)

    def select(self, step: StepRows) -> StepRows:
        """The rows that have generated too little yet."""
        return step.take(step.num_output_tokens < self._min_tokens[step.rows])

    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Excludes the stop tokens."""
        logits[_entries(step, self._stop_ids, logits)] = -math.inf


class LogitBias(LogitsProcessor):
    """`logit_bias`: is added to the logits of given tokens."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._token_ids: dict[int, LongArray] = {}
        self._values: dict[int, NDArray[np.float32]] = {}

    def add_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> bool:
        """Refers to the request's values."""
        if params.logit_bias is None:
            return False
        ids, values = params.logit_bias
        self._token_ids[row] = np.frombuffer(ids, np.int32).astype(np.int64)
        self._values[row] = np.frombuffer(values, np.float32)
        return True

    def remove_row(self, row: int) -> None:
        """Lets go of the values."""
        self._token_ids.pop(row, None)
        self._values.pop(row, None)

    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Adds the values."""
        values = np.concatenate([self._values[row] for row in step.rows.tolist()])
        logits[_entries(step, self._token_ids, logits)] += to_device(values, logits.device)


def _at(step: StepRows, logits: torch.Tensor) -> torch.Tensor:
    return to_device(step.at, logits.device)


def _entries(
    step: StepRows, token_ids: dict[int, LongArray], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's tokens as an index into the logits: parallel int64 [E]."""
    ids = [token_ids[row] for row in step.rows.tolist()]
    rows = np.repeat(step.at, [len(some) for some in ids])
    return to_device(rows, logits.device), to_device(np.concatenate(ids), logits.device)


def _make_words(words: BadWordsTokenIds, output: Sequence[int]) -> _Words:
    last = np.frombuffer(words.last, np.int32)
    prefixes = np.frombuffer(words.prefixes, np.int32).reshape(len(last), -1)
    longest = prefixes.shape[1]
    result = _Words(prefixes, last, np.full(longest, _NOTHING_YET, np.int32))
    for token in output[max(0, len(output) - longest) :]:
        result.append(token)
    return result
