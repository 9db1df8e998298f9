"""A layer: a mixer and a feed-forward part, with their norms and how they are arranged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from octavo.errors import ConfigError
from octavo.models.blocks.base import FeedForwardSpec, MixerSpec, Split
from octavo.models.blocks.norm import NormSpec, build_norm
from octavo.models.weights import Names, Weight
from octavo.system.distributed import Rank

if TYPE_CHECKING:
    from octavo.layers.layer import Layer
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class LayerSpec:
    """How the two parts read the residual stream and add to it."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    input_norm: NormSpec | None
    """Of what the mixer reads."""
    feed_forward_norm: NormSpec | None
    """Of what the feed-forward part reads. In a parallel layer without one that part reads what
    the mixer does."""
    mixer_out_norm: NormSpec | None = None
    """Of what the mixer of a sequential layer returns (Gemma 2, OLMo 2)."""
    feed_forward_out_norm: NormSpec | None = None
    """Likewise of what the feed-forward part returns."""
    arrangement: Literal["sequential", "parallel", "post"] = "sequential"
    """parallel: both parts read the layer's input (Phi-2, Falcon, Cohere). post: the norms are of
    the sums of each part's input and result (OPT-350m)."""
    residual_multiplier: float | None = None
    """Factor on what both parts of a sequential layer return (Granite)."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """All, in the order of a sequential layer."""
        yield from _norm("input_norm", self.input_norm, names)
        yield from self.mixer.weights(names)
        yield from _norm("mixer_out_norm", self.mixer_out_norm, names)
        yield from _norm("feed_forward_norm", self.feed_forward_norm, names)
        yield from self.feed_forward.weights(names)
        yield from _norm("feed_forward_out_norm", self.feed_forward_out_norm, names)

    def split(self, rank: Rank) -> LayerSpec:
        """What a rank has of it; norms are whole.

        Raises:
            ConfigError: it cannot be split, or not among so many.
        """
        whole = [part for part in (self.mixer, self.feed_forward) if not isinstance(part, Split)]
        if whole:
            raise ConfigError(
                f"tensor_parallel_size={rank.size} is not supported with models that have "
                f"{type(whole[0]).__name__}; leave it out."
            )
        assert isinstance(self.mixer, Split)
        assert isinstance(self.feed_forward, Split)
        return replace(
            self, mixer=self.mixer.split(rank), feed_forward=self.feed_forward.split(rank)
        )

    def build(self, parts: Parts, cache: int) -> Layer:
        """The live block, whose mixer's cache has that index."""
        from octavo.layers.layer import ParallelLayer, PostNormLayer, SequentialLayer

        mixer, feed_forward = self.mixer.build(parts, cache), self.feed_forward.build(parts)
        size = next(
            norm.size
            for norm in (self.input_norm, self.feed_forward_norm, self.mixer_out_norm)
            if norm is not None
        )
        before = build_norm(self.input_norm, parts.of("input_norm"), size=size)
        between = build_norm(self.feed_forward_norm, parts.of("feed_forward_norm"), size=size)
        if self.arrangement == "post":
            return PostNormLayer(mixer, before, feed_forward, between)
        if self.arrangement == "parallel":
            shared = self.feed_forward_norm is None
            return ParallelLayer(
                parts.ops, before, mixer, None if shared else between, feed_forward
            )
        return SequentialLayer(
            parts.ops,
            before,
            mixer,
            build_norm(self.mixer_out_norm, parts.of("mixer_out_norm"), size=size, joins=False),
            between,
            feed_forward,
            build_norm(
                self.feed_forward_out_norm,
                parts.of("feed_forward_out_norm"),
                size=size,
                joins=False,
            ),
            self.residual_multiplier,
        )


def _norm(name: str, norm: NormSpec | None, names: Names) -> Iterator[Weight]:
    return iter(()) if norm is None else norm.weights(names.of(name))
