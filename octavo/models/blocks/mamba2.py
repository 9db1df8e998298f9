"""Specification of the mixer of Mamba-2: a matrix as the state of each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Source
from octavo.errors import ConfigError
from octavo.layers.state_table import STATE_ARRAYS
from octavo.layers.step_table import StepArray
from octavo.models.blocks.attention import share_heads
from octavo.models.blocks.base import BlockSpec, LargestStep, Table
from octavo.models.blocks.conv import ConvSpec
from octavo.models.blocks.factors import Factors
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import GroupNormSpec
from octavo.models.cache import CacheSpec
from octavo.models.state_cache import StateCache
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.layers.mamba2 import Mamba2
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(BlockSpec):
    """Mixer of Mamba-2 (Dao and Gu, arXiv 2405.21060)."""

    in_proj: LinearSpec
    """Projection to all gates, then all x, B and C (the convolution's input), then all steps."""
    conv: ConvSpec
    out_proj: LinearSpec
    module: str
    """Module of the checkpoint with A_log, D and dt_bias."""
    num_heads: int
    head_size: int
    """Number of columns of a head's state."""
    num_groups: int
    """Number of vectors B, and of vectors C, of a token; divides `num_heads`."""
    state_size: int
    """Number of rows of a head's state."""
    dt_range: tuple[float, float] = (0.0, float("inf"))
    """Least and largest step size."""
    norm: GroupNormSpec | None = None
    """Norm of the results of all heads; None: they are only gated."""
    norm_before_gate: bool = False
    """True if the gate is applied after the norm; False: before."""
    factors: tuple[float, ...] | None = None
    """Factors of gates, x, B, C and step sizes in the result of `in_proj` (Falcon-H1)."""
    part: tuple[tuple[int, int], tuple[int, int]] | None = None
    """Heads and groups, each as (begin, end), that a rank computes; None: all."""

    @property
    def _part(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return self.part or ((0, self.num_heads), (0, self.num_groups))

    @property
    def _own(self) -> tuple[int, int]:
        """Numbers of heads and of groups of the rank."""
        (head, end_head), (group, end_group) = self._part
        return end_head - head, end_group - group

    @property
    def _columns(self) -> tuple[int, int]:
        """Columns (begin, end) of the rank's heads among those of all heads."""
        (begin, end), _ = self._part
        return begin * self.head_size, end * self.head_size

    @property
    def _channels(self) -> tuple[tuple[int, int], ...]:
        """The rank's x, B and C, each as (begin, end), among those of all ranks."""
        begin, end = (group * self.state_size for group in self._part[1])
        inner, keys = self.num_heads * self.head_size, self.num_groups * self.state_size
        return (
            self._columns,
            (inner + begin, inner + end),
            (inner + keys + begin, inner + keys + end),
        )

    def split(self, rank: Rank) -> Mamba2Spec:
        """Return the mixer with a rank's heads, and their groups.

        Several ranks may compute the same group.

        Raises:
            ConfigError: the model has fewer heads than ranks.
        """
        if rank.size > self.num_heads:
            raise ConfigError(
                f"tensor_parallel_size={rank.size} is more than the {self.num_heads} heads of the "
                "model's state space; lower it to at most that number."
            )
        own = replace(self, part=share_heads(self.num_heads, self.num_groups, rank))
        (begin, end), inner = own._part[0], self.num_heads * self.head_size
        steps = inner + self.conv.channels
        out = self.out_proj
        return replace(
            own,
            in_proj=self.in_proj.split(
                own._columns,
                *((inner + a, inner + b) for a, b in own._channels),
                (steps + begin, steps + end),
            ),
            conv=self.conv.split(*own._channels),
            out_proj=out.split_inputs(own._columns, rank)
            if rank.reduces
            else out.split(rank.share(out.outputs)),
        )

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights in the order of their use."""
        yield from self.in_proj.weights(names.of("in_proj"))
        yield from self.conv.weights(names.of("conv"))
        heads, (number, _) = self._part[0], self._own
        for name, dummy in (("dt_bias", 1.0), ("A_log", 0.0), ("D", 1.0)):
            stored = f"{names.checkpoint}{self.module}.{name}"
            source = Source(stored, (self.num_heads,), parts=(heads,), dummy=dummy)
            own = f"{names.own}{name.lower()}"
            yield Weight(own, "vector", (number,), (source,), dtype="float32")
        if self.norm is not None:
            yield from self.norm.weights(names.of("norm"))
        yield from self.out_proj.weights(names.of("out_proj"))

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the cache of the convolution's last inputs, and of a matrix of each head."""
        heads, _ = self._own
        return (StateCache((self.conv.state_shape, (heads, self.state_size, self.head_size))),)

    def arrays(self) -> tuple[StepArray, ...]:
        """Return the slots of the states."""
        return STATE_ARRAYS

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of the norm and of the factors."""
        tables: tuple[Table, ...] = () if self.norm is None else self.norm.tables()
        return tables if self.factors is None else (*tables, self._factors(self.factors))

    def _factors(self, values: tuple[float, ...]) -> Factors:
        heads, groups = self._own
        inner, keys = heads * self.head_size, groups * self.state_size
        return Factors(values, (inner, inner, keys, keys, heads))

    def scratch_nbytes(self, backend: AttentionBackend, largest: LargestStep) -> int:
        """Return the bytes of a head's state and of some tokens, in each thread."""
        from octavo.kernels.sizes import ssd_nbytes

        return largest.num_threads * ssd_nbytes(self.state_size, self.head_size)

    def build(self, parts: Parts, caches: tuple[int, ...]) -> Mamba2:
        """Implement `BlockSpec`."""
        from octavo.kernels.ops_states import StateRates
        from octavo.layers.mamba2 import Mamba2

        columns, gated, factors = None, None, None
        if self.part is not None and (self.out_proj.parts is not None or self.norm is not None):
            inner = self.num_heads * self.head_size
            columns = parts.columns("heads", inner, self._columns)
            if self.norm_before_gate and self.out_proj.parts is not None:
                gated = parts.columns("gated_heads", inner, self._columns)
        if self.factors is not None:
            table = self._factors(self.factors)
            factors = parts.table(table, lambda: table.compute(parts.dtype))
        heads, groups = self._own
        return Mamba2(
            ops=parts.ops,
            cache=caches[0],
            in_proj=self.in_proj.build(parts.of("in_proj")),
            conv=self.conv.build(parts.of("conv")),
            # Attention of the same input (Falcon-H1) uses the buffer "mixer".
            out_proj=self.out_proj.build(parts.of("out_proj"), "state_mixer"),
            rates=StateRates(
                parts.tensor("a_log"), parts.tensor("dt_bias"), parts.tensor("d"), *self.dt_range
            ),
            num_heads=heads,
            head_size=self.head_size,
            num_groups=groups,
            state_size=self.state_size,
            norm=None if self.norm is None else self.norm.build(parts.of("norm")),
            norm_before_gate=self.norm_before_gate,
            factors=factors,
            columns=columns,
            own_inputs=None if self.out_proj.columns is None else slice(*self._columns),
            gated=gated,
        )
