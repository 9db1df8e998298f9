"""Drafts from what the request, or an earlier answer of the engine, said after the same tokens.

After SuffixDecoding (Oliaro et al. 2024): a request's own tokens are searched as by `ngram`, and
earlier answers by a suffix automaton; the longer match wins, and is trusted the further the longer
it is.
"""

from __future__ import annotations

import numpy as np

from octavo import _native
from octavo.messages import NewRequestData
from octavo.plan.draft_sizes import SUFFIX_TOKENS
from octavo.worker.spec_decode.base import LongArray, Proposal, Proposer, Target
from octavo.worker.spec_decode.ngram import look_up

_LONGEST = 64  # tokens that a match is looked for with
_SHORTEST = 2
# Prompt tokens before an answer that are kept with it: it is found from its first token on.
_LEAD = 8


class SuffixProposer(Proposer):
    """See the module."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        config = target.setup.config.speculation.speculative_config
        assert config is not None
        self._shortest = config.prompt_lookup_min or _SHORTEST
        self._longest = max(config.prompt_lookup_max or _LONGEST, self._shortest)
        # Once the newer one is full it becomes the older one, and that one is forgotten.
        self._newer, self._older = _native.SuffixAutomaton(), _native.SuffixAutomaton()
        self._private: set[int] = set()

    def add_row(self, row: int, data: NewRequestData) -> None:
        """See `Proposer`."""
        if data.private:
            self._private.add(row)

    def remove_row(self, row: int) -> None:
        """See `Proposer`; the request's answer is kept."""
        if row in self._private:
            self._private.remove(row)
            return
        batch = self.target.batch
        first, end = int(batch.num_prompt_tokens[row]), int(batch.num_tokens[row])
        tokens = batch.token_ids[row, max(0, first - _LEAD) : end]
        tokens = tokens[tokens >= 0]  # none that is still on its way
        if end > first:
            if len(self._newer) + len(tokens) > SUFFIX_TOKENS:
                self._newer, self._older = _native.SuffixAutomaton(), self._newer
            self._newer.add(tokens.ctypes.data, min(len(tokens), SUFFIX_TOKENS))

    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        """See `Proposer`."""
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
