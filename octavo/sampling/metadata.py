"""Sampling parameters of the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.acceptance import Drafted
from octavo.sampling.logits_processors.base import LogitsProcessor, StepRows

NO_LOGPROBS = -2
"""Value of `SamplingMetadata.num_logprobs` of a row without logprobs (-1: whole vocabulary)."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The R rows of one step, in the order of the logits. Made by `SamplingState.metadata`."""

    params: NDArray[np.void]
    """`SAMPLING_ROW` [R]."""
    num_logprobs: NDArray[np.int64]
    """[R], number of logprobs; -1: the whole vocabulary, `NO_LOGPROBS`: none requested."""
    processors: list[tuple[LogitsProcessor, StepRows]]
    """Processors that change logits in this step, in order, each with its rows."""
    logprob_token_ids: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    """[number of logprobs], the token ids that a row requests explicitly."""
    drafted: Drafted | None = None
    """Drafts with other rules of acceptance than equality with the sampled token."""

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.params)

    @property
    def plain(self) -> bool:
        """True if tokens are chosen from unchanged logits and no logprobs are requested."""
        return not self.processors and bool((self.num_logprobs == NO_LOGPROBS).all())
