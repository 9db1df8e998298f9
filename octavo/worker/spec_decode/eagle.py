"""Drafts from a head that guesses the target's next hidden states: EAGLE, EAGLE-3, MTP layers.

The head's single layer attends to all earlier tokens, so it must compute every token that the
target computes. Its input at a position is the target's hidden state and the embedding of the next
token, so its KV at the position depends on that token, too. Further drafts use the head's own
guesses as hidden states.

While the scheduler requests no drafts, the proposer only stores the hidden states of each request's
last few tokens, and computes them when drafts are requested again. Earlier tokens stay a gap, which
lowers the acceptance of drafts but changes no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.registry import open_mapped_folder
from octavo.errors import ConfigError
from octavo.messages import NewRequestData
from octavo.models.decoder import DecoderModel
from octavo.models.eagle import Eagle3Model, EagleModel
from octavo.models.heads import MOST_LATE, read_lm_head
from octavo.system.tensor import Tensor, numpy_dtype, zeros
from octavo.worker.graphs import StepResult
from octavo.worker.input_batch import StepInputs
from octavo.worker.spec_decode.base import LongArray, Proposal, Proposer, Target
from octavo.worker.spec_decode.draft_steps import DraftSampler, DraftSteps, load_draft, load_lm_head

Hidden = NDArray[Any]
"""Hidden states in the model's type."""

_NONE = -1
# Number of sampled steps without drafts after which the proposer stops computing.
_IDLE_AFTER = 8


class EagleProposer(Proposer):
    """Proposer with an EAGLE or EAGLE-3 head, or the target's MTP layer."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        model, main = load_draft(target), target.model
        assert isinstance(model, EagleModel)
        if not isinstance(main, DecoderModel):
            raise ConfigError(
                f"speculative_config: {main.spec.architecture} does not show its embedding, which "
                "EAGLE needs; use another method."
            )
        if isinstance(model, Eagle3Model):
            draft = target.setup.draft
            assert draft is not None
            folder = open_mapped_folder(draft.model_path)
            model.set_offsets(folder.read_tensor("d2t"))
        self._model, self._main = model, main
        setup, num_rows = target.setup, len(target.batch.token_ids)
        lm_head = read_lm_head(setup.spec, model.spec, setup.rank)
        self._guesser = main if lm_head is None else load_lm_head(target, lm_head)
        """Model with the LM head for the guesses."""
        shape = model.input_shape(setup.max_num_batched_tokens)
        model.inputs = zeros(*shape, dtype=main.dtype)
        # The head's token at a position is the next one.
        self._steps = DraftSteps(target, model, shift=1)
        self._max_model_len = self._steps.setup.max_model_len
        dtype = numpy_dtype(main.dtype)
        self._guess: Hidden = np.zeros((num_rows, main.spec.hidden_size), dtype)
        """Guessed hidden state of the last token, by row."""
        self._of: LongArray = np.zeros(num_rows, np.int64)
        """Number of the row's tokens when `_guess` was computed, by row."""
        self._seen: LongArray = np.zeros(num_rows, np.int64)
        """First position that is not computed, by row; `_NONE`: no step has been observed."""
        self._late: Hidden = np.zeros((num_rows, MOST_LATE, main.spec.hidden_size), dtype)
        """Hidden states that are not computed yet, by row and position modulo `MOST_LATE`."""
        self._idle_steps = 0

    def add_row(self, row: int, data: NewRequestData) -> None:
        """Implement `Proposer`."""
        self._of[row], self._seen[row] = 0, _NONE

    def copy_blocks(self, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        """Implement `Proposer`."""
        self._steps.copy_blocks(src_dst_pairs)

    def observe(self, inputs: StepInputs, result: StepResult) -> None:
        """Compute the tokens that the target computed, except rejected drafts."""
        batch, rows = self.target.batch, inputs.rows
        positions = inputs.table.positions[: inputs.size.tokens]
        starts = positions[inputs.table.query_start_loc[: len(rows)]]
        ends = np.minimum(batch.num_computed_tokens[rows], batch.num_tokens[rows] - 1)
        ends = np.minimum(ends, self._max_model_len)
        some = ends > starts
        if not some.any():
            return
        right = np.flatnonzero(positions < np.repeat(ends, inputs.counts))
        whole = len(right) == len(positions)
        ops = self.target.ops
        kept = [result.kept[layer] for layer in self._model.kept_layers]
        states = [result.hidden, *kept]
        if not whole:
            picked = ops.to_device(right)
            states = [ops.embedding(state, picked) for state in states]
        hidden = self._model.combine(states[0], states[1:])
        rows, starts, ends = rows[some], starts[some], ends[some]
        self._seen[rows] = np.where(self._seen[rows] == _NONE, starts, self._seen[rows])
        self._idle_steps += inputs.size.samples > 0
        if self._idle_steps <= _IDLE_AFTER:
            behind = self._seen[rows] < starts
            self._catch_up(rows[behind], starts[behind])
            self._compute(rows, starts, ends, hidden)
            return
        at, of = positions[right], np.repeat(rows, ends - starts)
        late = at >= np.repeat(ends, ends - starts) - MOST_LATE
        self._late[of[late], at[late] % MOST_LATE] = ops.to_host(hidden)[late]

    def _compute(self, rows: LongArray, starts: LongArray, ends: LongArray, hidden: Tensor) -> None:
        """Compute tokens from the target's hidden states [T, hidden_size]."""
        num_tokens = self.target.batch.num_tokens[rows]
        last = ends == num_tokens - 1
        guesses = self._run(rows, starts, ends - starts, last, hidden)
        self._guess[rows[last]] = self.target.ops.to_host(guesses)
        self._of[rows[last]] = num_tokens[last]
        self._seen[rows] = ends

    def _catch_up(self, rows: LongArray, ends: LongArray) -> None:
        """Compute the stored states of requests up to `ends`, within the size of a largest step."""
        starts = np.maximum(self._seen[rows], ends - MOST_LATE)
        counts = np.where(self._seen[rows] == _NONE, 0, ends - starts)
        some = (counts > 0) & (np.cumsum(counts) <= self._steps.setup.max_num_batched_tokens)
        if not some.any():
            return
        rows, starts, ends, counts = rows[some], starts[some], ends[some], counts[some]
        first = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) + np.repeat(starts - first, counts)
        late = self._late[np.repeat(rows, counts), positions % MOST_LATE]
        self._compute(rows, starts, ends, self.target.ops.to_device(late))

    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        """Implement `Proposer`."""
        batch = self.target.batch
        num_tokens = batch.num_tokens[rows]
        counts = np.minimum(counts, self._max_model_len + 2 - num_tokens)
        self._idle_steps = 0
        behind = (self._of[rows] != num_tokens) & (counts > 0)
        self._catch_up(rows[behind], num_tokens[behind] - 1)
        at = np.flatnonzero((self._of[rows] == num_tokens) & (counts > 0))
        sampler, ahead = DraftSampler(self.target, rows, counts), 0
        ops = self.target.ops
        hidden = ops.to_device(self._guess[rows[at]])
        while len(at):
            logits = self._model.guess(hidden, self._guesser)
            more, tokens = sampler.sample(at, logits)
            at, hidden = at[more], ops.embedding(hidden, ops.to_device(more))
            if len(at):
                some, ends = rows[at], num_tokens[at] + ahead
                batch.token_ids[some, ends] = tokens
                ones = np.ones_like(at)
                hidden = self._run(some, ends - 1, ones, ones > 0, hidden)
                ahead += 1
        return sampler.proposal()

    def _run(
        self,
        rows: LongArray,
        starts: LongArray,
        counts: LongArray,
        wanted: NDArray[np.bool_],
        hidden: Tensor,
    ) -> Tensor:
        """Return the guesses for the last tokens of rows; see `DraftSteps.gather`.

        Args:
            hidden: [T, hidden_size], hidden states of all tokens of the step.
        """
        inputs = self._steps.gather(rows, starts, counts, wanted)
        ids, positions = (
            self.target.ops.to_device(array[: inputs.size.tokens])
            for array in (inputs.table.input_ids, inputs.table.positions)
        )
        self._model.fill(self._main.embed(ids, positions), hidden)
        return self._steps.run(inputs).logits
