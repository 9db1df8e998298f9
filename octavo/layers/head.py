"""Computation of logits from the last hidden states."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.kernels.base import Ops
from octavo.layers.adapter import Adapters
from octavo.layers.linear import Linear
from octavo.layers.shared import Columns
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class Head:
    """LM head and the transformations of its logits."""

    ops: Ops
    lm_head: Linear
    """Projection to the vocabulary."""
    project: Linear | None = None
    """Projection from the hidden size to `lm_head`'s input size."""
    scale: float | None = None
    """Factor of the logits."""
    soft_cap: float | None = None
    """Cap in cap * tanh(logit / cap)."""
    prompt_columns: Columns | None = None
    """Columns for the logits of prompts, if other ranks have the rest of the vocabulary: the step's
    own logits must survive in their buffer meanwhile."""
    adapters: Adapters | None = None
    """Adapters, which may change the projections; None: they are off."""

    def __call__(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Map rows int64 [M] of hidden [T, hidden_size], or all rows, to float32 [M, vocab_size].

        With several ranks only the result on the sampling rank is defined.
        """
        if rows is None:
            return self._compute(hidden, self.prompt_columns)
        hidden = self.ops.embedding(hidden, rows)
        if self.adapters is None:
            return self._compute(hidden, None)
        with self.adapters.use(self.adapters.slots_of(rows)):
            return self._compute(hidden, None)

    def _compute(self, hidden: Tensor, columns: Columns | None) -> Tensor:
        """Return the logits of all rows; `columns` replaces the columns of the LM head."""
        if self.project is not None:
            hidden = self.project(hidden)
        lm_head = self.lm_head
        if columns is not None:
            lm_head = replace(lm_head, columns=columns)
        logits = lm_head(hidden, "float32")
        if lm_head.columns is not None and not lm_head.columns.leads:
            return logits  # the sampling rank changes them
        if self.scale is not None:
            self.ops.scale_(logits, self.scale)
        if self.soft_cap is not None:
            self.ops.soft_cap_(logits, self.soft_cap)
        return logits
