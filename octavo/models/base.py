"""Interface of a model for the worker."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.layers.step import StepContext
from octavo.models.spec import ModelSpec


class Model(Protocol):
    """Loaded model; call it under `torch.inference_mode`.

    Attributes:
        spec: description of the model.
        device: device of the weights.
    """

    spec: ModelSpec
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
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
