"""Specification of Gated DeltaNet and of Kimi Delta Attention.

Both are linear attention with a matrix as the state of each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Source
from octavo.errors import ConfigError
from octavo.layers.state_table import STATE_ARRAYS
from octavo.layers.step_table import StepArray
from octavo.models.blocks.base import BlockSpec, LargestStep
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.low_rank import LowRankSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.cache import CacheSpec
from octavo.models.state_cache import StateCache
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.gated_delta import GatedDelta
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec(BlockSpec):
    """Gated DeltaNet (Yang, Kautz, Hatamizadeh, arXiv 2412.06464).

    With `decay` and `gate` it is Kimi Delta Attention (arXiv 2510.26692).
    """

    in_proj: LinearSpec
    """Projection to all queries, all keys, all values, and all gates of the result."""
    rates_proj: LinearSpec
    """Projection to all betas and all decays."""
    decay: LowRankSpec | None = None
    """Projection to a decay for each channel of each head's key; None: `rates_proj` computes one
    decay for each head."""
    gate: LowRankSpec | None = None
    """Projection to the gates, which are sigmoids; None: `in_proj` computes them, and they are
    SiLUs."""
    out_proj: LinearSpec
    norm: RMSNormSpec
    """Norm of the result of each head."""
    module: str
    """Module of the checkpoint with the convolution, A_log and dt_bias."""
    convs: tuple[str, ...]
    """Convolutions in `module`: one of queries, keys and values together, or three."""
    num_key_heads: int
    """Number of heads of queries and keys."""
    num_heads: int
    """Number of heads of values, a multiple of `num_key_heads`."""
    key_size: int
    """Size of a head of queries or keys."""
    value_size: int
    """Size of a head of values."""
    taps: int
    """Number of inputs of the convolution."""
    beta_scale: float = 1.0
    """Factor of the betas; 2 allows negative eigenvalues of the state's transition."""
    tiled: bool = False
    """True if the inputs of `out_proj` are the first head of values of each head of keys, then the
    second ones, and so on (GGUF); otherwise all heads of values of each head of keys in turn."""
    part: tuple[int, int] | None = None
    """Heads of queries and keys (begin, end) that a rank computes; None: all."""

    @property
    def _part(self) -> tuple[int, int]:
        return self.part or (0, self.num_key_heads)

    @property
    def _own_key_heads(self) -> int:
        begin, end = self._part
        return end - begin

    @property
    def _own_heads(self) -> int:
        return self._own_key_heads * self._group

    @property
    def _group(self) -> int:
        """Number of heads of values that use the same head of queries and keys."""
        return self.num_heads // self.num_key_heads

    @property
    def _channels(self) -> tuple[tuple[int, int], ...]:
        """Queries, keys and values of the rank, each as (begin, end), among those of all ranks."""
        (begin, end), size = self._part, self.key_size
        keys, values = self.num_key_heads * size, self._group * self.value_size
        return (
            (begin * size, end * size),
            (keys + begin * size, keys + end * size),
            (2 * keys + begin * values, 2 * keys + end * values),
        )

    @property
    def _decays(self) -> tuple[int, int]:
        """Decays [begin, end) of the rank among those of all ranks."""
        size = self._group * (1 if self.decay is None else self.key_size)
        begin, end = self._part
        return begin * size, end * size

    @property
    def _num_channels(self) -> int:
        return sum(end - begin for begin, end in self._channels)

    def split(self, rank: Rank) -> GatedDeltaSpec:
        """Return the block with a rank's heads of queries and keys, and their heads of values.

        Raises:
            ConfigError: the model has fewer heads of queries and keys than ranks, or a rank's
                heads are not together in the inputs of `out_proj`.
        """
        if self.tiled and rank.reduces:
            raise ConfigError(
                "tensor_parallel_mode=reduce is not supported with GGUF files of this model, whose "
                "linear attention has more heads of values than of keys; leave it out."
            )
        if rank.size > self.num_key_heads:
            raise ConfigError(
                f"tensor_parallel_size={rank.size} is more than the {self.num_key_heads} heads of "
                "keys in the model's linear attention; lower it to at most that number."
            )
        begin, end = part = rank.share(self.num_key_heads)
        own, heads, group = replace(self, part=part), self.num_heads, self._group
        values = begin * group * self.value_size, end * group * self.value_size
        first = 2 * self.num_key_heads * self.key_size + heads * self.value_size
        gates = () if self.gate else ((first + values[0], first + values[1]),)
        decays = () if self.decay else ((heads + begin * group, heads + end * group),)
        out_proj = self.out_proj
        return replace(
            own,
            in_proj=self.in_proj.split(*own._channels, *gates),
            rates_proj=self.rates_proj.split((begin * group, end * group), *decays),
            decay=self.decay and self.decay.split(own._decays),
            gate=self.gate and self.gate.split(values),
            out_proj=out_proj.split_inputs(values, rank)
            if rank.reduces
            else out_proj.split(rank.share(out_proj.outputs)),
        )

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the projections, the weights of convolution and decay, and the norm."""
        yield from self.in_proj.weights(names.of("in_proj"))
        yield from self.rates_proj.weights(names.of("rates_proj"))
        for part, low_rank in (("decay", self.decay), ("gate", self.gate)):
            if low_rank is not None:
                yield from low_rank.weights(names.of(part))
        prefix, own = f"{names.checkpoint}{self.module}.", names.own
        shape = self._num_channels, 1, self.taps
        yield Weight(f"{own}conv", "vector", shape, self._conv_sources(prefix))
        (begin, end), decays = self._part, self._decays
        heads, count = (begin * self._group, end * self._group), self.num_heads
        rates = Source(f"{prefix}A_log", (count,), parts=(heads,), dummy=0.0)
        if self.decay is not None:
            rates = replace(rates, shape=(1, 1, count, 1), transform="flat")
        biases = Source(
            f"{prefix}dt_bias",
            (count * (1 if self.decay is None else self.key_size),),
            parts=(decays,),
            dummy=1.0,
        )
        for name, source, size in (
            ("a_log", rates, self._own_heads),
            ("dt_bias", biases, decays[1] - decays[0]),
        ):
            yield Weight(f"{own}{name}", "vector", (size,), (source,), dtype="float32")
        yield from self.norm.weights(names.of("norm"))
        yield from self.out_proj.weights(names.of("out_proj"))

    def _conv_sources(self, prefix: str) -> tuple[Source, ...]:
        keys, values = self.num_key_heads * self.key_size, self.num_heads * self.value_size
        sizes = [keys, keys, values] if len(self.convs) > 1 else [2 * keys + values]
        sources, begin = [], 0
        for name, size in zip(self.convs, sizes, strict=True):
            cut = [(max(a - begin, 0), min(b - begin, size)) for a, b in self._channels]
            rows = tuple((a, b) for a, b in cut if a < b)
            sources.append(Source(f"{prefix}{name}.weight", (size, 1, self.taps), parts=rows))
            begin += size
        return tuple(sources)

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the cache of the convolution's last inputs, and of a matrix of each head."""
        inputs = self.taps - 1, self._num_channels
        return (StateCache((inputs, (self._own_heads, self.key_size, self.value_size))),)

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the slots of the states."""
        return STATE_ARRAYS

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return the bytes of a head's state and its next tokens, in each thread."""
        from octavo.kernels.sizes import delta_rule_nbytes

        return largest.num_threads * delta_rule_nbytes(
            self.key_size, self.value_size, by_channel=self.decay is not None
        )

    def build(self, parts: Parts, caches: tuple[int, ...]) -> GatedDelta:
        """Implement `BlockSpec`."""
        from octavo.layers.gated_delta import GatedDelta

        columns = None
        if self.out_proj.parts is not None:
            begin, end = (n * self._group * self.value_size for n in self._part)
            columns = parts.columns("heads", self.out_proj.inputs, (begin, end))
        return GatedDelta(
            ops=parts.ops,
            cache=caches[0],
            in_proj=self.in_proj.build(parts.of("in_proj")),
            rates_proj=self.rates_proj.build(parts.of("rates_proj")),
            decay=None if self.decay is None else self.decay.build(parts.of("decay")),
            gate=None if self.gate is None else self.gate.build(parts.of("gate")),
            out_proj=self.out_proj.build(parts.of("out_proj"), "mixer"),
            conv_weight=parts.tensor("conv").view(self._num_channels, self.taps),
            a_log=parts.tensor("a_log"),
            dt_bias=parts.tensor("dt_bias"),
            norm=self.norm.build(parts.of("norm")),
            num_key_heads=self._own_key_heads,
            num_heads=self._own_heads,
            key_size=self.key_size,
            value_size=self.value_size,
            beta_scale=self.beta_scale,
            columns=columns,
            tiled_from=self._part[0] if self.tiled else None,
        )
