"""Processor that ends reasoning: at its budget, or when it repeats itself."""

from __future__ import annotations

import numpy as np

from octavo.guard import Guard
from octavo.kernels.base import Ops
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, NewRow, StepRows
from octavo.system.tensor import Tensor


class ReasoningEnd(LogitsProcessor):
    """Processor that excludes all tokens but the one that the request's guard forces.

    It comes after the grammar, which may exclude this token for a moment, such as within a
    character. Then the processor waits. It comes before all other processors: if the request itself
    excludes the token, no token is left, and the request fails.
    """

    needs_tokens = True

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._guards: dict[int, Guard] = {}

    def add_row(self, new: NewRow) -> bool:
        """Read the answer so far."""
        spec = new.params.guard
        if spec is None or not spec.forces_tokens:
            return False
        self._guards[new.row] = Guard(spec, new.output_token_ids)
        return True

    def remove_row(self, row: int) -> None:
        """Drop the guard."""
        self._guards.pop(row, None)

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Read one more token."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._guards[row].append(token)

    def select(self, step: StepRows) -> StepRows:
        """Return the rows with a forced token."""
        forced = [self._guards[row].forced is not None for row in step.rows.tolist()]
        return step.take(np.asarray(forced, np.bool_))

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Exclude all other tokens."""
        tokens = np.asarray([self._guards[row].forced for row in step.rows.tolist()], np.int64)
        ids = np.zeros((len(logits), 1), np.int64)
        ids[step.at, 0] = tokens
        may = ops.gather(logits, ids)[step.at, 0] > -np.inf
        at, tokens = step.at[may], tokens[may]
        if len(at):
            words = np.zeros((len(at), -(-self.vocab_size // 32)), np.uint32)
            words[np.arange(len(at)), tokens // 32] = np.uint32(1) << (tokens % 32).astype(
                np.uint32
            )
            ops.apply_bitmask_(logits, ops.to_device(words.view(np.int32)), ops.to_device(at))
