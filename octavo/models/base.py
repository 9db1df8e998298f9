"""What the worker needs of a model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.layers.step import StepContext
from octavo.models.spec import ModelSpec


class Model(Protocol):
    """A model that is loaded; call it under `torch.inference_mode`.

    Attributes:
        spec: what it is.
        device: where the weights are.
    """

    spec: ModelSpec
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        ...

    def forward(self, input_ids: Tensor, step: StepContext) -> Tensor:
        """Compute the tokens of a step and stores what later steps need of them.

        Args:
            input_ids: [T] int64, the tokens of all requests one after the other.
            step: where they are.

        Returns:
            Hidden states [T, hidden_size] as `head` takes them, in the model's dtype.
        """
        ...

    def head(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Hidden states to logits.

        Args:
            hidden: [T, hidden_size].
            rows: int64 [M], which of them; None: all.

        Returns:
            float32 [M, vocab_size].
        """
        ...
