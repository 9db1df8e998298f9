"""From the last hidden states to logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.shared import Columns


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
    prompt_columns: Columns | None = None
    """Of all rows, where other ranks have the rest of the vocabulary: a step's own logits wait
    while those of prompts are made."""

    def __call__(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rows int64 [M] of hidden [T, hidden_size], or all, to float32 [M, vocab_size].

        With other ranks these are for the one that samples; the others' mean nothing.
        """
        if rows is not None:
            hidden = self.ops.embedding(hidden, rows)
        if self.project is not None:
            hidden = self.project(hidden)
        lm_head = self.lm_head
        if self.prompt_columns is not None and rows is None:
            lm_head = replace(lm_head, columns=self.prompt_columns)
        logits = lm_head(hidden, torch.float32)
        if lm_head.columns is not None and not lm_head.columns.leads:
            return logits  # which the rank that samples changes
        if self.scale is not None:
            self.ops.scale_(logits, self.scale)
        if self.soft_cap is not None:
            self.ops.soft_cap_(logits, self.soft_cap)
        return logits
