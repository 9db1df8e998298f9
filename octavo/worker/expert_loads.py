"""Numbers of tokens that chose each expert."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.kernels.native import NativeOps
from octavo.messages import ExpertLoad
from octavo.models.base import Model
from octavo.models.decoder import DecoderModel
from octavo.system.tensor import from_numpy


class ExpertLoads:
    """Numbers of tokens of each expert, summed over all steps by the kernel of the experts.

    Args:
        model: the model; its mixtures count from now on.
        first: index of the model's first layer.
    """

    def __init__(self, model: DecoderModel, first: int) -> None:
        mixtures = model.mixtures
        most = max(len(mixture.up.weights) for _, mixture in mixtures)
        self.layers = [first + layer for layer, _ in mixtures]
        self.counts: NDArray[np.int64] = np.zeros((len(mixtures), most), np.int64)
        """Tokens by mixture and expert."""
        self.num_experts = [len(mixture.up.weights) for _, mixture in mixtures]
        for (_, mixture), row in zip(mixtures, self.counts, strict=True):
            mixture.counts = from_numpy(row[: len(mixture.up.weights)])

    @classmethod
    def of(cls, model: Model, ops: Ops, first: int) -> ExpertLoads | None:
        """Return the loads of a model; None without experts, or on a device that does not count."""
        if not (isinstance(ops, NativeOps) and isinstance(model, DecoderModel) and model.mixtures):
            return None
        return cls(model, first)

    def summary(self) -> ExpertLoad:
        """Return each layer's sum over its experts, and its largest number; 0 without experts."""
        zeros = [0] * (self.layers[-1] + 1)
        load = ExpertLoad(self.counts.shape[1], tokens=zeros, most=zeros.copy())
        sums, most = self.counts.sum(1).tolist(), self.counts.max(1).tolist()
        for layer, tokens, largest in zip(self.layers, sums, most, strict=True):
            load.tokens[layer] += tokens
            load.most[layer] += largest
        return load

    def by_layer(self) -> list[tuple[int, list[int]]]:
        """Return (layer, tokens of each expert) for each mixture."""
        rows = zip(self.layers, self.counts.tolist(), self.num_experts, strict=True)
        return [(layer, counts[:count]) for layer, counts, count in rows]
