"""Drafts from the request's own tokens: the tokens that followed an earlier match of the last ones.

Prompt lookup (A. Saxena, 2023), with the longest match; of equally long matches, the most recent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.worker.spec_decode.base import LongArray, Proposal, Proposer, Target


class NgramProposer(Proposer):
    """Proposer by prompt lookup."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        config = target.setup.config.speculation.speculative_config
        assert config is not None
        self._shortest, self._longest = config.lookup_lengths

    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        """Implement `Proposer`."""
        batch, drafts = self.target.batch, []
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            tokens = batch.token_ids[row, : batch.num_tokens[row]]
            length, following = look_up(tokens, self._longest, count)
            drafts.append(following if length >= self._shortest else [])
        return Proposal(drafts)


def look_up(tokens: NDArray[np.int32], longest: int, count: int) -> tuple[int, list[int]]:
    """Find an earlier match of the last tokens, and the tokens that followed it.

    Args:
        tokens: int32 [T].
        longest: greatest length of the match.
        count: number of tokens to return. After the last token they repeat: in a b a b a the
            tokens b a b a ... follow.

    Returns:
        The length of the match, and the tokens that followed it.
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
