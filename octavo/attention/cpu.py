"""Attention by the C++ kernel in csrc/attention.h, which describes layout and algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from octavo._native import kernels
from octavo.attention.base import (
    AttentionMetadata,
    AttentionParams,
    DistanceProducts,
    LargestAttention,
    Rotary,
    cached_head_size,
)
from octavo.errors import ConfigError
from octavo.kernels.native_base import DTYPE_CODES
from octavo.system.tensor import HostTensor, Tensor

BLOCK_SIZES = (8, 16, 32, 64, 128)
"""Block sizes that the kernel supports: they fit its tiles of 64 to 256 positions."""

MAX_HEAD_SIZE = 576
"""Largest head size: kMaxHeadSize in csrc/kernels.h."""

# kSegment, kSharedRows and kPartsNbytes in csrc/attention.h, and the widest 2 * W.
_SEGMENT, _SHARED_ROWS, _PARTS_NBYTES, _LANES = 512, 36, 64 << 20, 32

# Largest kTileRows, kStepRows and kTile of csrc/attention.h.
_TILE_ROWS, _STEP_ROWS, _TILE = 128, 36, 256

_CACHE_CODES = {"float8_e4m3fn": 1, "float8_e5m2": 2, "int8": 3}
"""Codes of CacheType in csrc/args.h."""


def _cache_code(kv_cache: Tensor, dtype: str) -> int:
    return 0 if kv_cache.dtype == dtype else _CACHE_CODES[kv_cache.dtype]


def _has_dense_blocks(kv_cache: Tensor) -> bool:
    _, _, heads, block_size, head_size = kv_cache.shape
    head = block_size * head_size
    strides = tuple(map(kv_cache.stride, range(1, 5)))
    return strides == (heads * head, head, head_size, 1)


class CPUAttention:
    """Implementation of `AttentionBackend` for the CPU.

    A token's result has the same bits if it is decoded alone, in a batch, or in a chunk of any
    size, and for any number of threads.
    """

    name = "cpu"
    pads_blocks = True

    def kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str | None = None,
    ) -> tuple[int, ...]:
        """Return [num_blocks, 2, num_kv_heads, block_size, head_size]; keys are stored transposed.

        In int8 each head has 4 more bytes: the scales follow the numbers of a block.
        """
        size = _cached_size(block_size, "head_size", head_size, dtype)
        return (num_blocks, 2, num_kv_heads, block_size, size)

    def typed(self, memory: Tensor, dtype: str) -> Tensor:
        """Implement `AttentionBackend`."""
        tensor: Tensor = memory.view(dtype)
        return tensor

    def scratch_nbytes(self, largest: LargestAttention) -> int:
        """Return the bytes of the threads' tasks and of the segments of long contexts.

        Threads share few rows by segments: see csrc/attention.h.
        """
        width = -(-largest.head_size // _LANES) * _LANES
        rows = _TILE_ROWS * width * (2 + 4 + 4)  # queries; sums of a segment and of all of them
        rows += _TILE_ROWS * 4 * _LANES // 2  # sums of probabilities
        tiles = 4 * _TILE * width * 2  # keys and values, widened from bytes and in AMX layout
        step = _STEP_ROWS * _TILE * (4 + 4)  # scores and probabilities
        tasks = min(4 * largest.num_threads, largest.num_tokens * largest.num_kv_heads)
        segments = -(-largest.max_model_len // _SEGMENT)
        shared = _TILE_ROWS if largest.latent else _SHARED_ROWS
        shared = min(shared, largest.num_tokens * largest.num_heads // largest.num_kv_heads)
        part = 4 * segments * shared * (width + 2) if segments > 1 else 0  # of a task
        parts = max(part, min(tasks * part, _PARTS_NBYTES))
        return largest.num_threads * (rows + tiles + step) + parts

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        rotary: Rotary | None = None,
    ) -> None:
        """Store each key in its block's transposed layout, each value unchanged."""
        if rotary is not None:
            rotary(key)
        tokens, kv_heads, head_size = key.shape
        assert value.shape[:2] == key.shape[:2]
        assert value.shape[2] <= head_size
        assert slot_mapping.shape == (tokens,)
        assert key.dtype == value.dtype
        assert _has_dense_blocks(kv_cache)
        assert key.stride(2) == value.stride(2) == 1
        assert slot_mapping.is_contiguous()
        assert slot_mapping.dtype == "int64"
        assert kv_cache.shape[2] == kv_heads
        assert kv_cache.shape[4] == cached_head_size(head_size, kv_cache.dtype)
        kernels.write_kv(
            key=key.data_ptr(),
            key_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value=value.data_ptr(),
            value_stride=value.stride(0),
            value_head_stride=value.stride(1),
            kv_cache=kv_cache.data_ptr(),
            kv_block_stride=kv_cache.stride(0),
            slot_mapping=slot_mapping.data_ptr(),
            tokens=tokens,
            kv_heads=kv_heads,
            head_size=head_size,
            value_size=value.shape[2],
            block_size=kv_cache.shape[3],
            dtype=DTYPE_CODES[key.dtype],
            cache=_cache_code(kv_cache, key.dtype),
        )

    def read_keys(
        self, kv_cache: Tensor, block_ids: Sequence[int], head: int, count: int
    ) -> NDArray[np.float32]:
        """Return the first keys of a head that blocks hold, float32 [count, head_size].

        Args:
            kv_cache: a cache without 8-bit numbers.
            block_ids: blocks of the keys, in order.
            head: the head.
            count: number of keys.
        """
        array: NDArray[Any] = cast(HostTensor, kv_cache).numpy()
        blocks = array[list(block_ids), 0, head].astype(np.float32)
        num_blocks, block_size, size = blocks.shape
        pairs = size - size % 2 if kv_cache.dtype == "bfloat16" else 0
        flat = blocks.reshape(num_blocks, -1)
        paired = flat[:, : pairs * block_size].reshape(num_blocks, -1, block_size, 2)
        single = flat[:, pairs * block_size :].reshape(num_blocks, -1, block_size)
        keys = [
            paired.transpose(0, 2, 1, 3).reshape(num_blocks * block_size, pairs),
            single.transpose(0, 2, 1).reshape(num_blocks * block_size, size - pairs),
        ]
        return np.concatenate(keys, axis=1)[:count]

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        out: Tensor,
        params: AttentionParams,
    ) -> None:
        """Run one kernel call for prefill chunks and decode rows."""
        _, heads, head_size = query.shape
        _, _, kv_heads, block_size, _ = kv_cache.shape
        assert query.shape[:2] == out.shape[:2]
        assert 0 < out.shape[2] <= head_size
        assert query.stride(2) == out.stride(2) == 1
        assert query.dtype == out.dtype
        assert _has_dense_blocks(kv_cache)
        assert kv_cache.shape[4] == cached_head_size(head_size, kv_cache.dtype)
        assert heads % kv_heads == 0
        assert params.sliding_window is None or params.sliding_window > 0
        assert params.chunk_size is None or params.chunk_size > 0
        assert params.sliding_window is None or params.chunk_size is None
        slopes = 0
        if params.alibi_slopes is not None:
            assert params.alibi_slopes.dtype == "float32"
            assert params.alibi_slopes.shape == (heads,)
            slopes = params.alibi_slopes.data_ptr()
        biases = distance = 0
        if params.position_bias is not None:
            assert params.position_bias.dtype == "float32"
            assert params.position_bias.shape[0] == heads
            assert params.position_bias.shape[1] % 2 == 1
            assert params.position_bias.is_contiguous()
            biases, distance = params.position_bias.data_ptr(), params.position_bias.shape[1] // 2
        sinks = 0
        if params.sinks is not None:
            assert params.sinks.dtype == query.dtype
            assert params.sinks.shape == (heads,)
            sinks = params.sinks.data_ptr()
        ranges = 0
        if params.sees_ranges and metadata.ranges is not None:
            assert metadata.ranges.dtype == "int32"
            assert metadata.ranges.shape == (query.shape[0], 2)
            assert metadata.ranges.is_contiguous()
            ranges = metadata.ranges.data_ptr()
        kernels.attention(
            **_addresses(query, kv_cache, metadata, out),
            kv_heads=kv_heads,
            block_size=block_size,
            latent=False,
            causal=params.causal,
            window=params.sliding_window or 0,
            chunk=params.chunk_size or 0,
            scale=params.scale,
            soft_cap=params.logits_soft_cap or 0.0,
            alibi_slopes=slopes,
            position_bias=biases,
            bias_distance=distance,
            sinks=sinks,
            ranges=ranges,
            **_products(query, params.products),
        )

    def latent_cache_shape(
        self, num_blocks: int, block_size: int, latent_size: int, dtype: str | None = None
    ) -> tuple[int, ...]:
        """Return [num_blocks, block_size, latent_size].

        In int8 each latent has 4 more bytes: the scales follow the numbers of a block.
        """
        return (num_blocks, block_size, _cached_size(block_size, "latent_size", latent_size, dtype))

    def write_latents(self, latents: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Store each latent unchanged."""
        tokens, size = latents.shape
        assert latents.stride(1) == 1
        assert slot_mapping.shape == (tokens,)
        assert slot_mapping.is_contiguous()
        assert slot_mapping.dtype == "int64"
        assert cache.shape[2] == cached_head_size(size, cache.dtype)
        assert (cache.stride(1), cache.stride(2)) == (cache.shape[2], 1)
        kernels.write_kv(
            key=latents.data_ptr(),
            key_stride=latents.stride(0),
            key_head_stride=0,
            value=0,
            value_stride=0,
            value_head_stride=0,
            kv_cache=cache.data_ptr(),
            kv_block_stride=cache.stride(0),
            slot_mapping=slot_mapping.data_ptr(),
            tokens=tokens,
            kv_heads=1,
            head_size=size,
            value_size=0,
            block_size=cache.shape[1],
            dtype=DTYPE_CODES[latents.dtype],
            cache=_cache_code(cache, latents.dtype),
        )

    def attend_latents(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, out: Tensor, scale: float
    ) -> None:
        """Run one kernel call, which reads each latent once for its key and its value."""
        assert query.shape[:2] == out.shape[:2]
        assert 0 < out.shape[2] <= query.shape[2]
        assert query.stride(2) == out.stride(2) == 1
        assert query.dtype == out.dtype
        assert cache.shape[2] == cached_head_size(query.shape[2], cache.dtype)
        assert (cache.stride(1), cache.stride(2)) == (cache.shape[2], 1)
        kernels.attention(
            **_addresses(query, cache, metadata, out),
            kv_heads=1,
            block_size=cache.shape[1],
            latent=True,
            causal=True,
            window=0,
            chunk=0,
            scale=scale,
            soft_cap=0.0,
            alibi_slopes=0,
            position_bias=0,
            bias_distance=0,
            sinks=0,
            ranges=0,
            **_products(query, None),
        )


def _cached_size(block_size: int, name: str, size: int, dtype: str | None) -> int:
    """Return the number of elements that a cache stores for `size` numbers of a token."""
    if block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size={block_size}: attention on the CPU supports {BLOCK_SIZES}.")
    if not 0 < size <= MAX_HEAD_SIZE:
        raise ConfigError(
            f"{name}={size}: attention on the CPU supports up to {MAX_HEAD_SIZE}; use "
            "attention_backend=reference."
        )
    return size if dtype is None else cached_head_size(size, dtype)


def _products(query: Tensor, products: DistanceProducts | None) -> dict[str, int]:
    """Return the kernel's arguments for products with vectors of distances."""
    names = "query_products", "key_products", "products_stride", "products_head_stride"
    arguments = dict.fromkeys((*names, "product_columns", "product_distance"), 0)
    if products is None:
        return arguments
    columns = products.columns
    assert columns.dtype == "int32"
    assert columns.shape[0] % 2 == 1
    assert columns.is_contiguous()
    arguments |= {"product_columns": columns.data_ptr(), "product_distance": len(columns) // 2}
    for name, tensor in zip(names[:2], (products.queries, products.keys), strict=True):
        if tensor is not None:
            assert tensor.shape[:2] == query.shape[:2]
            assert tensor.dtype == query.dtype
            assert tensor.is_contiguous()
            arguments[name] = tensor.data_ptr()
            arguments |= {names[2]: tensor.stride(0), names[3]: tensor.stride(1)}
    return arguments


def _addresses(
    query: Tensor, cache: Tensor, metadata: AttentionMetadata, out: Tensor
) -> dict[str, int]:
    """Return the arguments of the kernel that both kinds of caches have."""
    query_start_loc, seq_lens, block_table, block_table_stride = metadata.addresses
    return {
        "query": query.data_ptr(),
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "out": out.data_ptr(),
        "out_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "kv_cache": cache.data_ptr(),
        "kv_block_stride": cache.stride(0),
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_table": block_table,
        "block_table_stride": block_table_stride,
        "num_reqs": metadata.num_reqs,
        "heads": query.shape[1],
        "head_size": query.shape[2],
        "value_size": out.shape[2],
        "dtype": DTYPE_CODES[query.dtype],
        "cache": _cache_code(cache, query.dtype),
    }
