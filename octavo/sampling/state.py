"""Persistent state of the sampler: rows for the live requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.messages import CoreSamplingParams
from octavo.sampling import philox
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, NewRow, StepRows
from octavo.sampling.logits_processors.builtin import (
    AllowedTokenIds,
    BadWords,
    GrammarBitmask,
    LogitBias,
    MinTokens,
)
from octavo.sampling.logits_processors.penalties import Penalties
from octavo.sampling.logits_processors.reasoning_end import ReasoningEnd
from octavo.sampling.logits_processors.repeated_ngrams import RepeatedNGrams
from octavo.sampling.logits_processors.whisper import WhisperAnswers
from octavo.sampling.metadata import NO_LOGPROBS, SamplingMetadata


class SamplingState:
    """One row of sampling state for each live request.

    The state follows from the parameters and the tokens so far: to resume a request, call `add_row`
    with all its tokens. A row without a request is greedy and plain. The state is on the host;
    `sizes.state_nbytes` returns its maximum size.

    Args:
        max_num_rows: number of rows.
        vocab_size: width of the logits.
        plugins: processors in addition to the built-in ones; `load_plugins` makes them.
    """

    def __init__(
        self, max_num_rows: int, vocab_size: int, plugins: Sequence[LogitsProcessor] = ()
    ) -> None:
        self._params = np.zeros(max_num_rows, SAMPLING_ROW)
        self._params["top_p"] = 1.0
        self._num_output_tokens = np.zeros(max_num_rows, np.int64)
        self._num_logprobs = np.full(max_num_rows, NO_LOGPROBS, np.int64)
        self._logprob_token_ids: dict[int, NDArray[np.int32]] = {}
        """Token ids of the rows that request certain tokens."""
        small = (
            *(ReasoningEnd, AllowedTokenIds, BadWords, MinTokens, LogitBias),
            *(WhisperAnswers, RepeatedNGrams),
        )
        self.processors: list[LogitsProcessor] = [
            *(processor(max_num_rows, vocab_size) for processor in small),
            *plugins,
            Penalties(max_num_rows, vocab_size),
        ]
        """Processors, in the order in which they change logits."""
        self._takes = np.zeros((len(self.processors), max_num_rows), np.bool_)
        """True for rows in which a processor has work, now or later."""
        self._wanting_tokens = [
            (takes, processor)
            for takes, processor in zip(self._takes, self.processors, strict=True)
            if processor.needs_tokens
        ]
        self._processed = np.zeros(max_num_rows, np.bool_)
        """True for rows in which any processor has work."""
        self._needs_tokens = np.zeros(max_num_rows, np.bool_)
        self._extra_args = frozenset[str]().union(*(p.extra_args for p in self.processors))
        self._takes_any_args = any(p.takes_all for p in plugins)

    def add_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        """Fill an empty row for a new or resumed request. After an exception the row stays empty.

        Args:
            row: index of the row.
            params: the parameters; long lists are referred to, not copied.
            token_ids: prompt tokens and the tokens generated so far.
            num_prompt_tokens: number of prompt tokens.

        Raises:
            RequestError: no processor accepts one of the `extra_args`, or a plug-in fails.
        """
        try:
            for key in params.extra_args or ():
                if key not in self._extra_args and not self._takes_any_args:
                    known = ", ".join(sorted(self._extra_args)) or "none"
                    raise RequestError(
                        f"extra_args (over HTTP: vllm_xargs) has the key {key[:80]!r}, which no "
                        f"logits processor accepts; omit it, or install one (accepted: {known}).",
                        "extra_args",
                    )
            new = NewRow(row, params, token_ids, num_prompt_tokens)
            for takes, processor in zip(self._takes, self.processors, strict=True):
                takes[row] = processor.add_row(new)
                if takes[row]:
                    self._processed[row] = True
                    self._needs_tokens[row] |= processor.needs_tokens
            own = self._params[row]
            own["temperature"], own["min_p"] = params.temperature, params.min_p
            own["top_p"], own["top_k"] = params.top_p, params.top_k
            own["seed"] = params.seed % 2**64
            self._num_output_tokens[row] = len(token_ids) - num_prompt_tokens
            self._num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
            if params.logprob_token_ids is not None:
                ids = np.frombuffer(params.logprob_token_ids, np.int32)
                self._logprob_token_ids[row] = ids
        except Exception:
            self.remove_row(row)
            raise

    def remove_row(self, row: int) -> None:
        """Empty a row."""
        for processor in self.processors:
            processor.remove_row(row)
        self._takes[:, row] = False
        self._processed[row] = self._needs_tokens[row] = False
        self._params["temperature"][row] = 0.0
        self._num_output_tokens[row] = 0
        self._num_logprobs[row] = NO_LOGPROBS
        self._logprob_token_ids.pop(row, None)

    def advance(self, rows: LongArray, counts: LongArray) -> None:
        """Record the number of new tokens of each of `rows`, before the tokens are known.

        Args:
            rows: int64 [R], without duplicates.
            counts: int64 [R], not negative.
        """
        self._num_output_tokens[rows] += counts

    def append(self, rows: LongArray, tokens: LongArray, counts: LongArray) -> None:
        """Call `advance` and `record`."""
        self.advance(rows, counts)
        self.record(rows, tokens, counts)

    def needs_tokens(self, rows: LongArray) -> bool:
        """Return True if a token of these rows depends on the previous tokens."""
        return bool(self._needs_tokens[rows].any())

    def record(self, rows: LongArray, tokens: LongArray, counts: LongArray) -> None:
        """Add the tokens of an `advance`.

        Args:
            rows: int64 [R], without duplicates.
            tokens: int64 [sum of counts], first all tokens of the first row, then of the next ...
            counts: int64 [R], not negative.
        """
        if not self.needs_tokens(rows):
            return
        starts = np.cumsum(counts) - counts
        for i in range(counts.max()):
            more = counts > i
            some, their = rows[more], tokens[starts[more] + i]
            for takes, processor in self._wanting_tokens:
                own = takes[some]
                if own.any():
                    processor.append(some[own], their[own])

    def uniforms(self, rows: LongArray, offsets: LongArray, stream: int) -> NDArray[np.float64]:
        """Return random numbers of the rows' next positions, independent of those for sampling.

        Args:
            rows: int64 [R].
            offsets: int64 [R], see `metadata`.
            stream: index of one of several independent streams; not 0.

        Returns:
            float64 [R] in [0, 1).
        """
        positions = (self._num_output_tokens[rows] + offsets).astype(np.uint32)
        return philox.uniform(self._params["seed"][rows], positions, stream)

    def params(self, rows: LongArray, offsets: LongArray | None = None) -> NDArray[np.void]:
        """Return the sampling parameters of the rows' next positions.

        Args:
            rows: int64 [R].
            offsets: int64 [R], see `metadata`.

        Returns:
            `SAMPLING_ROW` [R].
        """
        params = self._params[rows]
        positions = self._num_output_tokens[rows]
        if offsets is not None:
            positions += offsets
        params["position"] = positions
        return params

    def metadata(
        self,
        rows: LongArray,
        offsets: LongArray | None = None,
        grammar: GrammarBitmask | None = None,
    ) -> SamplingMetadata:
        """Collect the parameters of one step.

        Processors read the state when they are applied, so sample before it changes.

        Args:
            rows: int64 [R]; `rows[i]` belongs to row i of the logits. A row may occur several
                times.
            offsets: int64 [R], number of tokens between the appended ones and this one: drafts
                assumed to be right. Positive only where `needs_tokens` is false; None: all 0.
            grammar: tokens that the grammars of some rows allow.
        """
        num_output_tokens = self._num_output_tokens[rows]
        if offsets is not None:
            num_output_tokens += offsets
        processors: list[tuple[LogitsProcessor, StepRows]] = []
        if grammar is not None and len(grammar.at):
            at = grammar.at
            processors.append((grammar, StepRows(at, rows[at], num_output_tokens[at])))
        if self._processed[rows].any():
            step = StepRows(np.arange(len(rows)), rows, num_output_tokens)
            takes = self._takes[:, rows]
            for i in np.flatnonzero(takes.any(axis=1)).tolist():
                own = self.processors[i].select(step.take(takes[i]))
                if len(own.at):
                    processors.append((self.processors[i], own))
        params = self.params(rows, offsets)
        given = self._logprob_token_ids
        asked = {
            i: given[row] for i, row in enumerate(rows.tolist() if given else ()) if row in given
        }
        return SamplingMetadata(params, self._num_logprobs[rows], processors, asked)
