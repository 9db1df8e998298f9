"""The model runner of a rank that computes its part and leaves sampling to rank 0."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from octavo.messages import (
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from octavo.profiler import span
from octavo.worker.input_batch import IntArray, LongArray
from octavo.worker.model_runner import Drafts, ModelRunner, PendingOutput

_NONE: LongArray = np.empty(0, np.int64)


class FollowingRunner(ModelRunner):
    """Keeps the same rows as rank 0, whose tokens and drafts it learns when the next step begins.

    Its results are empty.
    """

    _sampled: tuple[LongArray, LongArray] = (_NONE, _NONE)
    """Of the last step's requests that sampled: rows, and how many tokens each got at most."""

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        announce: Callable[[Drafts], None] = lambda drafts: None,
    ) -> None:
        """See `ModelRunner`; the drafts are rank 0's."""
        scheduled, state, drafts = scheduler_output.scheduled_reqs, self.state, Drafts()
        with span("prepare_inputs"):
            if scheduled:
                assert self.group is not None
                rows, most = self._sampled
                tokens, kept, drafts = self.group.news.receive(
                    len(rows), [request.req_id for request in scheduled]
                )
                state.batch.append(rows, tokens, kept)
                state.batch.num_computed_tokens[rows] -= most - kept
                self._sampled = _NONE, _NONE
            self._update_rows(scheduler_output)
            announce(drafts)
            if not scheduled:
                return
            buffers = state.steps.buffers(scheduler_output.total_num_scheduled_tokens, 0)
            inputs = state.batch.gather(scheduled, drafts, buffers)
        with span("forward") as note:
            note(rows=inputs.size.tokens)
            result = state.steps.run(inputs, None)
        self._compute_prompt_logprobs(inputs, result.hidden)
        state.batch.num_computed_tokens[inputs.rows] += inputs.counts
        rows = inputs.rows[inputs.sampling]
        self._sampled = rows, inputs.num_samples[inputs.sampling]

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> PendingOutput:
        """Nothing: rank 0 does."""
        return PendingOutput(ModelRunnerOutput(), _NONE, None)

    def _add_sampling(self, req_id: str, row: int, data: NewRequestData) -> None:
        """Rank 0 samples."""

    def _remove_sampling(self, row: int) -> None:
        """Rank 0 samples."""

    def _prompt_lists(self, logits: torch.Tensor, targets: IntArray, k: int) -> LogprobsLists:
        """Rank 0 reads them."""
        return LogprobsLists.join([])
