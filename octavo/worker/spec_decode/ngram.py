"""Drafts from the request's own tokens: what followed the last ones when they came before.

Prompt lookup (A. Saxena, 2023), with the longest match, and among equally long ones the most
recent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.worker.spec_decode.base import LongArray, Proposal, Proposer, Target


class NgramProposer(Proposer):
    """See the module."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        config = target.setup.config.speculation.speculative_config
        assert config is not None
        self._shortest, self._longest = config.lookup_lengths

    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        """See `Proposer`."""
        batch, drafts = self.target.batch, []
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            tokens = batch.token_ids[row, : batch.num_tokens[row]]
            length, following = look_up(tokens, self._longest, count)
            drafts.append(following if length >= self._shortest else [])
        return Proposal(drafts)


def look_up(tokens: NDArray[np.int32], longest: int, count: int) -> tuple[int, list[int]]:
    """Where the last tokens came before, and what followed them there.

    Args:
        tokens: int32 [T].
        longest: how many of the last ones to look for at most.
        count: most tokens to return. What lies beyond the last token repeats: in a b a b a the
            tokens b a b a ... follow.

    Returns:
        How many of the last tokens came before, and what followed.
    """
    num_tokens = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    length, best = 0, ends
    while len(ends) and length < longest:
        length, best = length + 1, ends
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[num_tokens - 1 - length]]
    if length == 0:
        return 0, []
    start = int(best[-1]) + 1
    return length, np.resize(tokens[start : start + count], count).tolist()
