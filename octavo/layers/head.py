"""From the last hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear


class Head:
    """The LM head, and what is done to its logits.

    Args:
        ops: table of operations.
        lm_head: to the vocabulary.
        project: from the hidden size to what `lm_head` takes, or None.
        scale: factor on the logits, or None.
        soft_cap: cap * tanh(logit / cap), or None.
    """

    __slots__ = ("gather", "lm_head", "project", "scale", "scale_", "soft_cap", "soft_cap_")

    def __init__(
        self,
        ops: Ops,
        lm_head: Linear,
        *,
        project: Linear | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self.gather = ops.embedding
        self.scale_ = ops.scale_
        self.soft_cap_ = ops.soft_cap_
        self.lm_head = lm_head
        self.project = project
        self.scale = scale
        self.soft_cap = soft_cap

    def __call__(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rows int64 [M] of hidden [T, hidden_size], or all, to float32 [M, vocab_size]."""
        if rows is not None:
            hidden = self.gather(hidden, rows)
        if self.project is not None:
            hidden = self.project(hidden)
        logits = self.lm_head(hidden, torch.float32)
        if self.scale is not None:
            self.scale_(logits, self.scale)
        if self.soft_cap is not None:
            self.soft_cap_(logits, self.soft_cap)
        return logits
