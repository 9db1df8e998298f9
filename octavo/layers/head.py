"""From the last hidden states to logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear


@dataclass(slots=True)
class Head:
    """The LM head, and what is done to its logits."""

    ops: Ops
    lm_head: Linear
    """To the vocabulary."""
    project: Linear | None = None
    """From the hidden size to what `lm_head` takes."""
    scale: float | None = None
    """Factor on the logits."""
    soft_cap: float | None = None
    """cap * tanh(logit / cap)."""

    def __call__(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rows int64 [M] of hidden [T, hidden_size], or all, to float32 [M, vocab_size]."""
        if rows is not None:
            hidden = self.ops.embedding(hidden, rows)
        if self.project is not None:
            hidden = self.project(hidden)
        logits = self.lm_head(hidden, torch.float32)
        if self.scale is not None:
            self.ops.scale_(logits, self.scale)
        if self.soft_cap is not None:
            self.ops.soft_cap_(logits, self.soft_cap)
        return logits
