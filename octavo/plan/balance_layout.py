"""Layout of the memory through which ranks move experts to balance their loads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from octavo.config.device import EplbConfig
from octavo.models.weights import Weight
from octavo.system.distributed import COUNTER_NBYTES, aligned


@dataclass(frozen=True)
class LayerSlots:
    """Number of experts of a mixture, and the slots that each rank has for them."""

    block: str
    """Prefix of the names of the block's weights; see `ExpertOf`."""
    experts: int
    """Number of all experts."""
    slots: int
    """Number of a rank's slots; each has one expert."""
    up_nbytes: int
    """Bytes of an expert's packed weight up."""
    down_nbytes: int
    """Bytes of an expert's packed weight down."""

    @property
    def expert_nbytes(self) -> int:
        """Bytes of an expert."""
        return self.up_nbytes + self.down_nbytes


@dataclass(frozen=True)
class BalanceLayout:
    """Layout: three counters for each rank, two placements, and the moving experts of a layer."""

    layers: tuple[LayerSlots, ...]
    """Mixtures in the order of the forward pass."""
    ranks: int
    """Number of ranks that divide the experts."""

    @classmethod
    def of(cls, weights: Iterable[Weight], dtype: str, ranks: int) -> BalanceLayout:
        """Return the layout for a model.

        Args:
            weights: a rank's part of the model's weights.
            dtype: type of the model.
            ranks: number of ranks that divide the experts.
        """
        found: dict[str, dict[int, list[Weight]]] = {}
        for weight in weights:
            if (expert := weight.expert) is not None:
                found.setdefault(expert.block, {}).setdefault(expert.index, []).append(weight)
        layers = []
        for block, own in found.items():
            up, down = next(iter(own.values()))
            assert up.expert is not None
            sizes = up.nbytes(dtype), down.nbytes(dtype)
            layers.append(LayerSlots(block, up.expert.count, len(own), *sizes))
        return cls(tuple(layers), ranks)

    @property
    def versions(self) -> int:
        """Offset of a counter of each rank: the number of switches that it has made."""
        return 0

    @property
    def ready(self) -> int:
        """Offset of a counter of each rank: the step from which on its experts may move."""
        return self.ranks * COUNTER_NBYTES

    @property
    def decisions(self) -> int:
        """Offset of a counter of each rank: the checksum of the placement that it moves to."""
        return 2 * self.ranks * COUNTER_NBYTES

    @property
    def placement_ends(self) -> list[int]:
        """End of each layer's part of a placement: int32 [ranks, slots]."""
        return list(accumulate(self.ranks * layer.slots for layer in self.layers))

    def placement(self, version: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of a version's placement.

        The memory keeps the placements of the last two versions.
        """
        nbytes = 4 * self.placement_ends[-1]
        begin = 3 * self.ranks * COUNTER_NBYTES + version % 2 * aligned(nbytes)
        return begin, begin + nbytes

    @property
    def staging(self) -> int:
        """Offset of the moving experts."""
        return 3 * self.ranks * COUNTER_NBYTES + 2 * aligned(4 * self.placement_ends[-1])

    @property
    def nbytes(self) -> int:
        """Size of the whole memory in bytes."""
        moving = max(layer.experts * layer.expert_nbytes for layer in self.layers)
        return self.staging + aligned(moving)

    @property
    def counts_shape(self) -> tuple[int, int]:
        """Shape of an array with a number for each expert of each mixture: [mixtures, experts]."""
        return len(self.layers), max(layer.experts for layer in self.layers)

    def rank_nbytes(self, config: EplbConfig) -> int:
        """Return the bytes of a rank's own arrays: shares, current loads, and earlier ones."""
        layers, experts = self.counts_shape
        earlier = config.window_size // config.step_interval + 1
        return 8 * layers * experts * (4 + earlier)
