"""What a worker is built from. Imports no torch, so that the control plane can fill it in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from octavo.config import EngineConfig
from octavo.distributed import ALONE, Rank
from octavo.models.spec import ModelSpec
from octavo.structured_output.base import MAX_FORCED
from octavo.worker.memory import Scratch
from octavo.worker.news import news_nbytes
from octavo.worker.step_table import StepSize

# Prompt logprobs need logits for every prompt token. They are made for this many tokens at a time,
# or for `max_num_seqs` if that is less: no more than the memory plan has for an ordinary step.
PROMPT_LOGPROBS_ROWS = 64
FORCED_DRAFTS = 32
"""Most places in a step for drafts of grammars, where there are no others."""


@dataclass(frozen=True)
class WorkerSetup:
    """All that a worker needs to build its part of the model."""

    config: EngineConfig
    spec: ModelSpec
    model_path: Path
    dtype: str
    """"float32", "float16" or "bfloat16"."""
    max_model_len: int
    max_num_batched_tokens: int
    scratch: Scratch | None = None
    """On a CPU what the memory plan has for steps."""
    kept_layers: tuple[int, ...] = ()
    """Layers whose hidden states steps return, for draft heads and pooling."""
    draft: WorkerSetup | None = None
    """Of the model that drafts. Its blocks are those of the target."""
    rank: Rank = ALONE
    """Which of the processes that compute the model together this worker is in."""
    group: int | None = None
    """The descriptor of their memory, of `group_nbytes`; inherited."""

    @cached_property
    def part(self) -> ModelSpec:
        """What of the model this rank has."""
        return self.spec.split(self.rank)

    @property
    def prompt_logprobs_rows(self) -> int:
        """Most rows of logits of prompt tokens at a time."""
        return min(PROMPT_LOGPROBS_ROWS, self.config.scheduler.max_num_seqs)

    @property
    def group_nbytes(self) -> int:
        """What the memory of a group takes: what rank 0 tells the others, and the buffers."""
        assert self.scratch is not None
        return news_nbytes(self.largest_step, self.max_num_drafts) + self.scratch.shared

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a request in a step."""
        speculative = self.config.speculation.speculative_config
        return 0 if speculative is None else speculative.num_drafts

    @property
    def max_num_drafts(self) -> int:
        """Most drafts of all requests in a step: grammars have some without speculation."""
        requests = self.config.scheduler.max_num_seqs
        return max(
            requests * self.num_speculative_tokens, min(requests * MAX_FORCED, FORCED_DRAFTS)
        )

    @property
    def largest_step(self) -> StepSize:
        """Most of everything in a step."""
        tokens, requests = self.max_num_batched_tokens, self.config.scheduler.max_num_seqs
        samples = min(requests + self.max_num_drafts, tokens)  # one for each token at most
        return StepSize(tokens, requests, max(requests, samples))
