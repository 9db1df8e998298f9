"""Logits processor: only tokens with even ids, on request."""

from __future__ import annotations

import math

import torch

from octavo.kernels.base import Ops
from octavo.sampling.logits_processors.base import LogitsProcessor, NewRow, StepRows


class EvenTokens(LogitsProcessor):
    """Processor for requests with `extra_args={"even_tokens": True}`."""

    extra_args = frozenset({"even_tokens"})

    def add_row(self, new: NewRow) -> bool:
        """Accept a request with `even_tokens`; it needs no state."""
        return bool((new.params.extra_args or {})["even_tokens"])

    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Forbid odd token ids."""
        logits[torch.from_numpy(step.at), 1::2] = -math.inf
