"""Drafts from the tokens that followed the same tokens in the request or in earlier answers.

After SuffixDecoding (Oliaro et al. 2024): it searches the request's own tokens as `ngram` does, and
earlier answers by a suffix automaton. The longer match wins. Its length limits the number of
drafts.
"""

from __future__ import annotations

import numpy as np

from octavo import _native
from octavo.messages import NewRequestData
from octavo.plan.draft_sizes import SUFFIX_TOKENS
from octavo.worker.spec_decode.base import LongArray, Proposal, Proposer, Target
from octavo.worker.spec_decode.ngram import look_up

_LONGEST = 64  # greatest length of a match
_SHORTEST = 2
# Number of prompt tokens stored before an answer, so that its first tokens can be found.
_LEAD = 8


class SuffixProposer(Proposer):
    """Proposer by suffixes of the request and of earlier answers."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        config = target.setup.config.speculation.speculative_config
        assert config is not None
        self._shortest = config.prompt_lookup_min or _SHORTEST
        self._longest = max(config.prompt_lookup_max or _LONGEST, self._shortest)
        # A full newer automaton replaces the older one.
        self._newer, self._older = _native.SuffixAutomaton(), _native.SuffixAutomaton()
        self._private: set[int] = set()

    def add_row(self, row: int, data: NewRequestData) -> None:
        """Implement `Proposer`."""
        if data.private:
            self._private.add(row)

    def remove_row(self, row: int) -> None:
        """Store the answer of a request that ends, if it is not private."""
        if row in self._private:
            self._private.remove(row)
            return
        batch = self.target.batch
        first, end = int(batch.num_prompt_tokens[row]), int(batch.num_tokens[row])
        tokens = batch.token_ids[row, max(0, first - _LEAD) : end]
        tokens = tokens[tokens >= 0]  # without tokens that have not arrived
        if end > first:
            if len(self._newer) + len(tokens) > SUFFIX_TOKENS:
                self._newer, self._older = _native.SuffixAutomaton(), self._newer
            self._newer.add(tokens.ctypes.data, min(len(tokens), SUFFIX_TOKENS))

    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        """Implement `Proposer`."""
        batch, drafts = self.target.batch, []
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            tokens = batch.token_ids[row, : batch.num_tokens[row]]
            length, following = look_up(tokens, self._longest, count)
            if row not in self._private:
                last = np.ascontiguousarray(tokens[-self._longest :])
                for automaton in (self._newer, self._older):
                    other, its = automaton.match(last.ctypes.data, len(last), count)
                    if other > length:
                        length, following = other, its
            drafts.append(following[:length] if length >= self._shortest else [])
        return Proposal(drafts)
