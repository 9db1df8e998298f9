"""What every drafting method is: the built-in ones, and those of tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.base import AttentionBackend
from octavo.kernels.base import Ops
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import NewRequestData
from octavo.models.base import Model
from octavo.models.loader import LoadedWeights
from octavo.plan.setup import WorkerSetup
from octavo.sampling.state import SamplingState
from octavo.worker.graphs import StepResult
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo.worker.platform import Platform

LongArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a proposer works for."""

    setup: WorkerSetup
    model: Model
    batch: InputBatch
    """The live requests' rows: tokens so far, and how many of them are computed."""
    sampling: SamplingState
    """How they are sampled."""
    kv: KVCacheConfig
    platform: Platform
    ops: Ops
    backend: AttentionBackend
    weights: list[LoadedWeights] = field(default_factory=list)
    """Those of all models, its own included: they are given back while the engine sleeps."""
    caches: list[Tensor] = field(default_factory=list)
    """KV caches for which that holds, too."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for R requests."""

    token_ids: Sequence[Sequence[int]]
    """[R][...] those of each request, which follow its last token; may be none."""
    probs: Tensor | None = None
    """float32 [all drafts, vocab], in order, what each was drawn from; None: each was certain."""


class Proposer(ABC):
    """Proposes the next tokens of requests. What it proposes changes how many steps an answer
    takes, never the answer, so it may be as wrong as it likes.

    All is called on the worker's thread: when a request comes or goes `add_row` and `remove_row`,
    before a step `propose`, and once a step's tokens are in the rows `observe`.

    Args:
        target: the model and its live requests.
    """

    def __init__(self, target: Target) -> None:
        self.target = target

    def add_row(self, row: int, data: NewRequestData) -> None:
        """Takes in a request, new or resumed, whose tokens are in its row."""

    def remove_row(self, row: int) -> None:
        """Forgets a request; its tokens are still in its row."""

    def copy_blocks(self, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        """Copies what it keeps in KV blocks, as the target does before a step."""

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """The target's KV of these blocks comes from elsewhere now: nothing was computed here."""

    def observe(self, inputs: StepInputs, result: StepResult) -> None:
        """Looks at a step that has been sampled.

        Args:
            inputs: what was computed, drafts included. `batch.num_computed_tokens` and the rows
                tell how much of it was right.
            result: hidden states, good until the next step is run.
        """

    @abstractmethod
    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        """Drafts for some requests; all their tokens are known, and all but the last computed.

        Args:
            rows: int64 [R], none twice.
            counts: int64 [R], most drafts for each, from 1 to `setup.num_speculative_tokens`.
        """
