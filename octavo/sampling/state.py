"""The sampler's memory: persistent rows for the live requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.base import SAMPLING_ROW
from octavo.kernels.memory import to_device
from octavo.messages import NO_TOKEN, BadWordsTokenIds, CoreSamplingParams
from octavo.sampling import philox
from octavo.sampling.metadata import (
    NO_LOGPROBS,
    AllowedTokens,
    BiasEntries,
    GrammarBitmask,
    LogitEntries,
    PenaltyEntries,
    SamplingMetadata,
)
from octavo.sampling.sizes import rows_per_chunk

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
T = TypeVar("T")

# Counts of a token: the lowest bit says that it is in the prompt, the others count outputs.
_IN_PROMPT = 1
_ONE_OUTPUT = 2
# Padding of the tail of generated tokens: equal to no token, nor to the padding of bad words.
_NOTHING_YET = -2


@dataclass(slots=True)
class _BadWords:
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


class SamplingState:
    """One row of sampling state for each live request.

    All of it follows from the parameters and the tokens so far: a resumed request is `add_row`
    with all its tokens. A row that was never added, or was removed, is greedy and plain.
    The state is on the host; `sizes.state_nbytes` says how large it can grow.

    Args:
        max_num_rows: how many rows there are.
        vocab_size: width of the logits.
        device: where the logits are.
    """

    def __init__(
        self, max_num_rows: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._params = np.zeros(max_num_rows, SAMPLING_ROW)
        self._params["top_p"] = 1.0
        self._seeds = np.zeros(max_num_rows, np.uint64)
        self._num_output_tokens = np.zeros(max_num_rows, np.int64)
        self._min_tokens = np.zeros(max_num_rows, np.int64)
        self._num_logprobs = np.full(max_num_rows, NO_LOGPROBS, np.int64)

        # Penalties touch only tokens seen before, so the work of a step grows with those and not
        # with the vocabulary. np.zeros gives untouched pages: nothing is used without penalties.
        self._has_penalties = np.zeros(max_num_rows, np.bool_)
        self._repetition = np.ones(max_num_rows, np.float32)
        self._frequency = np.zeros(max_num_rows, np.float32)
        self._presence = np.zeros(max_num_rows, np.float32)
        self._counts = np.zeros((max_num_rows, vocab_size), np.int32)
        self._seen = np.zeros((max_num_rows, vocab_size), np.int32)
        """The first `_num_seen` of a row: the token ids with a count, in no special order."""
        self._num_seen = np.zeros(max_num_rows, np.int64)

        # By row, for the few rows that have them.
        self._logit_bias: dict[int, tuple[LongArray, NDArray[np.float32]]] = {}
        self._allowed: dict[int, IntArray] = {}
        """Bitmasks."""
        self._stop_ids: dict[int, LongArray] = {}
        self._bad_words: dict[int, _BadWords] = {}

    def add_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        """Fills an empty row for a new or resumed request.

        Args:
            row: which one.
            params: what is long in it is referred to, not copied.
            token_ids: prompt and what was generated so far.
            num_prompt_tokens: how many of them are the prompt.

        Whatever is raised, the row stays empty.
        """
        try:
            self._fill_row(row, params, token_ids, num_prompt_tokens)
        except Exception:
            self.remove_row(row)
            raise

    def advance(self, rows: LongArray, counts: LongArray) -> None:
        """Notes that each of `rows` has generated that many more tokens, whatever they are.

        Args:
            rows: int64 [R], no row twice.
            counts: int64 [R], not negative.
        """
        self._num_output_tokens[rows] += counts

    def append(self, rows: LongArray, tokens: LongArray, counts: LongArray) -> None:
        """`advance` and `record` in one."""
        self.advance(rows, counts)
        self.record(rows, tokens, counts)

    def needs_tokens(self, rows: LongArray) -> bool:
        """Whether a token of these rows depends on which tokens came before."""
        return bool(
            self._has_penalties[rows].any()
            or (self._bad_words and any(row in self._bad_words for row in rows.tolist()))
        )

    def record(self, rows: LongArray, tokens: LongArray, counts: LongArray) -> None:
        """Takes in the tokens of an `advance`.

        Args:
            rows: int64 [R], no row twice.
            tokens: int64 [sum of counts], first all those of the first row, then of the next ...
            counts: int64 [R], not negative.
        """
        if not self.needs_tokens(rows):
            return
        starts = np.cumsum(counts) - counts
        for i in range(counts.max()):
            some = counts > i
            self._record_one(rows[some], tokens[starts[some] + i])

    def _record_one(self, rows: LongArray, tokens: LongArray) -> None:
        """One token for each of `rows`."""
        penalised = self._has_penalties[rows]
        if penalised.any():
            p_rows, p_tokens = rows[penalised], tokens[penalised]
            counts = self._counts[p_rows, p_tokens]
            self._counts[p_rows, p_tokens] = counts + _ONE_OUTPUT
            new = counts == 0
            n_rows = p_rows[new]
            self._seen[n_rows, self._num_seen[n_rows]] = p_tokens[new]
            self._num_seen[n_rows] += 1
        if self._bad_words:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                if row in self._bad_words:
                    self._bad_words[row].append(token)

    def remove_row(self, row: int) -> None:
        """Empties a row."""
        seen = self._seen[row, : self._num_seen[row]]
        self._counts[row, seen] = 0
        self._num_seen[row] = 0
        self._has_penalties[row] = False
        self._params["temperature"][row] = 0.0
        self._num_output_tokens[row] = 0
        self._min_tokens[row] = 0
        self._num_logprobs[row] = NO_LOGPROBS
        for extras in (self._logit_bias, self._allowed, self._stop_ids, self._bad_words):
            extras.pop(row, None)

    def metadata(
        self,
        rows: LongArray,
        offsets: LongArray | None = None,
        grammar: GrammarBitmask | None = None,
    ) -> SamplingMetadata:
        """Gathers what one step needs.

        The penalties are read when they are applied, so sample before the next `append`.

        Args:
            rows: int64 [R]; `rows[i]` belongs to row i of the logits. A row may come several times.
            offsets: int64 [R], how many tokens come before this one beyond those appended: drafts
                taken as right. More than 0 only where `needs_tokens` is false; None: all 0.
            grammar: what the grammars of some rows allow.
        """
        params = self._params[rows]
        num_output_tokens = self._num_output_tokens[rows]
        if offsets is not None:
            num_output_tokens += offsets
        if params["temperature"].any():
            # Key: the request's seed; counter: how many tokens come before this one.
            params["uniform"] = philox.uniform(self._seeds[rows], num_output_tokens)
        return SamplingMetadata(
            params=params,
            num_logprobs=self._num_logprobs[rows],
            grammar=grammar,
            allowed=self._gather_allowed(rows),
            banned=self._gather_banned(rows, num_output_tokens),
            logit_bias=self._gather_logit_bias(rows),
            penalties=self._gather_penalties(rows),
        )

    def _fill_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        self._seeds[row] = params.seed % 2**64
        self._params[row] = (params.temperature, params.min_p, params.top_p, 0.0, params.top_k)
        self._num_output_tokens[row] = len(token_ids) - num_prompt_tokens
        self._num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        self._has_penalties[row] = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        if self._has_penalties[row]:
            self._count_tokens(row, token_ids, num_prompt_tokens)
        if params.logit_bias is not None:
            ids, values = params.logit_bias
            self._logit_bias[row] = (
                np.frombuffer(ids, np.int32).astype(np.int64),
                np.frombuffer(values, np.float32),
            )
        if params.allowed_token_ids is not None:
            self._allowed[row] = np.frombuffer(params.allowed_token_ids, np.int32)
        if params.min_tokens > 0:
            self._min_tokens[row] = params.min_tokens
            # A stop token outside the vocabulary cannot be generated anyway.
            stops = [t for t in params.all_stop_token_ids if t < self.vocab_size]
            if stops:
                self._stop_ids[row] = np.asarray(stops, np.int64)
        if params.bad_words is not None:
            self._bad_words[row] = _make_bad_words(params.bad_words, token_ids[num_prompt_tokens:])

    def _count_tokens(self, row: int, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        tokens = np.asarray(token_ids, np.int64)
        prompt, output = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
        prompt = prompt[prompt < self.vocab_size]
        if self._repetition[row] == 1.0:  # the other penalties do not look at the prompt
            prompt = prompt[:0]
        seen = np.union1d(prompt, output)
        self._seen[row, : len(seen)] = seen
        self._num_seen[row] = len(seen)
        self._counts[row, prompt] = _IN_PROMPT
        np.add.at(self._counts[row], output, _ONE_OUTPUT)

    def _gather_penalties(self, rows: LongArray) -> _Penalties | None:
        at = np.flatnonzero(self._has_penalties[rows])
        at = at[self._num_seen[rows[at]] > 0]
        return _Penalties(self, rows, at) if len(at) else None

    def _penalty_entries(self, rows: LongArray, at: LongArray) -> PenaltyEntries:
        """The entries of the step's rows `at`."""
        lengths = self._num_seen[rows[at]]
        logits_rows = np.repeat(at, lengths)
        state_rows = rows[logits_rows]
        columns = np.arange(len(logits_rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        token_ids = self._seen[state_rows, columns].astype(np.int64)
        return PenaltyEntries(
            rows=self._tensor(logits_rows),
            token_ids=self._tensor(token_ids),
            output_counts=self._tensor(
                (self._counts[state_rows, token_ids] // _ONE_OUTPUT).astype(np.float32)
            ),
            repetition=self._tensor(self._repetition[state_rows]),
            frequency=self._tensor(self._frequency[state_rows]),
            presence=self._tensor(self._presence[state_rows]),
        )

    def _gather_logit_bias(self, rows: LongArray) -> BiasEntries | None:
        found = _find(self._logit_bias, rows)
        if not found:
            return None
        logits_rows, token_ids = _concatenate([(i, ids) for i, (ids, _) in found])
        values = np.concatenate([values for _, (_, values) in found])
        return BiasEntries(self._tensor(logits_rows), self._tensor(token_ids), self._tensor(values))

    def _gather_allowed(self, rows: LongArray) -> AllowedTokens | None:
        found = _find(self._allowed, rows)
        if not found:
            return None
        restricted = np.asarray([i for i, _ in found], np.int64)
        bitmask = np.stack([words for _, words in found])
        return AllowedTokens(self._tensor(restricted), self._tensor(bitmask))

    def _gather_banned(self, rows: LongArray, num_output_tokens: LongArray) -> LogitEntries | None:
        found = [(i, words.banned()) for i, words in _find(self._bad_words, rows)]
        if self._stop_ids:
            too_short = num_output_tokens < self._min_tokens[rows]
            found += [(i, ids) for i, ids in _find(self._stop_ids, rows) if too_short[i]]
        logits_rows, token_ids = _concatenate(found)
        if not len(logits_rows):
            return None
        return LogitEntries(self._tensor(logits_rows), self._tensor(token_ids))

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self.device)


@dataclass(frozen=True, slots=True)
class _Penalties:
    """The penalties of one step, read from the state in portions that bound the memory."""

    state: SamplingState
    rows: LongArray
    at: LongArray
    """Which of `rows` have any."""

    def __iter__(self) -> Iterator[PenaltyEntries]:
        vocab_size = self.state.vocab_size
        # A portion takes at most this many entries and those of one more row.
        portion = max(1, rows_per_chunk(vocab_size) * vocab_size // 4)
        ends = np.cumsum(self.state._num_seen[self.rows[self.at]])
        starts = np.flatnonzero(np.diff((ends - 1) // portion)) + 1
        for some in np.split(self.at, starts):
            yield self.state._penalty_entries(self.rows, some)


def _make_bad_words(words: BadWordsTokenIds, output: Sequence[int]) -> _BadWords:
    last = np.frombuffer(words.last, np.int32)
    prefixes = np.frombuffer(words.prefixes, np.int32).reshape(len(last), -1)
    longest = prefixes.shape[1]
    result = _BadWords(prefixes, last, np.full(longest, _NOTHING_YET, np.int32))
    for token in output[max(0, len(output) - longest) :]:
        result.append(token)
    return result


def _find(extras: dict[int, T], rows: LongArray) -> list[tuple[int, T]]:
    """The rows of a step that have an entry in `extras`: (index in the step, entry)."""
    if not extras:
        return []
    return [(i, extras[row]) for i, row in enumerate(rows.tolist()) if row in extras]


def _concatenate(parts: list[tuple[int, LongArray]]) -> tuple[LongArray, LongArray]:
    """Flattens (row, token ids) pairs into parallel rows and token ids."""
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    lengths = [len(ids) for _, ids in parts]
    rows = np.repeat(np.asarray([i for i, _ in parts], np.int64), lengths)
    return rows, np.concatenate([ids for _, ids in parts])
