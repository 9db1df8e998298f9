"""Specifications of the first part of an encoder: from an item's arrays to hidden states.

An item is a text, a picture, or a sound. The arrays of several items are joined without padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source
from octavo.errors import RequestError
from octavo.messages import TensorData
from octavo.models.blocks.embedding import EmbedSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import NormSpec, build_norm
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.encoder_input import EncoderInput
    from octavo.models.blocks.base import Parts

LongArray = NDArray[np.int64]
Arrays: TypeAlias = Mapping[str, NDArray[Any]]


def array_of(tensor: TensorData) -> NDArray[Any]:
    """Return the numbers of a message."""
    from octavo.system.tensor import numpy_dtype  # plans need no compiled extension

    return np.frombuffer(tensor.data, numpy_dtype(tensor.dtype)).reshape(tensor.shape)


@dataclass(frozen=True)
class EncoderItem:
    """Arrays of one item on the host, as the blocks of an encoder read them.

    Attributes:
        num_rows: number of rows that the encoder returns.
        segments: int64 arrays with the sum T, the number of tokens: for each kind of attention the
            sizes of the successive runs of tokens that see each other. `EncoderSpec.segments`
            names a layer's kind.
        numbers: arrays of float32 numbers by name, which are rounded to the model's type and joined
            with those of other items.
        arrays: other arrays by name, which are joined as they are.
        indices: arrays of indices of the item's tokens; joined, they are indices of all tokens.
        positions: int64 [T], position of each token; None: its index.
        rotary: float32 [T, rotary_dim], cosines and sines of each token, for `StepRope`; if parts
            of a head turn separately, [T, parts, rotary_dim].
        seen: int64 [segments], number of tokens, the first ones of each segment, that the tokens of
            the segment see (if all layers use the first kind of segments); None: all of them.
        size: number of rows of the item's arrays, for blocks that compute one item at a time.
    """

    num_rows: int
    segments: tuple[LongArray, ...]
    numbers: Arrays = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    indices: Arrays = field(default_factory=dict)
    positions: LongArray | None = None
    rotary: NDArray[np.float32] | None = None
    seen: LongArray | None = None
    size: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens (T)."""
        return int(self.segments[0].sum())

    def num_blocks(self, block_size: int) -> int:
        """Return the number of blocks of the scratch memory of keys and values."""
        return max(int((-(-sizes // block_size)).sum()) for sizes in self.segments)


class InputSpec(Protocol):
    """Specification of the first part of an encoder: a frozen dataclass for each kind."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Return the numbers of tokens and of rows of an item.

        Args:
            data: the arrays of `MultiModalFeatureSpec.data`.

        Raises:
            RequestError: the arrays do not fit the model.
            KeyError: an array is missing.
        """
        ...

    def read(self, data: Arrays) -> EncoderItem:
        """Return the arrays of an item, whose `sizes` have been checked."""
        ...

    def largest(self, num_tokens: int) -> EncoderItem:
        """Return an item of `num_tokens` tokens, to measure the memory that a run needs.

        Its arrays have the right shapes and any numbers.
        """
        ...

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights to load."""
        ...

    def build(self, parts: Parts) -> EncoderInput:
        """Return the live block."""
        ...


class PatchLayout(Protocol):
    """Division of pictures into patches: a frozen dataclass for each kind of tower."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec.sizes`."""
        ...

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec.read`."""
        ...

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `InputSpec.largest`."""
        ...


@dataclass(frozen=True)
class TextInputSpec:
    """Embedding of the tokens of a text.

    The item's array is `input_ids`, int64 [T].
    """

    embed: EmbedSpec
    shares_table: bool = False
    """True if the table of tokens is the decoder's (T5)."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec`."""
        ids = data["input_ids"]
        known = self.embed.vocab_size
        if ids.ndim != 1 or not len(ids) or ids.dtype != np.int64 or ids.min() < 0:
            raise RequestError("'input_ids' must be a list of token ids.", "encoder_prompt")
        if ids.max() >= known:
            raise RequestError(
                f"'input_ids' has the token id {ids.max()}; the encoder knows {known} tokens.",
                "encoder_prompt",
            )
        return len(ids), len(ids)

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec`."""
        ids = data["input_ids"].astype(np.int64)
        return EncoderItem(
            len(ids),
            (np.array([len(ids)]),),
            arrays={"input_ids": ids},
            positions=np.arange(len(ids)),
        )

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `InputSpec`."""
        return self.read({"input_ids": np.zeros(num_tokens, np.int64)})

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the embedding."""
        yield from self.embed.weights(names, shared=self.shares_table)

    def build(self, parts: Parts) -> EncoderInput:
        """Implement `InputSpec`."""
        from octavo.layers.encoder_input import TextInput

        return TextInput(self.embed.build(parts, parts.token_table if self.shares_table else None))


@dataclass(frozen=True)
class PatchInputSpec:
    """Projection of the patches of pictures, and learned vectors that are added to them.

    The arrays are `patches`, numbers [T, numbers of a patch], and with a table `places`, int32 [T,
    K], the rows of the table that are added to each token, and perhaps `weights`, float32 [T, K],
    their factors. `layout` divides pictures into patches.
    """

    project: LinearSpec
    layout: PatchLayout
    hidden_size: int
    table: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Tensors of the checkpoint with the learned vectors, and their shapes."""
    norm: NormSpec | None = None
    """Norm of the hidden states."""
    patch_norm: NormSpec | None = None
    """Norm of the numbers of a patch (Gemma 4 12B)."""
    projected_norm: NormSpec | None = None
    """Norm of a projected patch, before the vectors are added (Gemma 4 12B)."""

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec`."""
        return self.layout.sizes(data)

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec`."""
        return self.layout.read(data)

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `InputSpec`."""
        return self.layout.largest(num_tokens)

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the projection, the table and the norms."""
        if self.patch_norm is not None:
            yield from self.patch_norm.weights(names.of("patch_norm"))
        yield from self.project.weights(names.of("project"))
        if self.projected_norm is not None:
            yield from self.projected_norm.weights(names.of("projected_norm"))
        if self.table:
            sources = tuple(Source(name, shape, "flat") for name, shape in self.table)
            numbers = sum(math.prod(shape) for _, shape in self.table)
            yield Weight(f"{names.own}table", "vector", (numbers,), sources)
        if self.norm is not None:
            yield from self.norm.weights(names.of("norm"))

    def build(self, parts: Parts) -> EncoderInput:
        """Implement `InputSpec`."""
        from octavo.layers.encoder_input import PatchInput

        return PatchInput(
            parts.ops,
            self.project.build(parts.of("project")),
            parts.tensor("table").view(-1, self.hidden_size) if self.table else None,
            build_norm(self.norm, parts.of("norm")),
            build_norm(self.patch_norm, parts.of("patch_norm")),
            build_norm(self.projected_norm, parts.of("projected_norm")),
        )


@dataclass(frozen=True)
class VectorInputSpec:
    """Vectors that are the hidden states themselves (sounds of Gemma 4 12B).

    The item's array is `input_features`, float32 [T, size].
    """

    size: int

    def sizes(self, data: Arrays) -> tuple[int, int]:
        """Implement `InputSpec`."""
        vectors = data["input_features"]
        if vectors.ndim != 2 or vectors.shape[1] != self.size or not len(vectors):
            raise RequestError(
                f"'input_features' has the shape {vectors.shape}; the encoder reads vectors of "
                f"{self.size} numbers, at least one."
            )
        return len(vectors), len(vectors)

    def read(self, data: Arrays) -> EncoderItem:
        """Implement `InputSpec`."""
        vectors = data["input_features"].astype(np.float32, copy=False)
        count = len(vectors)
        return EncoderItem(count, (np.array([count]),), numbers={"vectors": vectors})

    def largest(self, num_tokens: int) -> EncoderItem:
        """Implement `InputSpec`."""
        return self.read({"input_features": np.zeros((num_tokens, self.size), np.float32)})

    def weights(self, names: Names) -> Iterator[Weight]:
        """Implement `InputSpec`: there are none."""
        yield from ()

    def build(self, parts: Parts) -> EncoderInput:
        """Implement `InputSpec`."""
        from octavo.layers.encoder_input import VectorInput

        return VectorInput()
