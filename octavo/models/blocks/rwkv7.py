"""Specifications of the two mixers of RWKV 7."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.checkpoints.base import Source
from octavo.errors import ConfigError
from octavo.layers.state_table import STATE_ARRAYS
from octavo.layers.step_table import StepArray
from octavo.models.blocks.base import BlockSpec, LargestStep
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.low_rank import LowRankSpec
from octavo.models.blocks.mlp import MLPSpec
from octavo.models.cache import CacheSpec
from octavo.models.state_cache import StateCache
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.rwkv7 import ChannelMix, TimeMix, TokenShift
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class TokenShiftSpec:
    """Mixes of each token with the previous one of its request."""

    names: tuple[str, ...]
    """Tensors of the checkpoint with the shares of the previous token, one for each mix."""
    shape: tuple[int, ...]
    """Shape of each tensor; its last number is the size of a token."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the shares of all mixes."""
        sources = tuple(Source(names.checkpoint + name, self.shape) for name in self.names)
        shape = self.shape[0] * len(self.names), *self.shape[1:]
        yield Weight(f"{names.own}mix", "vector", shape, sources, dtype="float32")

    def build(self, parts: Parts, cache: int) -> TokenShift:
        """Return the live part; `cache` is the index of the block's states."""
        from octavo.layers.rwkv7 import TokenShift

        return TokenShift(parts.ops, cache, parts.tensor("mix").view(len(self.names), -1))


@dataclass(frozen=True, kw_only=True)
class TimeMixSpec(BlockSpec):
    """Time mix of RWKV 7 (Peng et al., arXiv 2503.14456)."""

    shift: TokenShiftSpec
    """Mixes for receptance, decay, key, value, learning rate and gate."""
    receptance: LinearSpec
    key: LinearSpec
    value: LinearSpec
    decay: LowRankSpec
    rate: LowRankSpec
    gate: LowRankSpec
    value_rate: LowRankSpec | None
    """Projection to the share of the first layer's value; None: this is the first layer."""
    out_proj: LinearSpec
    module: str
    """Module of the checkpoint with k_k, k_a, r_k and the norm of each head."""
    num_heads: int
    head_size: int
    eps: float
    """Term of the variance in the norm of each head."""
    part: tuple[int, int] | None = None
    """Heads (begin, end) that a rank computes; None: all."""

    @property
    def _part(self) -> tuple[int, int]:
        return self.part or (0, self.num_heads)

    @property
    def _columns(self) -> tuple[int, int]:
        """Columns (begin, end) of the rank's heads among those of all heads."""
        begin, end = self._part
        return begin * self.head_size, end * self.head_size

    @property
    def _own_heads(self) -> int:
        begin, end = self._part
        return end - begin

    def layer_inputs(self) -> tuple[int, int]:
        """Return the shape of a token's value in the first layer."""
        return 1, self._own_heads * self.head_size

    def split(self, rank: Rank) -> TimeMixSpec:
        """Return the block with a rank's heads.

        Raises:
            ConfigError: the model has fewer heads than ranks.
        """
        if rank.size > self.num_heads:
            raise ConfigError(
                f"tensor_parallel_size={rank.size} is more than the {self.num_heads} heads of the "
                "model's time mix; lower it to at most that number."
            )
        own = replace(self, part=rank.share(self.num_heads))
        columns, out = own._columns, self.out_proj
        return replace(
            own,
            receptance=self.receptance.split(columns),
            key=self.key.split(columns),
            value=self.value.split(columns),
            decay=self.decay.split(columns),
            rate=self.rate.split(columns),
            gate=self.gate.split(columns),
            value_rate=None if self.value_rate is None else self.value_rate.split(columns),
            out_proj=out.split_inputs(columns, rank)
            if rank.reduces
            else out.split(rank.share(out.outputs)),
        )

    @property
    def _projections(self) -> dict[str, LinearSpec | LowRankSpec]:
        names = ("receptance", "decay", "key", "value", "rate", "gate", "value_rate")
        found = {name: getattr(self, name) for name in names}
        return {name: projection for name, projection in found.items() if projection is not None}

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights in the order of their use."""
        yield from self.shift.weights(names)
        for name, projection in self._projections.items():
            yield from projection.weights(names.of(name))
        size, prefix = self.num_heads * self.head_size, f"{names.checkpoint}{self.module}."
        for name, dummy in (
            ("k_k", 1.0),
            ("k_a", 1.0),
            ("g_norm.weight", 1.0),
            ("g_norm.bias", 0.0),
        ):
            source = Source(prefix + name, (size,), parts=(self._columns,), dummy=dummy)
            yield self._vector(names, name, source, (self._own_heads * self.head_size,))
        shape = self.num_heads, self.head_size
        bonus = Source(f"{prefix}r_k", shape, parts=(self._part,), dummy=0.0)
        yield self._vector(names, "r_k", bonus, (self._own_heads, self.head_size))
        yield from self.out_proj.weights(names.of("out_proj"))

    def _vector(self, names: Names, name: str, source: Source, shape: tuple[int, ...]) -> Weight:
        return Weight(f"{names.own}{name}", "vector", shape, (source,), dtype="float32")

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the cache of the last token, and of a matrix of each head."""
        return (
            StateCache(
                ((self.shift.shape[-1],), (self._own_heads, self.head_size, self.head_size))
            ),
        )

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the slots of the states."""
        return STATE_ARRAYS

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return the bytes of a head's state and its next tokens, in each thread."""
        from octavo.kernels.sizes import wkv7_nbytes

        return largest.num_threads * wkv7_nbytes(self.head_size)

    def build(self, parts: Parts, caches: tuple[int, ...]) -> TimeMix:
        """Implement `BlockSpec`."""
        from octavo.kernels.ops_states import Wkv7Parameters
        from octavo.layers.rwkv7 import TimeMix

        columns = None
        if self.out_proj.parts is not None:
            columns = parts.columns("heads", self.out_proj.inputs, self._columns)
        live: dict[str, Any] = {"value_rate": None} | {
            name: projection.build(parts.of(name)) for name, projection in self._projections.items()
        }
        return TimeMix(
            ops=parts.ops,
            shift=self.shift.build(parts, caches[0]),
            **live,
            out_proj=self.out_proj.build(parts.of("out_proj"), "mixer"),
            parameters=Wkv7Parameters(
                removal=parts.tensor("k_k"),
                key_rate=parts.tensor("k_a"),
                bonus=parts.tensor("r_k").view(-1),
                weight=parts.tensor("g_norm.weight"),
                bias=parts.tensor("g_norm.bias"),
                eps=self.eps,
            ),
            num_heads=self._own_heads,
            columns=columns,
        )


@dataclass(frozen=True, kw_only=True)
class ChannelMixSpec(MLPSpec):
    """Channel mix of RWKV 7: feed-forward block whose input is mixed with the previous token."""

    shift: TokenShiftSpec

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the share of the previous token, then the weights of the projections."""
        yield from self.shift.weights(names.of("shift"))
        yield from super().weights(names)

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the cache of the last token."""
        return (StateCache((self.shift.shape[-1:],)),)

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the slots of the states."""
        return STATE_ARRAYS

    def build(self, parts: Parts, caches: tuple[int, ...]) -> ChannelMix:  # type: ignore[override]
        """Implement `BlockSpec`."""
        from octavo.layers.rwkv7 import ChannelMix

        return ChannelMix(self.shift.build(parts.of("shift"), caches[0]), super().build(parts, ()))
