"""Model runner of a rank that does not sample: another rank does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.messages import (
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
)
from octavo.observability.profiler import span
from octavo.system.tensor import Tensor
from octavo.worker.input_batch import IntArray, LongArray
from octavo.worker.model_runner import Drafts, ModelRunner, PendingOutput

_NONE: LongArray = np.empty(0, np.int64)


@dataclass(slots=True)
class _Sampling:
    """Step with sampled tokens that are still missing in the rows."""

    step: int
    rows: LongArray
    owners: LongArray
    most: LongArray
    """Most tokens that each row may receive."""


class FollowingRunner(ModelRunner):
    """Model runner with the same rows as the rank that samples.

    It reads the sampled tokens when it needs them. Its results are empty.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sampling: deque[_Sampling] = deque()

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        announce: Callable[[Drafts], None] = lambda drafts: None,
    ) -> None:
        """Implement `ModelRunner`."""
        scheduled, state = scheduler_output.scheduled_reqs, self.state
        with span("prepare_inputs"):
            self._update_rows(scheduler_output)
            if not scheduled:
                announce({})
                self._serve(scheduler_output)
                return
            self._num_steps += 1
            self._learn_tokens(scheduled)
            drafts = self._find_drafts(scheduled)
            announce(drafts)
            tokens = sum(r.num_tokens - r.num_drafts for r in scheduled)
            tokens += sum(map(len, drafts.values()))
            inputs = state.batch.gather(scheduled, drafts, state.steps.buffers(tokens, 0))
        with span("forward") as note:
            note(rows=inputs.size.tokens)
            result = self._run(inputs, None)
        if self.setup.rank.is_last:
            self._compute_prompt_logprobs(inputs, result.hidden)
        state.batch.num_computed_tokens[inputs.rows] += inputs.counts
        if len(inputs.sampling):
            rows = inputs.rows[inputs.sampling]
            most = inputs.num_samples[inputs.sampling]
            owners = state.batch.owners[rows]
            self._sampling.append(_Sampling(self._num_steps, rows, owners, most))

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> PendingOutput:
        """Return an empty result: another rank samples."""
        if grammar is not None and self.setup.rank.drafts:
            self._note_forced(grammar)
        if self._experts is not None:
            self._log_experts(self._experts)
        self._failed.clear()
        return PendingOutput(ModelRunnerOutput(), _NONE, None)

    def _learn_tokens(self, scheduled: list[ScheduledRequest]) -> None:
        """Read the tokens that a step's requests need, and all others that have arrived."""
        assert self.group is not None
        broadcast, batch, waiting = self.group.broadcast, self.state.batch, self._sampling
        needed = 0
        if waiting:
            rows = [batch.row_of[request.req_id] for request in scheduled]
            needed = max((it.step for it in waiting if np.isin(it.rows, rows).any()), default=0)
        while waiting and (waiting[0].step <= needed or broadcast.has_tokens(waiting[0].step)):
            it = waiting.popleft()
            tokens, kept = broadcast.read_tokens(it.step, len(it.rows))
            same = it.owners == batch.owners[it.rows]  # another request may use the row now
            rows, kept_now = it.rows[same], kept[same]
            batch.append(rows, tokens[np.repeat(same, kept)], kept_now)
            batch.num_computed_tokens[rows] -= it.most[same] - kept_now

    def _add_sampling(self, req_id: str, row: int, data: NewRequestData) -> None:
        """Do nothing: another rank samples."""

    def _remove_sampling(self, row: int) -> None:
        """Do nothing: another rank samples."""

    def _prompt_lists(self, logits: Tensor, targets: IntArray, k: int) -> LogprobsLists:
        """Return an empty list: another rank reads the logprobs."""
        return LogprobsLists.join([])
