"""Specification of a causal convolution of each channel with its own weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from octavo.checkpoints.base import Source
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.conv import Conv
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class ConvSpec:
    """Convolution of each channel over the last inputs of a request."""

    module: str
    """Module of the checkpoint."""
    channels: int
    """Number of channels in the checkpoint."""
    taps: int
    """Number of inputs that an output depends on."""
    bias: bool
    activation: Literal["none", "silu"] = "none"
    parts: tuple[tuple[int, int], ...] | None = None
    """Channels (begin, end) that a rank computes; None: all."""

    @property
    def size(self) -> int:
        """Number of channels that are computed."""
        return sum(end - begin for begin, end in self.parts or ((0, self.channels),))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state, which is the last inputs: [taps - 1, size]."""
        return self.taps - 1, self.size

    def split(self, *parts: tuple[int, int]) -> ConvSpec:
        """Return the convolution of a rank's channels, each part as (begin, end)."""
        return replace(self, parts=parts)

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weight, and the bias if there is one."""
        module, parts = f"{names.checkpoint}{self.module}", self.parts
        source = Source(f"{module}.weight", (self.channels, 1, self.taps), parts=parts)
        yield Weight(f"{names.own}weight", "vector", (self.size, 1, self.taps), (source,))
        if self.bias:
            source = Source(f"{module}.bias", (self.channels,), parts=parts)
            yield Weight(f"{names.own}bias", "vector", (self.size,), (source,))

    def build(self, parts: Parts) -> Conv:
        """Return the live convolution."""
        from octavo.layers.conv import Conv

        return Conv(
            parts.ops,
            parts.tensor("weight").view(self.size, self.taps),
            parts.tensor("bias") if self.bias else None,
            self.activation,
        )
