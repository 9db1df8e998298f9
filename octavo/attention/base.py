"""Attention interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from octavo.errors import ConfigError
from octavo.system.tensor import Tensor

KV_CACHE_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}
"""Types of an 8-bit cache, by their names in `CacheConfig.kv_cache_dtype`."""


def cached_head_size(head_size: int, dtype: str) -> int:
    """Return the number of elements that a cache of type `dtype` stores for one key or value.

    That is the vector of one head of one token. In int8 each vector has its own scale of 4 bytes.
    """
    return head_size + 4 if dtype == "int8" else head_size


@dataclass
class AttentionMetadata:
    """Input of attention in one step, for one group of layers that share a block table.

    The model runner makes a new one for each step. Tensors are on the device. The tokens of a
    request are contiguous: request r owns tokens [query_start_loc[r], query_start_loc[r + 1]).

    Attributes:
        num_reqs: requests in the step (R).
        num_tokens: tokens in the step (T).
        max_query_len: largest number of tokens of a request.
        max_seq_len: longest context.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R], each request's context including this step's tokens: its i-th token of
            the step has position seq_len - query_len + i. If attention is not causal, the i-th
            token has position i, and tokens see the first seq_len positions only. A step may then
            have any tokens of a request if their positions do not matter: without a window and
            biases.
        block_table: int32 [R, at least the blocks of max_seq_len]; entries before a sliding window
            and beyond seq_len are not read.
        slot_mapping: int64 [T], slot of each token's key and value: block * block_size + offset;
            tokens with -1 are not stored.
        ranges: int32 [T, 2], contiguous: begin and end of the range of each token; see
            `AttentionParams`. None: no token has one.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    ranges: Tensor | None = None

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """Addresses of query_start_loc, seq_lens and block_table, and block_table's stride."""
        for tensor in (self.query_start_loc, self.seq_lens, self.block_table):
            assert tensor.dtype == "int32"
            assert tensor.stride(-1) == 1
        assert self.query_start_loc.shape[0] == self.num_reqs + 1
        return (
            self.query_start_loc.data_ptr(),
            self.seq_lens.data_ptr(),
            self.block_table.data_ptr(),
            self.block_table.stride(0),
        )


@dataclass(frozen=True, slots=True)
class LargestAttention:
    """Limits of a step that bound the memory of attention.

    Attributes:
        num_tokens: tokens of the step.
        max_model_len: longest context.
        num_heads: query heads.
        num_kv_heads: heads of keys and values; 1 for latents.
        head_size: elements of a head.
        num_threads: number of computing threads.
        latent: True if a step attends to latents.
    """

    num_tokens: int
    max_model_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_threads: int
    latent: bool = False


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding of a step's queries and keys: see `Ops.rotary_embedding`.

    Attributes:
        apply: the operation, for backends without a fused one.
        positions: int64 [T].
        query: [T, H, D], rotated in place.
        cos_sin_cache: float32 [positions, rotary_dim].
        is_neox: layout of the pairs of dimensions.
    """

    apply: Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
    positions: Tensor
    query: Tensor
    cos_sin_cache: Tensor
    is_neox: bool = True

    def __call__(self, key: Tensor) -> None:
        """Rotate the queries and `key` [T, KVH, D] in place."""
        self.apply(self.positions, self.query, key, self.cos_sin_cache, self.is_neox)


@dataclass(frozen=True, slots=True)
class DistanceProducts:
    """Products of a step's queries and keys with vectors of distances (disentangled attention).

    Attributes:
        columns: int32 [2 * D + 1]: the column of distance j - p is at D + j - p, and beyond the
            distances -D and D the first and the last one.
        queries: [T, H, C], the product of each query with the vector of each column, in the query's
            dtype; contiguous. None: queries are not multiplied.
        keys: the same of each key of the step.
    """

    columns: Tensor
    queries: Tensor | None
    keys: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of a layer's attention.

    A token at position p attends to positions max(0, p - sliding_window + 1) to p, or with chunks
    from the last multiple of `chunk_size` to p. If attention is not causal, it attends to all
    positions j < seq_len of its request with |p - j| < sliding_window; without such a position its
    result is 0. The logit of a position j is
    soft_cap(scale * q.k) - slope * |p - j| + position_bias[j - p], where q.k includes the products
    of q and of k with the distance. A sink is a logit without a position: it only joins the sum by
    which the softmax divides.

    A token may have a range, whose tokens see each other in both directions, such as those of a
    picture (Gemma 3, arXiv:2503.19786). It then sees all positions from the smaller one of its
    first position and the range's begin, up to the larger one of its own position and the last of
    the range. A begin after the token changes only the end. Ranges of a request do not overlap,
    and a step with a token has the rest of its range.

    Attributes:
        scale: factor of the logits.
        sliding_window: number of visible positions on a side, including the token's own; None:
            all.
        chunk_size: number of positions of a chunk; a token sees those of its own chunk (Llama 4).
            None: no chunks. Only one of it and `sliding_window` is set.
        logits_soft_cap: cap * tanh(logit / cap); None: no cap (Gemma 2).
        alibi_slopes: float32 [H]; None: no bias (Press et al., "Train Short, Test Long").
        sinks: [H] in the query's dtype; None: no sinks (gpt-oss).
        causal: False: a token sees later positions, too (BERT, arXiv:1810.04805). All tokens of a
            request are then in the same step. Not combined with `chunk_size`.
        position_bias: float32 [H, 2 * D + 1], contiguous: the bias of distance j - p is in column
            D + j - p, and beyond the distances -D and D in the first and the last column. None: no
            bias (T5, arXiv:1910.10683, section 2.1; MPNet).
        products: products of the step that are added to q.k (DeBERTa, arXiv:2006.03654, section
            3.1); those of keys only if attention is not causal, since the step then has all keys.
            None: none.
        sees_ranges: True if tokens see their ranges; only if attention is causal.
    """

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    chunk_size: int | None = None
    causal: bool = True
    position_bias: Tensor | None = None
    products: DistanceProducts | None = None
    sees_ranges: bool = False

    def __post_init__(self) -> None:
        assert self.causal or self.chunk_size is None
        assert not self.causal or self.products is None or self.products.keys is None
        assert self.causal or not self.sees_ranges


class AttentionBackend(Protocol):
    """Attention over a paged KV cache.

    The cache of a layer is one dense tensor of `kv_cache_shape` or `latent_cache_shape`, of the
    model's dtype or one of `KV_CACHE_DTYPES`. Its first dimension counts blocks; the layout of a
    block is private to the backend.

    An 8-bit cache stores each number x of a key or value as follows. float8_e4m3fn or float8_e5m2:
    rounded to nearest, clamped to the largest finite number, NaN kept. int8: round(x / s) with the
    head's scale s = max |x| / 127 in float32; all NaN if a number is not finite. The cached numbers
    of a token depend on that token alone.
    """

    name: str
    pads_blocks: bool
    """True if the blocks of a cache may lie further apart than they are long."""

    def kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str | None = None,
    ) -> tuple[int, ...]:
        """Return the shape of one layer's cache of keys and values.

        Args:
            num_blocks: number of blocks.
            block_size: tokens in a block.
            num_kv_heads: heads of keys and values.
            head_size: elements of a head.
            dtype: dtype of the cache if it is one of `KV_CACHE_DTYPES`.

        Raises:
            ConfigError: the backend does not support the block size or head size.
        """
        ...

    def typed(self, memory: Tensor, dtype: str) -> Tensor:
        """Return the bytes of a cache, uint8, as numbers of a type."""
        ...

    def scratch_nbytes(self, largest: LargestAttention) -> int:
        """Return the maximum host memory of a step in bytes, besides the arguments of `forward`."""
        ...

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        rotary: Rotary | None = None,
    ) -> None:
        """Store keys [T, KVH, D] and values [T, KVH, V] (any strides of tokens and heads).

        V is at most D, and the cache has room for D.
        With `rotary`, queries and keys are rotated first. Afterwards the queries and the cache are
        rotated; the contents of `key` are undefined.
        """
        ...

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        out: Tensor,
        params: AttentionParams,
    ) -> None:
        """Compute attention by `AttentionParams`; the step's keys and values must be in the cache.

        Args:
            query: [T, H, D]; head h reads KV head h * KVH // H.
            kv_cache: the layer's cache.
            metadata: the step.
            out: [T, H, V], written; V is the size of the values. Query and out may have any
                strides of tokens and heads.
            params: the layer's parameters.
        """
        ...

    def latent_cache_shape(
        self, num_blocks: int, block_size: int, latent_size: int, dtype: str | None = None
    ) -> tuple[int, ...]:
        """Return the shape of one layer's cache of latents.

        Args:
            num_blocks: number of blocks.
            block_size: tokens in a block.
            latent_size: numbers of a token's latent.
            dtype: dtype of the cache if it is one of `KV_CACHE_DTYPES`.

        Raises:
            ConfigError: the backend does not support latents, or not of this size.
        """
        ...

    def write_latents(self, latents: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Store latents [T, D] (any stride of tokens) in their slots."""
        ...

    def attend_latents(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, out: Tensor, scale: float
    ) -> None:
        """Compute attention of all heads over the same latents.

        A latent is the key of all heads; its first V numbers are their value (the absorbed form of
        multi-head latent attention, DeepSeek-V2, arXiv:2405.04434, section 2.1).

        Args:
            query: [T, H, D].
            cache: the layer's cache; the step's latents must be in it.
            metadata: the step.
            out: [T, H, V], written. Query and out may have any strides of tokens and heads.
            scale: factor of the logits.
        """
        ...


class NoLatents:
    """Part of an `AttentionBackend` that does not support latents."""

    name: str

    def latent_cache_shape(
        self, num_blocks: int, block_size: int, latent_size: int, dtype: str | None = None
    ) -> tuple[int, ...]:
        """Raise ConfigError."""
        raise ConfigError(
            f"attention_backend={self.name} does not support multi-head latent attention yet; use "
            "attention_backend=auto."
        )

    def write_latents(self, latents: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Fail: no cache of latents exists."""
        raise AssertionError("latents without a cache")

    def attend_latents(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, out: Tensor, scale: float
    ) -> None:
        """Fail: no cache of latents exists."""
        raise AssertionError("latents without a cache")
