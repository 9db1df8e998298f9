"""The sampler's memory: persistent rows for the live requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.kernels.base import SAMPLING_ROW
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
from octavo.sampling.metadata import NO_LOGPROBS, SamplingMetadata


class SamplingState:
    """One row of sampling state for each live request.

    All of it follows from the parameters and the tokens so far: a resumed request is `add_row`
    with all its tokens. A row that was never added, or was removed, is greedy and plain.
    The state is on the host; `sizes.state_nbytes` says how large it can grow.

    Args:
        max_num_rows: how many rows there are.
        vocab_size: width of the logits.
        plugins: processors beside the built-in ones; `load_plugins` makes them.
    """

    def __init__(
        self, max_num_rows: int, vocab_size: int, plugins: Sequence[LogitsProcessor] = ()
    ) -> None:
        self._params = np.zeros(max_num_rows, SAMPLING_ROW)
        self._params["top_p"] = 1.0
        self._num_output_tokens = np.zeros(max_num_rows, np.int64)
        self._num_logprobs = np.full(max_num_rows, NO_LOGPROBS, np.int64)
        self._logprob_token_ids: dict[int, NDArray[np.int32]] = {}
        """Of the rows that ask for certain tokens."""
        small = (AllowedTokenIds, BadWords, MinTokens, LogitBias)
        self.processors: list[LogitsProcessor] = [
            *(processor(max_num_rows, vocab_size) for processor in small),
            *plugins,
            Penalties(max_num_rows, vocab_size),
        ]
        """In the order in which they change logits."""
        self._takes = np.zeros((len(self.processors), max_num_rows), np.bool_)
        """Which rows each processor has, or will have, something to do for."""
        self._wanting_tokens = [
            (takes, processor)
            for takes, processor in zip(self._takes, self.processors, strict=True)
            if processor.needs_tokens
        ]
        self._processed = np.zeros(max_num_rows, np.bool_)
        """Whether any has."""
        self._needs_tokens = np.zeros(max_num_rows, np.bool_)
        self._extra_args = frozenset[str]().union(*(p.extra_args for p in plugins))
        self._takes_any_args = any(p.takes_all for p in plugins)

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

        Raises:
            RequestError: if no processor takes one of its `extra_args`, or a plug-in fails.

        Whatever is raised, the row stays empty.
        """
        try:
            for key in params.extra_args or ():
                if key not in self._extra_args and not self._takes_any_args:
                    known = ", ".join(sorted(self._extra_args)) or "none"
                    raise RequestError(
                        f"extra_args (over HTTP: vllm_xargs) has the key {key[:80]!r}, which no "
                        f"logits processor takes; leave it out, or install one (taken: {known}).",
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
        """Empties a row."""
        for processor in self.processors:
            processor.remove_row(row)
        self._takes[:, row] = False
        self._processed[row] = self._needs_tokens[row] = False
        self._params["temperature"][row] = 0.0
        self._num_output_tokens[row] = 0
        self._num_logprobs[row] = NO_LOGPROBS
        self._logprob_token_ids.pop(row, None)

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
        return bool(self._needs_tokens[rows].any())

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
            more = counts > i
            some, their = rows[more], tokens[starts[more] + i]
            for takes, processor in self._wanting_tokens:
                own = takes[some]
                if own.any():
                    processor.append(some[own], their[own])

    def uniforms(self, rows: LongArray, offsets: LongArray, stream: int) -> NDArray[np.float64]:
        """Random numbers of the rows' next positions, beside those that tokens are sampled with.

        Args:
            rows: int64 [R].
            offsets: int64 [R], see `metadata`.
            stream: which of several independent ones; not 0.

        Returns:
            float64 [R] in [0, 1).
        """
        positions = (self._num_output_tokens[rows] + offsets).astype(np.uint32)
        return philox.uniform(self._params["seed"][rows], positions, stream)

    def params(self, rows: LongArray, offsets: LongArray | None = None) -> NDArray[np.void]:
        """How tokens of the rows' next positions are chosen from their logits.

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
        """Gathers what one step needs.

        Processors read the state when they are applied, so sample before it changes.

        Args:
            rows: int64 [R]; `rows[i]` belongs to row i of the logits. A row may come several times.
            offsets: int64 [R], how many tokens come before this one beyond those appended: drafts
                taken as right. More than 0 only where `needs_tokens` is false; None: all 0.
            grammar: what the grammars of some rows allow.
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
