"""Interface of a model for the worker."""

from __future__ import annotations

from typing import Protocol

from octavo.layers.step import StepContext
from octavo.models.spec import ModelSpec
from octavo.system.tensor import Tensor


class Model(Protocol):
    """Loaded model.

    Attributes:
        spec: description of the model.
    """

    spec: ModelSpec

    @property
    def dtype(self) -> str:
        """Type of weights and activations."""
        ...

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """Compute the tokens of a step and store the state that later steps need.

        Args:
            input_ids: [T] int64, the tokens of all requests one after the other.
            step: positions, cache blocks and other context of the step.

        Returns:
            Hidden states [T, hidden_size], the input of `head`, in the model's dtype.
        """
        ...

    def head(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states.

        Args:
            hidden: [T, hidden_size].
            rows: int64 [M], the rows to use; None: all.

        Returns:
            float32 [M, vocab_size].
        """
        ...
