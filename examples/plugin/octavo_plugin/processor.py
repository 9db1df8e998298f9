"""A logits processor: only tokens with even ids, for requests that ask for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from octavo.kernels.base import Ops
from octavo.messages import CoreSamplingParams
from octavo.sampling.logits_processors.base import LogitsProcessor, StepRows


class EvenTokens(LogitsProcessor):
    """For requests with `extra_args={"even_tokens": True}`."""

    extra_args = frozenset({"even_tokens"})

    def add_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> bool:
        """Keeps nothing: what it does is the same for all."""
        return True

    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Forbids the others."""
        logits[:, 1::2] = -math.inf
