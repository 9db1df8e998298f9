"""First part of an encoder: from the arrays of a run's items to hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.kernels.base import Ops
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.norm import Norm
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


class EncoderInput(Protocol):
    """Live first part of an encoder."""

    def __call__(self, step: StepContext) -> Tensor:
        """Return the first hidden states [T, hidden_size], from `StepContext.arrays`."""
        ...


@dataclass(slots=True)
class TextInput:
    """Embedding of tokens."""

    embed: Embedding

    def __call__(self, step: StepContext) -> Tensor:
        """Implement `EncoderInput`."""
        return self.embed(step.arrays["input_ids"], step.positions)


@dataclass(slots=True)
class PatchInput:
    """Projection of patches, and learned vectors that are added to them."""

    ops: Ops
    project: Linear
    """Projection of the numbers of a patch to [hidden_size]."""
    table: Tensor | None
    """Learned vectors [N, hidden_size]: positions, and others; None: there are none."""
    norm: Norm
    patch_norm: Norm
    projected_norm: Norm

    def __call__(self, step: StepContext) -> Tensor:
        """Implement `EncoderInput`."""
        x = self.projected_norm(self.project(self.patch_norm(step.arrays["patches"])))
        if self.table is not None:
            places, weights = step.arrays["places"], step.arrays.get("weights")
            x = self.ops.add(x, self.ops.sum_experts(self.table, places, weights))
        return self.norm(x)


class VectorInput:
    """Vectors that are the hidden states."""

    def __call__(self, step: StepContext) -> Tensor:
        """Implement `EncoderInput`."""
        return step.arrays["vectors"]
