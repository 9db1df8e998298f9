"""Penalties for tokens that occurred before."""

from __future__ import annotations

import numpy as np

from octavo.kernels.base import Ops
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, NewRow, StepRows
from octavo.sampling.sizes import rows_per_chunk
from octavo.system.tensor import Tensor

# Counts of a token: the lowest bit is set if it is in the prompt, the others count outputs.
_IN_PROMPT = 1
_ONE_OUTPUT = 2


class Penalties(LogitsProcessor):
    """Repetition, then frequency, then presence penalty.

    Repetition (N. S. Keskar et al., "CTRL", 2019, section 4.1, with Hugging Face's rule for
    negative logits) covers prompt and output. The other two, OpenAI's, cover the output only.
    """

    needs_tokens = True

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._repetition = np.ones(max_num_rows, np.float32)
        self._frequency = np.zeros(max_num_rows, np.float32)
        self._presence = np.zeros(max_num_rows, np.float32)
        # Penalties touch only tokens seen before, so the work of a step grows with those
        # and not with the vocabulary. np.zeros maps pages lazily: without penalties no
        # memory is used.
        self._counts = np.zeros((max_num_rows, vocab_size), np.int32)
        self._seen = np.zeros((max_num_rows, vocab_size), np.int32)
        """Token ids with a count, in any order: the first `_num_seen` of a row."""
        self._num_seen = np.zeros(max_num_rows, np.int64)

    def add_row(self, new: NewRow) -> bool:
        """Count the tokens so far."""
        row, params = new.row, new.params
        penalties = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        if penalties == (1.0, 0.0, 0.0):
            return False
        self._repetition[row], self._frequency[row], self._presence[row] = penalties
        tokens = np.asarray(new.token_ids, np.int64)
        prompt, output = np.split(tokens, [new.num_prompt_tokens])
        prompt = prompt[prompt < self.vocab_size]
        if params.repetition_penalty == 1.0:  # the other penalties ignore the prompt
            prompt = prompt[:0]
        seen = np.union1d(prompt, output)
        self._seen[row, : len(seen)] = seen
        self._num_seen[row] = len(seen)
        self._counts[row, prompt] = _IN_PROMPT
        np.add.at(self._counts[row], output, _ONE_OUTPUT)
        return True

    def remove_row(self, row: int) -> None:
        """Reset the counts."""
        self._counts[row, self._seen[row, : self._num_seen[row]]] = 0
        self._num_seen[row] = 0

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Count one more token."""
        counts = self._counts[rows, tokens]
        self._counts[rows, tokens] = counts + _ONE_OUTPUT
        new = counts == 0
        rows = rows[new]
        self._seen[rows, self._num_seen[rows]] = tokens[new]
        self._num_seen[rows] += 1

    def select(self, step: StepRows) -> StepRows:
        """Return the rows with a token to penalise."""
        return step.take(self._num_seen[step.rows] > 0)

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Process the rows in portions, which bound the memory."""
        # A portion has at most this number of entries and those of one more row.
        portion = max(1, rows_per_chunk(self.vocab_size) * self.vocab_size // 4)
        ends = np.cumsum(self._num_seen[step.rows])
        starts = np.flatnonzero(np.diff((ends - 1) // portion)) + 1
        for begin, end in zip([0, *starts], [*starts, len(ends)], strict=True):
            self._apply(ops, logits, step.take(slice(begin, end)))

    def _apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Penalise all seen tokens of some rows, as parallel arrays [E]; no logit appears twice."""
        lengths = self._num_seen[step.rows]
        rows = np.repeat(step.rows, lengths)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        token_ids = self._seen[rows, columns].astype(np.int64)
        output_counts = (self._counts[rows, token_ids] // _ONE_OUTPUT).astype(np.float32)
        penalties = self._repetition[rows], self._frequency[rows], self._presence[rows]
        at = np.repeat(step.at, lengths)
        ops.penalize_(logits, at, token_ids, output_counts, penalties)
