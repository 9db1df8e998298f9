"""Specification of a layer: blocks, the norms around them, and their use of the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from octavo.checkpoints.base import Source
from octavo.models.blocks.base import BlockSpec
from octavo.models.blocks.norm import LayerScaleSpec, NormSpec, ScaledNormSpec, build_norm
from octavo.models.cache import CacheSpec
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.layer import Layer, LiveSublayer
    from octavo.models.blocks.base import Parts

Arrangement = Literal["sequential", "parallel", "post"]


@dataclass(frozen=True)
class Sublayer:
    """Block with the norms around it."""

    name: str
    """Name of the sublayer in the names of its weights."""
    block: BlockSpec
    norm: NormSpec | None = None
    """Norm of the block's input. In a parallel layer, a block without a norm reads the same normed
    input as the first block."""
    out_norm: NormSpec | LayerScaleSpec | ScaledNormSpec | None = None
    """Norm, or factors, of the block's output in a sequential layer (Gemma 2, OLMo 2)."""
    reads_input: bool = False
    """True if the block reads the layer's input, in a post layer (DeBERTa V2); False: the result of
    the sublayer before it."""

    @property
    def part(self) -> str:
        """Prefix of the names of the block's weights; "": none."""
        return "" if self.name in ("mixer", "feed_forward") else self.name

    @property
    def norms(self) -> dict[str, NormSpec | LayerScaleSpec | ScaledNormSpec | None]:
        """Norms by the names of their weights."""
        # The mixer's norm is named after its input: the layer's input.
        name = "input_norm" if self.name == "mixer" else f"{self.name}_norm"
        return {name: self.norm, f"{self.name}_out_norm": self.out_norm}

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the norm, the block, and the norm of its output."""
        (name, norm), (out_name, out_norm) = self.norms.items()
        if norm is not None:
            yield from norm.weights(names.of(name))
        yield from self.block.weights(names.of(self.part) if self.part else names)
        if out_norm is not None:
            yield from out_norm.weights(names.of(out_name))


@dataclass(frozen=True)
class LayerSpec:
    """List of sublayers, and their arrangement around the residual stream."""

    sublayers: tuple[Sublayer, ...]
    arrangement: Arrangement = "sequential"
    """Arrangement of the blocks. sequential: each block reads the sum of the layer's input and the
    earlier blocks' outputs. parallel: all blocks read the layer's input (Phi-2, Falcon, Cohere).
    post: a norm is applied to the sum of a block's input and output (OPT-350m)."""
    residual_multiplier: float | None = None
    """Factor on the output of each block of a sequential layer (Granite)."""
    scalar: str | None = None
    """Tensor of the checkpoint with one number, a factor on the residual stream after a sequential
    layer (Gemma 4)."""
    final_norm: NormSpec | None = None
    """Norm of the residual stream after a sequential layer (Gemma 4's sounds)."""

    @classmethod
    def of(
        cls,
        mixer: BlockSpec,
        feed_forward: BlockSpec,
        input_norm: NormSpec | None,
        feed_forward_norm: NormSpec | None,
        mixer_out_norm: NormSpec | None = None,
        feed_forward_out_norm: NormSpec | None = None,
        arrangement: Arrangement = "sequential",
        residual_multiplier: float | None = None,
    ) -> LayerSpec:
        """Return the usual decoder layer: a mixer, e.g. attention, and a feed-forward block."""
        return cls(
            (
                Sublayer("mixer", mixer, input_norm, mixer_out_norm),
                Sublayer("feed_forward", feed_forward, feed_forward_norm, feed_forward_out_norm),
            ),
            arrangement,
            residual_multiplier,
        )

    @property
    def hands_residual(self) -> bool:
        """True if the residual stream after the layer has two parts; see `Layer`."""
        whole = self.scalar is None and self.final_norm is None
        return self.arrangement != "post" and whole

    @property
    def blocks(self) -> list[BlockSpec]:
        """Blocks of the sublayers."""
        return [sublayer.block for sublayer in self.sublayers]

    @property
    def cache_layer(self) -> int | None:
        """Index of an earlier layer whose caches this one reads; None: it has its own."""
        layers = (block.cache_layer() for block in self.blocks)
        return next((layer for layer in layers if layer is not None), None)

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the layer's own caches, in the order of the blocks."""
        if self.cache_layer is not None:
            return ()
        return tuple(cache for block in self.blocks for cache in block.caches())

    def with_blocks(self, blocks: list[BlockSpec]) -> LayerSpec:
        """Return the layer with its blocks replaced, one for one."""
        pairs = zip(self.sublayers, blocks, strict=True)
        return replace(self, sublayers=tuple(replace(s, block=block) for s, block in pairs))

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield all weights, in the order of a sequential layer."""
        for sublayer in self.sublayers:
            yield from sublayer.weights(names)
        if self.scalar is not None:
            source = Source(f"{names.checkpoint}{self.scalar}", (1,), dummy=1.0)
            yield Weight(f"{names.own}scalar", "vector", (1,), (source,))
        if self.final_norm is not None:
            yield from self.final_norm.weights(names.of("final_norm"))

    def split(self, rank: Rank) -> LayerSpec:
        """Return the part of the layer that a rank computes; norms are whole.

        Raises:
            ConfigError: a block cannot be split, or not among `rank.size` ranks.
        """
        return self.with_blocks([block.split(rank) for block in self.blocks])

    def build(self, parts: Parts, caches: tuple[int, ...]) -> Layer:
        """Return the live layer.

        Args:
            parts: its weights and operations.
            caches: indices in `StepContext.caches` of the caches that the layer uses.
        """
        from octavo.layers.layer import ParallelLayer, PostNormLayer, SequentialLayer

        live = self.build_sublayers(parts, caches)
        if self.arrangement == "post":
            return PostNormLayer(live)
        if self.arrangement == "parallel":
            return ParallelLayer(parts.ops, live)
        scalar = None if self.scalar is None else parts.tensor("scalar")
        norm = self.final_norm
        final = None if norm is None else build_norm(norm, parts.of("final_norm"))
        return SequentialLayer(parts.ops, live, self.residual_multiplier, scalar, final)

    def build_sublayers(
        self, parts: Parts, caches: tuple[int, ...], *, joins: bool = False
    ) -> list[LiveSublayer]:
        """Return the live blocks with their norms.

        Args:
            parts: see `build`.
            caches: see `build`.
            joins: True if each rank needs all rows of the blocks' results.
        """
        from octavo.layers.layer import LiveSublayer

        norms = [norm for s in self.sublayers for norm in s.norms.values() if norm is not None]
        size = next(norm.size for norm in norms if not isinstance(norm, ScaledNormSpec))
        live, first = [], 0
        rows = "results" if joins else "normed"
        for sublayer in self.sublayers:
            count = len(sublayer.block.caches())
            (name, norm), (out_name, out_norm) = sublayer.norms.items()
            own = parts.of(sublayer.part) if sublayer.part else parts
            live.append(
                LiveSublayer(
                    sublayer.block.build(own, caches[first : first + count]),
                    build_norm(norm, parts.of(name), size=size),
                    build_norm(out_norm, parts.of(out_name), size=size, rows=rows, joins=joins),
                    has_norm=norm is not None,
                    reads_input=sublayer.reads_input,
                )
            )
            first += count
        return live
