"""Drafts for the whole engine, before there is anything in it that makes them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from octavo.messages import ModelRunnerOutput
from octavo.worker.model_runner import PendingOutput
from octavo.worker.setup import WorkerSetup
from octavo.worker.step_table import StepSize

MOST = 3


class Drafter:
    """Adds drafts to what steps bring: from answers that are known already, some of them wrong.

    Engines are to be built while it is in place.

    Attributes:
        num_steps: with results, so far.
        num_tokens: that they brought.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answers: Sequence[Sequence[int]], wrong: float = 0.3
    ) -> None:
        self._answers, self._wrong, self._random = answers, wrong, random.Random(1)
        self._tokens: dict[str, list[int]] = {}
        self.num_steps = self.num_tokens = 0
        get = PendingOutput.get
        monkeypatch.setattr(PendingOutput, "get", lambda pending: self._add(get(pending)))

        def largest_step(setup: WorkerSetup) -> StepSize:
            requests = setup.config.scheduler.max_num_seqs
            return StepSize(setup.max_num_batched_tokens, requests, requests * (1 + MOST))

        monkeypatch.setattr(WorkerSetup, "largest_step", property(largest_step))

    def _add(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        for req_id, new in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if not new:
                continue
            self.num_steps += 1
            self.num_tokens += len(new)
            tokens = self._tokens.get(req_id, []) + new
            if (answer := self._find(tokens)) is None:
                answer = self._find(tokens := list(new))  # an id that had another request before
            self._tokens[req_id] = tokens
            right = list(answer or ())[len(tokens) :][: self._random.randrange(MOST + 1)]
            output.draft_token_ids[req_id] = [
                token + 1 if self._random.random() < self._wrong else token for token in right
            ]
        return output

    def _find(self, tokens: list[int]) -> Sequence[int] | None:
        return next((a for a in self._answers if list(a[: len(tokens)]) == tokens), None)
