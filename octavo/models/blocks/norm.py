"""Specifications of norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Source
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.norm import (
        GroupNorm,
        HeadFactors,
        HeadNorms,
        LayerNorm,
        LayerScale,
        Norm,
        RMSNorm,
        ScaledNorm,
        Standard,
    )
    from octavo.models.blocks.base import Parts
    from octavo.system.tensor import Tensor


@dataclass(frozen=True)
class Ones:
    """Weight of ones, for a norm without a weight in the checkpoint."""

    size: int

    def nbytes(self, max_model_len: int) -> int:
        """Implement `Table`; upper bound for all types."""
        return 4 * self.size


def ones(size: int, parts: Parts) -> Tensor:
    """Return the table of `Ones` in the model's type."""
    from octavo.system.tensor import full

    return parts.table(Ones(size), lambda: full((size,), 1.0, parts.dtype))


@dataclass(frozen=True)
class RMSNormSpec:
    """Root-mean-square norm."""

    module: str | None
    """Module of the checkpoint; None: the norm has no weight."""
    size: int
    eps: float
    weight_offset: float = 0.0
    """Term added to the weight (Gemma: 1)."""
    tensor: str = "weight"
    """Name of the weight in the module."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weight, if any; in dummy models it is 1 with its offset."""
        if self.module is None:
            return
        name, dummy = f"{names.checkpoint}{self.module}.{self.tensor}", 1.0 - self.weight_offset
        source = Source(name, (self.size,), dummy=dummy)
        yield Weight(f"{names.own}weight", "vector", (self.size,), (source,))

    def tables(self) -> tuple[Ones, ...]:
        """Return the table that replaces a weight."""
        return (Ones(self.size),) if self.module is None else ()

    def build(self, parts: Parts) -> RMSNorm:
        """Return the live block."""
        from octavo.layers.norm import RMSNorm

        if self.module is None:
            return RMSNorm(parts.ops, ones(self.size, parts), self.eps, 0.0)
        return RMSNorm(parts.ops, parts.tensor("weight"), self.eps, self.weight_offset)


@dataclass(frozen=True)
class GroupNormSpec:
    """Root-mean-square norm of each group of a row's numbers."""

    module: str
    """Module of the checkpoint."""
    size: int
    """Size of a row."""
    groups: int
    eps: float

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weight; 1 in dummy models."""
        source = Source(f"{names.checkpoint}{self.module}.weight", (self.size,), dummy=1.0)
        yield Weight(f"{names.own}weight", "vector", (self.size,), (source,))

    def tables(self) -> tuple[Ones, ...]:
        """Return the weight of the norm of a group, if there are several."""
        return (Ones(self.size // self.groups),) if self.groups > 1 else ()

    def build(self, parts: Parts) -> GroupNorm:
        """Return the live block."""
        from octavo.layers.norm import GroupNorm

        one = ones(self.size // self.groups, parts) if self.groups > 1 else None
        return GroupNorm(parts.ops, parts.tensor("weight"), one, self.groups, self.eps)


@dataclass(frozen=True)
class LayerNormSpec:
    """Layer norm."""

    module: str | None
    """Module of the checkpoint; None: the norm has neither weight nor bias (OLMo 1)."""
    size: int
    eps: float
    bias: bool = True
    weight_offset: float = 0.0
    """Term added to the weight (Nemotron: 1)."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield weight and bias, if any; in dummy models the weight is 1 with its offset."""
        if self.module is None:
            return
        size, module = (self.size,), f"{names.checkpoint}{self.module}"
        source = Source(f"{module}.weight", size, dummy=1.0 - self.weight_offset)
        yield Weight(f"{names.own}weight", "vector", size, (source,))
        if self.bias:
            yield Weight(f"{names.own}bias", "vector", size, (Source(f"{module}.bias", size),))

    def tables(self) -> tuple[Ones, ...]:
        """Return the table that replaces a weight."""
        return (Ones(self.size),) if self.module is None else ()

    def build(self, parts: Parts) -> LayerNorm:
        """Return the live block."""
        from octavo.layers.norm import LayerNorm

        if self.module is None:
            return LayerNorm(parts.ops, ones(self.size, parts), None, self.eps)
        bias = parts.tensor("bias") if self.bias else None
        return LayerNorm(parts.ops, parts.tensor("weight"), bias, self.eps, self.weight_offset)


@dataclass(frozen=True)
class HeadNormsSpec:
    """Layer norm for each head of queries or keys, without a bias (Command R+)."""

    module: str
    """Module of the checkpoint, with all weights; with {}: the module of head {} (StableLM)."""
    num_heads: int
    """Number of heads in the checkpoint."""
    size: int
    """Size of a head."""
    eps: float
    part: tuple[int, int] | None = None
    """Heads (begin, end) of a rank; None: all."""

    def split(self, begin: int, end: int) -> HeadNormsSpec:
        """Return the norms of a rank's heads."""
        return replace(self, part=(begin, end))

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weight, one row for each head; 1 in dummy models."""
        begin, end = self.part or (0, self.num_heads)
        name = f"{names.checkpoint}{self.module}.weight"
        shape: tuple[int, ...] = (end - begin, self.size)
        if "{}" in self.module:
            sources = [
                Source(
                    name.format(head),
                    (self.size,),
                    parts=None if begin <= head < end else ((0, 0),),
                    dummy=1.0,
                )
                for head in range(self.num_heads)
            ]
            shape = ((end - begin) * self.size,)
        else:
            whole = self.num_heads, self.size
            sources = [Source(name, whole, parts=((begin, end),), dummy=1.0)]
        yield Weight(f"{names.own}weight", "vector", shape, tuple(sources))

    def build(self, parts: Parts) -> HeadNorms:
        """Return the live block."""
        from octavo.layers.norm import HeadNorms

        return HeadNorms(
            parts.ops, tuple(parts.tensor("weight").view(-1, self.size).unbind()), self.eps
        )


@dataclass(frozen=True)
class HeadFactorsSpec:
    """Factors softplus(w) of the numbers of each head, in place of a norm (Gemma 4's sounds)."""

    tensor: str
    """Tensor of the checkpoint with w."""
    size: int
    """Number of elements of a head."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the factors."""
        source = Source(f"{names.checkpoint}{self.tensor}", (self.size,), "softplus")
        yield Weight(f"{names.own}weight", "vector", (self.size,), (source,))

    def build(self, parts: Parts) -> HeadFactors:
        """Return the live block."""
        from octavo.layers.norm import HeadFactors

        return HeadFactors(parts.ops, parts.tensor("weight"))


@dataclass(frozen=True)
class ScaledNormSpec:
    """Norm whose results have a factor (the half steps of Macaron layers, arXiv:1906.02762)."""

    norm: RMSNormSpec | None
    """None: there is only the factor."""
    factor: float

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weight of the norm."""
        if self.norm is not None:
            yield from self.norm.weights(names)

    def tables(self) -> tuple[Ones, ...]:
        """Return the table of the norm."""
        return () if self.norm is None else self.norm.tables()

    def build(self, parts: Parts) -> ScaledNorm:
        """Return the live block."""
        from octavo.layers.norm import NoNorm, ScaledNorm

        norm = NoNorm(parts.ops) if self.norm is None else self.norm.build(parts)
        return ScaledNorm(parts.ops, norm, self.factor)


@dataclass(frozen=True)
class LayerScaleSpec:
    """Factors of a block's output, in place of a norm (CaiT, arXiv:2103.17239; InternVL)."""

    tensor: str
    """Tensor of the checkpoint."""
    size: int

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the factors; 1 in dummy models."""
        source = Source(f"{names.checkpoint}{self.tensor}", (self.size,), dummy=1.0)
        yield Weight(f"{names.own}weight", "vector", (self.size,), (source,))

    def tables(self) -> tuple[Ones, ...]:
        """Return no table."""
        return ()

    def build(self, parts: Parts) -> LayerScale:
        """Return the live block."""
        from octavo.layers.norm import LayerScale

        return LayerScale(parts.ops, parts.tensor("weight"))


@dataclass(frozen=True)
class StandardSpec:
    """Difference from a bias, times factors, in place of a norm (Gemma 4).

    The checkpoint's bias is that of numbers that are `scale` times as large.
    """

    bias: str
    """Tensor of the checkpoint."""
    factors: str
    """Tensor of the checkpoint."""
    size: int
    scale: float

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield bias and factors; 0 and 1 in dummy models."""
        for own, tensor, dummy in (("bias", self.bias, 0.0), ("weight", self.factors, 1.0)):
            source = Source(f"{names.checkpoint}{tensor}", (self.size,), dummy=dummy)
            yield Weight(f"{names.own}{own}", "vector", (self.size,), (source,))

    def tables(self) -> tuple[Ones, ...]:
        """Return no table."""
        return ()

    def build(self, parts: Parts) -> Standard:
        """Return the live block."""
        from octavo.layers.norm import Standard

        return Standard(parts.ops, parts.tensor("bias"), parts.tensor("weight"), self.scale)


NormSpec = RMSNormSpec | LayerNormSpec


def build_norm(
    norm: NormSpec | LayerScaleSpec | ScaledNormSpec | StandardSpec | None,
    parts: Parts,
    *,
    size: int | None = None,
    rows: str = "normed",
    joins: bool = True,
) -> Norm:
    """Return the live norm; without a spec, a norm that changes nothing.

    Args:
        norm: the spec, or None.
        parts: its weights.
        size: size of a row, if ranks may split the rows.
        rows: name of the buffer in which the ranks combine the rows; see `SharedBuffers`.
        joins: see `RowsNorm`.
    """
    from octavo.layers.norm import LayerScale, NoNorm, RowsNorm, ScaledNorm, Standard

    live = None if norm is None else norm.build(parts)
    if size is not None and parts.splits_rows:
        assert not isinstance(live, LayerScale | ScaledNorm | Standard), "encoders are not split"
        return RowsNorm(live, parts.ops, parts.columns(rows, size, (0, size)), joins)
    return live or NoNorm(parts.ops)
