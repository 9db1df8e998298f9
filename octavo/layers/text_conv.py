"""Convolution over a text: an output depends on the tokens around it (DeBERTa V2)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.linear import Linear
from octavo.layers.mlp import ActivatedLinear
from octavo.layers.neighbors import NeighborArray
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor


@dataclass(slots=True)
class TextConv:
    """Block act(proj(tokens around the token))."""

    ops: Ops
    proj: Linear
    """Projection of 2 * `half` + 1 tokens, one after the other, to the hidden size."""
    activation: ActivatedLinear
    half: int
    """Number of tokens before a token, and of those after it."""
    factors: Tensor
    """Factors [2, 1] of tokens outside and inside of a text: 0 and 1."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size]; each text is whole in the step."""
        tokens, size = x.shape
        around = self.ops.empty(tokens, (2 * self.half + 1) * size, like=x)
        for i, distance in enumerate(range(-self.half, self.half + 1)):
            out = around[:, i * size : (i + 1) * size]
            if distance:
                index, inside = (
                    step.arrays[NeighborArray(distance, part).name] for part in ("index", "inside")
                )
                factor = self.ops.embedding(self.factors, inside)
                self.ops.multiply(self.ops.embedding(x, index), factor, out=out)
            else:
                self.ops.multiply(x, self.factors[1], out=out)
        return self.activation(self.proj, around, None)
