"""A logits processor: only tokens with even ids, for requests that ask for it."""

from __future__ import annotations

import math

import torch

from octavo.kernels.base import Ops
from octavo.sampling.logits_processors.base import LogitsProcessor, NewRow, StepRows


class EvenTokens(LogitsProcessor):
    """For requests with `extra_args={"even_tokens": True}`."""

    extra_args = frozenset({"even_tokens"})

    def add_row(self, new: NewRow) -> bool:
        """Keep nothing: what it does is the same for all."""
        return bool((new.params.extra_args or {})["even_tokens"])

    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Forbid the others."""
        logits[torch.from_numpy(step.at), 1::2] = -math.inf
