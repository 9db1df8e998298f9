"""Specification of the mixer of Mamba-1: a vector as the state of each channel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Source
from octavo.layers.state_table import STATE_ARRAYS
from octavo.layers.step_table import StepArray
from octavo.models.blocks.base import BlockSpec, LargestStep, Table
from octavo.models.blocks.conv import ConvSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.cache import CacheSpec
from octavo.models.state_cache import StateCache
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.mamba import Mamba
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True, kw_only=True)
class MambaSpec(BlockSpec):
    """Mixer of Mamba-1 (Gu and Dao, arXiv 2312.00752)."""

    in_proj: LinearSpec
    """Projection to all x (the convolution's input), then all gates."""
    conv: ConvSpec
    x_proj: LinearSpec
    """Projection of the convolved x of all channels to a token's step, B and C."""
    dt_proj: LinearSpec
    """Projection of a token's step to the step sizes of the channels, without its bias."""
    out_proj: LinearSpec
    module: str
    """Module of the checkpoint with A_log, D and dt_proj.bias."""
    state_size: int
    """Number of rows of the state, which is the number of elements of each channel's vector."""
    norms: tuple[RMSNormSpec, RMSNormSpec, RMSNormSpec] | None = None
    """Norms of a token's step, B and C (Falcon Mamba, Jamba)."""

    @property
    def _channels(self) -> tuple[int, int]:
        """Channels (begin, end) of the rank."""
        return self.conv.parts[0] if self.conv.parts else (0, self.conv.channels)

    def split(self, rank: Rank) -> MambaSpec:
        """Return the mixer with a rank's channels; each rank computes all of `x_proj`.

        Raises:
            ConfigError: the model has fewer channels than ranks.
        """
        inner, out = self.conv.channels, self.out_proj
        begin, end = part = rank.share(inner)
        return replace(
            self,
            in_proj=self.in_proj.split(part, (inner + begin, inner + end)),
            conv=self.conv.split(part),
            dt_proj=self.dt_proj.split(part),
            out_proj=out.split_inputs(part, rank)
            if rank.reduces
            else out.split(rank.share(out.outputs)),
        )

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights in the order of their use."""
        yield from self.in_proj.weights(names.of("in_proj"))
        yield from self.conv.weights(names.of("conv"))
        yield from self.x_proj.weights(names.of("x_proj"))
        for name, norm in self._named_norms():
            yield from norm.weights(names.of(name))
        yield from self.dt_proj.weights(names.of("dt_proj"))
        module, size, part = f"{names.checkpoint}{self.module}.", self.conv.size, self._channels
        for name, stored, dummy in (("dt_bias", "dt_proj.bias", -4.0), ("d", "D", 1.0)):
            source = Source(module + stored, (self.conv.channels,), parts=(part,), dummy=dummy)
            yield Weight(f"{names.own}{name}", "vector", (size,), (source,), dtype="float32")
        stored_shape = self.conv.channels, self.state_size
        rates = Source(f"{module}A_log", stored_shape, transform="swap", columns=part, dummy=0.0)
        shape = self.state_size, size
        yield Weight(f"{names.own}a_log", "vector", shape, (rates,), dtype="float32")
        yield from self.out_proj.weights(names.of("out_proj"))

    def _named_norms(self) -> Iterator[tuple[str, RMSNormSpec]]:
        return zip(("dt_norm", "b_norm", "c_norm"), self.norms or (), strict=self.norms is not None)

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the cache of the convolution's last inputs, and of the channels' states."""
        return (StateCache((self.conv.state_shape, (self.state_size, self.conv.size))),)

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the slots of the states."""
        return STATE_ARRAYS

    def tables(self) -> tuple[Table, ...]:
        """Return the tables that replace the weights of norms."""
        return tuple(table for _, norm in self._named_norms() for table in norm.tables())

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return the bytes of some channels' states and some tokens, in each thread."""
        from octavo.kernels.sizes import selective_scan_nbytes

        return largest.num_threads * selective_scan_nbytes(self.state_size)

    def build(self, parts: Parts, caches: tuple[int, ...]) -> Mamba:
        """Implement `BlockSpec`."""
        from octavo.kernels.ops_states import StateRates
        from octavo.layers.mamba import Mamba

        inputs = results = None
        if self.conv.parts is not None:
            inputs = parts.columns("channels", self.conv.channels, self._channels)
            if self.out_proj.parts is not None:
                results = parts.columns("heads", self.conv.channels, self._channels)
        return Mamba(
            ops=parts.ops,
            cache=caches[0],
            in_proj=self.in_proj.build(parts.of("in_proj")),
            conv=self.conv.build(parts.of("conv")),
            x_proj=self.x_proj.build(parts.of("x_proj")),
            norms=tuple(norm.build(parts.of(name)) for name, norm in self._named_norms()),
            dt_proj=self.dt_proj.build(parts.of("dt_proj")),
            # Successive mixers have different buffers.
            out_proj=self.out_proj.build(parts.of("out_proj"), f"state_mixer{caches[0] % 2}"),
            rates=StateRates(parts.tensor("a_log"), parts.tensor("dt_bias"), parts.tensor("d")),
            state_size=self.state_size,
            inputs=inputs,
            results=results,
        )
