"""What a worker is built from. Imports no torch, so that the control plane can fill it in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.config import EngineConfig
from octavo.models.spec import ModelSpec
from octavo.structured_output.base import MAX_FORCED
from octavo.worker.memory import Scratch
from octavo.worker.step_table import StepSize

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
    rank: int = 0
    """The worker's number among those that compute together."""
    world_size: int = 1
    """How many these are."""

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
