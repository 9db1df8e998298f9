"""Specification of a convolution over a text: an output depends on the tokens around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.layers.neighbors import NeighborArray
from octavo.layers.step_table import StepArray
from octavo.models.blocks.base import BlockSpec, Table
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.mlp import Activation
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.text_conv import TextConv
    from octavo.models.blocks.base import Parts
    from octavo.system.tensor import HostTensor


@dataclass(frozen=True)
class Factors01:
    """The two rows 0 and 1: factors of tokens outside and inside of a text."""

    def nbytes(self, max_model_len: int) -> int:
        """Implement `Table`; upper bound for all types."""
        return 8


@dataclass(frozen=True)
class TextConvSpec(BlockSpec):
    """Convolution act(proj(tokens around the token)); beyond its text there are zeros."""

    proj: LinearSpec
    """Projection of `taps` tokens, one after the other."""
    taps: int
    """Number of tokens that an output depends on; odd: as many before the token as after it."""
    activation: Activation

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the projection."""
        return self.proj.weights(names)

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the places of the tokens around each token."""
        half = self.taps // 2
        return tuple(
            NeighborArray(distance, part)
            for distance in range(-half, half + 1)
            if distance
            for part in ("index", "inside")
        )

    def tables(self) -> tuple[Table, ...]:
        """Return the factors of tokens outside and inside of a text."""
        return (Factors01(),)

    def split(self, rank: Rank) -> TextConvSpec:
        """Return the block with a rank's part of the outputs."""
        return replace(self, proj=self.proj.split(rank.share(self.proj.outputs)))

    def build(self, parts: Parts, caches: tuple[int, ...]) -> TextConv:
        """Implement `BlockSpec`."""
        from octavo.layers.mlp import get_activation
        from octavo.layers.text_conv import TextConv
        from octavo.system.tensor import dense, from_numpy

        def factors() -> HostTensor:
            return dense(from_numpy(np.array([[0], [1]], np.float32)), parts.dtype)

        return TextConv(
            parts.ops,
            self.proj.build(parts, "mixer"),
            get_activation(parts.ops, self.activation, gated=False),
            self.taps // 2,
            parts.table(Factors01(), factors),
        )
