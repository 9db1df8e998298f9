"""Layers with several residual streams (Gemma 3n); see `octavo.models.blocks.altup`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kernels.base import Ops
from octavo.layers.layer import LiveSublayer
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.step import StepContext
from octavo.system.tensor import Tensor

_LEAST_SQUARE = 1e-5  # lower bound of the mean square of a stream before it is scaled


@dataclass(slots=True)
class Streams:
    """Streams [T, N * hidden_size], one after the other, from the embedding and back."""

    ops: Ops
    make_linears: Sequence[Linear]
    """Projections of the embedding to the streams from the second on."""
    join_linears: Sequence[Linear]
    one: Tensor
    """1, [1]."""

    def make(self, x: Tensor) -> Tensor:
        """Map the embedding [T, hidden_size] to all streams."""
        count = 1 + len(self.make_linears)
        out = self.ops.empty(x.shape[0], count * x.shape[1], like=x)
        first, *others = split_streams(out, count)
        self.ops.multiply(x, self.one, out=first)
        magnitude = self.ops.rms(x)
        for linear, stream in zip(self.make_linears, others, strict=True):
            self._scale(linear(x), magnitude, stream)
        return out

    def join(self, x: Tensor) -> Tensor:
        """Map all streams to the mean [T, hidden_size] of the first and the projected others."""
        total, *others = split_streams(x, 1 + len(self.join_linears))
        magnitude = self.ops.rms(total)
        for linear, stream in zip(self.join_linears, others, strict=True):
            projected = linear(stream)
            self._scale(projected, magnitude, projected)
            total = self.ops.add(total, projected)
        self.ops.scale_(total, 1 / (1 + len(others)))
        return total

    def _scale(self, x: Tensor, magnitude: Tensor, out: Tensor) -> None:
        """Write x [T, hidden_size], scaled to a root mean square [T, 1], to `out`."""
        inverse = self.ops.rms(x, _LEAST_SQUARE, inverse=True)
        self.ops.multiply(x, magnitude, out=out)
        self.ops.multiply(out, inverse, out=out)


@dataclass(slots=True, kw_only=True)
class AltUpLayer:
    """Layer that computes one of several streams, and predicts and corrects all."""

    ops: Ops
    num_streams: int
    active: int
    """Index of the stream that the blocks compute."""
    router_norm: RMSNorm
    router: Linear
    """Projection of a stream to `num_streams` numbers."""
    predict: Linear
    """Projection of the `num_streams` numbers to a coefficient for each pair of streams."""
    correct: Linear
    """Projection of the `num_streams` numbers to a coefficient for each stream; its bias is 1."""
    correct_scale: Tensor
    """Factors [hidden_size] of the active stream before the per-layer input."""
    laurel: tuple[Linear, Linear]
    laurel_norm: RMSNorm
    attention: LiveSublayer
    feed_forward: LiveSublayer
    layer_input: LiveSublayer

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Layer`: x is [T, num_streams * hidden_size], without a residual."""
        assert residual is None
        ops = self.ops
        predicted = self._predict(split_streams(x, self.num_streams))
        before = predicted[self.active]
        normed = self.attention.norm(before)
        down, up = self.laurel
        augmented = ops.add(normed, self.laurel_norm(up(down(normed))))
        mixed = ops.add(before, self._run(self.attention, normed, step))
        mixed = ops.add(mixed, augmented)
        ops.scale_(mixed, 0.5**0.5)
        result = self._run(self.feed_forward, self.feed_forward.norm(mixed), step)
        out = ops.empty(*x.shape, like=x)
        streams = split_streams(out, self.num_streams)
        self._correct(predicted, ops.add(mixed, result), streams)
        scaled = ops.multiply(streams[self.active], self.correct_scale)
        added = self._run(self.layer_input, scaled, step)
        for stream in streams[1:]:
            ops.add(stream, added, stream)
        return out, None

    def _run(self, part: LiveSublayer, x: Tensor, step: StepContext) -> Tensor:
        return part.out_norm(part.block(x, step))

    def _route(self, x: Tensor) -> Tensor:
        """Return the numbers of a stream [T, hidden_size] from which coefficients are computed."""
        routed = self.router(self.router_norm(x))
        self.ops.scale_(routed, 1 / x.shape[1])
        self.ops.soft_cap_(routed, 1.0)
        return routed

    def _predict(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """Return each stream plus the sum of all streams times its coefficients."""
        ops, count = self.ops, self.num_streams
        coefficients = self.predict(self._route(streams[self.active]))
        result = []
        for i, stream in enumerate(streams):
            own = coefficients[:, i * count : (i + 1) * count]
            total = ops.multiply(streams[0], own[:, :1])
            for j in range(1, count):
                total = ops.add(total, ops.multiply(streams[j], own[:, j : j + 1]))
            result.append(ops.add(total, stream))
        return result

    def _correct(self, predicted: list[Tensor], result: Tensor, out: Sequence[Tensor]) -> None:
        """Write each predicted stream plus its share of the active stream's error to `out`."""
        ops = self.ops
        coefficients = self.correct(self._route(result))
        error = ops.add(result, ops.scale(predicted[self.active], -1.0))
        for i, (stream, place) in enumerate(zip(predicted, out, strict=True)):
            ops.add(ops.multiply(error, coefficients[:, i : i + 1]), stream, place)


def split_streams(x: Tensor, count: int) -> Sequence[Tensor]:
    """Return views [T, hidden_size] of all streams [T, count * hidden_size]."""
    views: Sequence[Tensor] = x.split_with_sizes([x.shape[1] // count] * count, dim=1)
    return views
