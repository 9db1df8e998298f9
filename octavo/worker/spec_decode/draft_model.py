"""Drafts from a smaller model.

Leviathan et al., "Fast inference from transformers via speculative decoding", 2023. The draft model
computes the missing tokens of a request only when the scheduler requests drafts, so it costs
nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.messages import NewRequestData
from octavo.worker.adapters import ModelAdapters, make_adapters
from octavo.worker.graphs import StepResult
from octavo.worker.input_batch import StepInputs
from octavo.worker.spec_decode.base import LongArray, Proposal, Proposer, Target
from octavo.worker.spec_decode.draft_steps import DraftSampler, DraftSteps, load_draft

_UNKNOWN = -1  # number of computed tokens of a new request: its blocks determine it


class DraftModelProposer(Proposer):
    """Proposer with a smaller model."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        setup = target.setup.draft
        assert setup is not None
        live = make_adapters(setup, target.ops)
        model = load_draft(target, live)
        if live is not None:
            self.adapters = ModelAdapters(
                setup, target.platform, target.ops, live, target.weights[-1].open
            )
        self._steps = DraftSteps(target, model, adapters=live)
        self._max_model_len = setup.max_model_len
        self._budget = setup.max_num_batched_tokens
        self._block_size = target.kv.block_size
        self._computed: LongArray = np.zeros(len(target.batch.token_ids), np.int64)
        """Number of correct tokens that the draft model has computed, by row; or `_UNKNOWN`."""
        self._filled: LongArray = np.zeros(target.kv.num_blocks, np.int64)
        """Number of the target's tokens that the draft model has computed, by block. Requests that
        share a block reuse them."""

    def add_row(self, row: int, data: NewRequestData) -> None:
        """Implement `Proposer`."""
        self._computed[row] = _UNKNOWN

    def copy_blocks(self, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        """Implement `Proposer`."""
        self._steps.copy_blocks(src_dst_pairs)
        src, dst = np.array(src_dst_pairs).T
        self._filled[dst] = self._filled[src]

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """Implement `Proposer`."""
        self._filled[np.array(block_ids)] = 0

    def observe(self, inputs: StepInputs, result: StepResult) -> None:
        """Discard the computed tokens after a rejected draft."""
        rows, batch = inputs.rows, self.target.batch
        self._computed[rows] = np.minimum(self._computed[rows], batch.num_tokens[rows] - 1)
        self._note(inputs, self._steps.group)

    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        """Implement `Proposer`; compute missing tokens up to the size of a largest step."""
        batch, computed = self.target.batch, self._computed
        for row in rows[computed[rows] == _UNKNOWN].tolist():
            computed[row] = self._find_computed(row)
        num_tokens = batch.num_tokens[rows]
        counts = np.minimum(counts, self._max_model_len + 1 - num_tokens)
        missed = num_tokens - computed[rows]
        at = np.flatnonzero(counts > 0)
        at = at[np.argsort(missed[at], kind="stable")]  # a long prompt delays no other request
        taken = np.minimum(missed[at], self._budget - (np.cumsum(missed[at]) - missed[at]))
        at, taken = at[taken > 0], taken[taken > 0]
        sampler = DraftSampler(self.target, rows, counts)
        if not len(at):
            return sampler.proposal()
        inputs, result = self._run(rows[at], taken, taken == missed[at])
        self._note(inputs, 0)
        at = at[taken == missed[at]]
        while len(at):
            more, tokens = sampler.sample(at, result.logits)
            at = at[more]
            if len(at):
                some = rows[at]
                batch.token_ids[some, computed[some]] = tokens
                ones = np.ones_like(at)
                inputs, result = self._run(some, ones, ones > 0)
        return sampler.proposal()

    def _run(
        self, rows: LongArray, counts: LongArray, wanted: NDArray[np.bool_]
    ) -> tuple[StepInputs, StepResult]:
        """Compute the next `counts` tokens of each row; see `DraftSteps.gather`."""
        inputs = self._steps.gather(rows, self._computed[rows], counts, wanted)
        self._computed[rows] += counts
        return inputs, self._steps.run(inputs)

    def _find_computed(self, row: int) -> int:
        """Return the number of a new request's tokens that are computed in its shared blocks."""
        most, size = int(self.target.batch.num_tokens[row]) - 1, self._block_size
        table = self.target.batch.block_tables[self._steps.group, row, : -(-most // size)]
        filled = self._filled[table]
        first = int(np.argmin(filled == size)) if (filled < size).any() else len(filled)
        return min(first * size + int(filled[first : first + 1].sum()), most)

    def _note(self, inputs: StepInputs, group: int) -> None:
        """Record the computed tokens of a step of the target or of the draft model."""
        tokens, table = inputs.size.tokens, inputs.table
        blocks, offsets = np.divmod(table.slot_mappings[group, :tokens], self._block_size)
        known = np.repeat(self._computed[inputs.rows], inputs.counts)
        right = table.positions[:tokens] < known
        np.maximum.at(self._filled, blocks[right], offsets[right] + 1)
        np.minimum.at(self._filled, blocks[~right], offsets[~right])
