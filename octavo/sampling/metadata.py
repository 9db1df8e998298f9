"""One step's view of the sampling parameters: what the sampler has to know about each row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.acceptance import Drafted
from octavo.sampling.logits_processors.base import LogitsProcessor, StepRows

NO_LOGPROBS = -2
"""In `SamplingMetadata.num_logprobs`: the row asks for none (-1 asks for the whole vocabulary)."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The R rows of one step, in the order of the logits. Made by `SamplingState.metadata`."""

    params: NDArray[np.void]
    """`SAMPLING_ROW` [R]."""
    num_logprobs: NDArray[np.int64]
    """[R]; -1: the whole vocabulary, `NO_LOGPROBS`: none asked for."""
    processors: list[tuple[LogitsProcessor, StepRows]]
    """Those that change logits in this step, in their order, each with its rows."""
    logprob_token_ids: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    """[number of logprobs], the tokens that a row asks for by their ids."""
    drafted: Drafted | None = None
    """Drafts that are kept by other rules than that they are what is sampled."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.params)

    @property
    def plain(self) -> bool:
        """Whether tokens are chosen from the logits as they are, and nothing else is asked for."""
        return not self.processors and bool((self.num_logprobs == NO_LOGPROBS).all())
