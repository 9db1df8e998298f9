"""Drafts for the whole engine, wrong at the rate that a test sets."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from octavo.messages import NewRequestData
from octavo.scheduler.speculation import DraftLengths
from octavo.worker import worker
from octavo.worker.graphs import StepResult
from octavo.worker.input_batch import StepInputs
from octavo.worker.spec_decode.base import LongArray, Proposal, Proposer, Target

SETTINGS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
"""Setting of engines with the drafts of a `Drafter`."""


class Drafter:
    """Drafter that proposes from known answers, with some errors.

    Create engines with `SETTINGS` while it is installed. They use all possible drafts.

    Attributes:
        num_steps: number of steps in which requests sampled, so far.
        num_tokens: number of tokens from these steps.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answers: Sequence[Sequence[int]], wrong: float = 0.3
    ) -> None:
        self.answers, self.wrong, self.random = answers, wrong, random.Random(1)
        self.num_steps = self.num_tokens = 0
        monkeypatch.setattr(worker, "make_proposer", lambda target: _FromAnswers(target, self))
        monkeypatch.setattr(DraftLengths, "choose", lambda lengths, num_reqs: lengths.most)


class _FromAnswers(Proposer):
    def __init__(self, target: Target, drafter: Drafter) -> None:
        super().__init__(target)
        self._drafter = drafter
        self._seen: dict[int, int] = {}

    def add_row(self, row: int, data: NewRequestData) -> None:
        self._seen[row] = len(data.token_ids)

    def observe(self, inputs: StepInputs, result: StepResult) -> None:
        for row in inputs.rows[inputs.sampling].tolist():
            num_tokens = int(self.target.batch.num_tokens[row])
            self._drafter.num_steps += 1
            self._drafter.num_tokens += num_tokens - self._seen[row]
            self._seen[row] = num_tokens

    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        batch, drafter = self.target.batch, self._drafter
        drafts = []
        for row, most in zip(rows.tolist(), counts.tolist(), strict=True):
            output = batch.token_ids[row, batch.num_prompt_tokens[row] : batch.num_tokens[row]]
            done = len(output)
            found = (a for a in drafter.answers if list(a[:done]) == output.tolist())
            right = list(next(found, ()))[done:][: drafter.random.randrange(most + 1)]
            drafts.append([t + 1 if drafter.random.random() < drafter.wrong else t for t in right])
        return Proposal(drafts)
