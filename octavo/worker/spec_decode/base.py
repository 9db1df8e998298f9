"""Interface of drafting methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.attention.base import AttentionBackend
from octavo.kernels.base import Ops
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import NewRequestData
from octavo.models.base import Model
from octavo.models.loader import LoadedWeights
from octavo.plan.setup import WorkerSetup
from octavo.sampling.state import SamplingState
from octavo.system.tensor import Tensor
from octavo.worker.adapters import ModelAdapters
from octavo.worker.graphs import StepResult
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo.worker.platform import Platform

LongArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Target:
    """Model and live requests that a proposer drafts for."""

    setup: WorkerSetup
    model: Model
    batch: InputBatch
    """Rows of the live requests: their tokens, and the numbers of computed tokens."""
    sampling: SamplingState
    """Sampling state of the requests."""
    kv: KVCacheConfig
    platform: Platform
    ops: Ops
    backend: AttentionBackend
    weights: list[LoadedWeights] = field(default_factory=list)
    """Weights of all models, including the proposer's; a sleeping engine releases them."""
    caches: list[Tensor] = field(default_factory=list)
    """KV caches of all models; a sleeping engine releases them."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for R requests."""

    token_ids: Sequence[Sequence[int]]
    """[R][...] drafts of each request after its last token; may be empty."""
    probs: NDArray[np.float32] | None = None
    """float32 [all drafts, vocab]: the distribution of each draft; None: each was certain."""


class Proposer(ABC):
    """Proposer of the next tokens of requests.

    With exact acceptance, drafts change the number of steps of an answer, but never the answer.

    The worker's thread calls all methods: `add_row` and `remove_row` when a request starts and
    ends, `propose` before a step, and `observe` once a step's tokens are in the rows.

    Args:
        target: the model and its live requests.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.adapters: ModelAdapters | None = None
        """Adapters of the draft model; None without a draft model or without adapters."""

    def add_row(self, row: int, data: NewRequestData) -> None:
        """Add a request, new or resumed; its tokens are in its row."""

    def remove_row(self, row: int) -> None:
        """Remove a request; its tokens are still in its row."""

    def copy_blocks(self, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the proposer's data of KV blocks, as the target does before a step."""

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """Mark blocks as not computed: a connector has loaded the target's KV of the blocks."""

    def observe(self, inputs: StepInputs, result: StepResult) -> None:
        """Process a step that has been sampled.

        Args:
            inputs: the computed tokens, drafts included. `batch.num_computed_tokens` and the rows
                show which of them were accepted.
            result: hidden states, valid until the next step runs.
        """

    @abstractmethod
    def propose(self, rows: LongArray, counts: LongArray) -> Proposal:
        """Return drafts for requests with all tokens known and all except the last computed.

        Args:
            rows: int64 [R], distinct rows.
            counts: int64 [R], most drafts for each, from 1 to `setup.num_speculative_tokens`.
        """
