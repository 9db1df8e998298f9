"""Specification of layers with several residual streams (Gemma 3n).

Baykal et al., "Alternating Updates for Efficient Transformers" (arXiv 2301.13310). A layer computes
one stream, the active one. It predicts all streams from those of the layer before. Then it corrects
them by the difference between the computed active stream and its prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.checkpoints.base import Source
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import RMSNormSpec, ones
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.altup import AltUpLayer, Streams
    from octavo.models.blocks.base import Parts


@dataclass(frozen=True)
class StreamsSpec:
    """Streams that are made of the embedding, and joined before the last norm.

    Each stream but the first is a projection that is scaled to the magnitude of the first.
    """

    make: tuple[LinearSpec, ...]
    """Projections of the embedding to the streams from the second on."""
    join: tuple[LinearSpec, ...]
    """Projections of these streams; the result is the mean of the first stream and of these."""

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of all projections."""
        for kind, linears in (("make", self.make), ("join", self.join)):
            for i, linear in enumerate(linears):
                yield from linear.weights(names.of(f"{kind}.{i}"))

    def build(self, parts: Parts) -> Streams:
        """Return the live block."""
        from octavo.layers.altup import Streams

        return Streams(
            parts.ops,
            [linear.build(parts.of(f"make.{i}")) for i, linear in enumerate(self.make)],
            [linear.build(parts.of(f"join.{i}")) for i, linear in enumerate(self.join)],
            ones(1, parts),
        )


@dataclass(frozen=True, kw_only=True)
class AltUpLayerSpec(LayerSpec):
    """Layer with several streams: attention, feed-forward block and per-layer input, in this order.

    The attention's result gets a second residual, the normed input plus a low-rank projection of
    it (laurel). The per-layer input is added to all streams but the first.
    """

    num_streams: int
    active: int
    """Index of the stream that the layer computes."""
    router_norm: RMSNormSpec
    router: LinearSpec
    """Projection of a stream to `num_streams` numbers, from which the coefficients are computed."""
    predict: LinearSpec
    """Coefficients of the prediction: for each predicted stream, those of all streams."""
    correct: LinearSpec
    """Coefficients of the correction, one for each stream; 1 is added."""
    correct_scale: str
    """Tensor of the checkpoint with factors of the active stream before the per-layer input."""
    laurel: tuple[LinearSpec, LinearSpec]
    laurel_norm: RMSNormSpec

    @property
    def hands_residual(self) -> bool:
        """False: the streams are one tensor."""
        return False

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the streams, then those of the blocks."""
        size = self.router_norm.size
        for name, part in self._linears.items():
            yield from part.weights(names.of(name))
        yield from self.router_norm.weights(names.of("router_norm"))
        yield from self.laurel_norm.weights(names.of("laurel_norm"))
        source = Source(f"{names.checkpoint}{self.correct_scale}", (size,), dummy=1.0)
        yield Weight(f"{names.own}correct_scale", "vector", (size,), (source,))
        yield from super().weights(names)

    @property
    def _linears(self) -> dict[str, LinearSpec]:
        names = ("router", "predict", "correct", "laurel_down", "laurel_up")
        linears = (self.router, self.predict, self.correct, *self.laurel)
        return dict(zip(names, linears, strict=True))

    def build(self, parts: Parts, caches: tuple[int, ...]) -> AltUpLayer:
        """Return the live layer; the arguments are those of `LayerSpec.build`."""
        from octavo.layers.altup import AltUpLayer

        attention, feed_forward, layer_input = self.build_sublayers(parts, caches, joins=True)
        linears = {name: part.build(parts.of(name)) for name, part in self._linears.items()}
        correct = replace(linears["correct"], bias=ones(self.num_streams, parts))
        return AltUpLayer(
            ops=parts.ops,
            num_streams=self.num_streams,
            active=self.active,
            router_norm=self.router_norm.build(parts.of("router_norm")),
            router=linears["router"],
            predict=linears["predict"],
            correct=correct,
            correct_scale=parts.tensor("correct_scale"),
            laurel=(linears["laurel_down"], linears["laurel_up"]),
            laurel_norm=self.laurel_norm.build(parts.of("laurel_norm")),
            attention=attention,
            feed_forward=feed_forward,
            layer_input=layer_input,
        )
