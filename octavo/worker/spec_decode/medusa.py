"""Drafts from heads on the target's last hidden state (Medusa, Cai et al., 2024).

Each head adds one draft to a chain; the tree of section 2.1.2 is not supported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.messages import NewRequestData
from octavo.models.medusa import MedusaModel
from octavo.system.tensor import numpy_dtype
from octavo.worker.graphs import StepResult
from octavo.worker.input_batch import StepInputs
from octavo.worker.spec_decode.base import LongArray, Proposal, Proposer, Target
from octavo.worker.spec_decode.draft_steps import DraftSampler, load_draft


class MedusaProposer(Proposer):
    """Proposer with Medusa heads."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        model = load_draft(target)
        assert isinstance(model, MedusaModel)
        self._model = model
        num_rows, dtype = len(target.batch.token_ids), numpy_dtype(target.model.dtype)
        size = target.model.spec.hidden_size
        self._hidden: NDArray[Any] = np.zeros((num_rows, size), dtype)
        """Hidden state of the last token that the target has computed, by row."""
        self._of: LongArray = np.zeros(num_rows, np.int64)
        """Number of tokens that the target has computed, by row."""

    def add_row(self, row: int, data: NewRequestData) -> None:
        """Implement `Proposer`."""
        self._of[row] = 0

    def observe(self, inputs: StepInputs, result: StepResult) -> None:
        """Implement `Proposer`."""
        rows, starts = inputs.rows, inputs.table.query_start_loc[: inputs.size.requests]
        computed = self.target.batch.num_computed_tokens[rows]
        last = starts + computed - inputs.table.positions[starts] - 1
        self._hidden[rows] = self.target.ops.to_host(result.hidden)[last]
        self._of[rows] = computed

    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        """Implement `Proposer`."""
        at = np.flatnonzero(self._of[rows] == self.target.batch.num_tokens[rows] - 1)
        sampler, head = DraftSampler(self.target, rows, counts), 0
        ops = self.target.ops
        hidden = ops.to_device(self._hidden[rows[at]])
        while len(at):
            more, _ = sampler.sample(at, self._model.guess(head, hidden))
            at, head = at[more], head + 1
            hidden = ops.embedding(hidden, ops.to_device(more))
        return sampler.proposal()
