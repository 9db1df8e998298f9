"""Rotary embedding and the write of keys and values into the KV cache, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import fp8


@triton.jit
def _put(at, x, mask, FP8: tl.constexpr):
    if FP8:
        tl.store(at, fp8.encode(x.to(tl.float32), FP8), mask=mask)
    else:
        tl.store(at, x, mask=mask)


@triton.jit
def _rotate_and_write(
    query,
    key,
    value,
    kv_cache,
    slot_mapping,
    positions,
    cos_sin,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    half,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One head of one token: key and value heads first, then query heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK_HALF)
    pair = i < half
    if NEOX:
        first = i
        second = i + half
    else:
        first = 2 * i
        second = 2 * i + 1
    if ROTARY:
        at = cos_sin + tl.load(positions + token) * (2 * half)
        cos = tl.load(at + i, mask=pair, other=0.0)
        sin = tl.load(at + half + i, mask=pair, other=0.0)
    if head < KV_HEADS:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            rows: tl.constexpr = KV_HEADS * HEAD_SIZE
            to = kv_cache + (slot // PAGE) * (2 * PAGE * rows) + (slot % PAGE) * rows
            to += head * HEAD_SIZE
            v = tl.load(
                value + token * value_token_stride + head * value_head_stride + d,
                mask=d < HEAD_SIZE,
                other=0.0,
            )
            _put(to + PAGE * rows + d, v, d < HEAD_SIZE, FP8)
            k = key + token * key_token_stride + head * key_head_stride
            rest = d < HEAD_SIZE
            if ROTARY:
                a = tl.load(k + first, mask=pair, other=0.0).to(tl.float32)
                b = tl.load(k + second, mask=pair, other=0.0).to(tl.float32)
                _put(to + first, (a * cos - b * sin).to(key.dtype.element_ty), pair, FP8)
                _put(to + second, (b * cos + a * sin).to(key.dtype.element_ty), pair, FP8)
                rest = rest & (d >= 2 * half)
            _put(to + d, tl.load(k + d, mask=rest, other=0.0), rest, FP8)
    elif ROTARY:
        q = query + token * query_token_stride + (head - KV_HEADS) * query_head_stride
        a = tl.load(q + first, mask=pair, other=0.0).to(tl.float32)
        b = tl.load(q + second, mask=pair, other=0.0).to(tl.float32)
        tl.store(q + first, (a * cos - b * sin).to(query.dtype.element_ty), mask=pair)
        tl.store(q + second, (b * cos + a * sin).to(query.dtype.element_ty), mask=pair)


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    format: int,
    query: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    is_neox: bool = True,
) -> None:
    """Stores keys and values [T, KVH, D] in their slots; with `query` both are rotated first.

    Args:
        key: not changed: what is rotated goes into the cache only.
        value: likewise.
        kv_cache: [blocks, 2, block_size, KVH, D], dense; uint8 for a cache in FP8.
        slot_mapping: int64 [T]; -1: nowhere.
        format: see `octavo.kernels.triton.fp8`.
        query: [T, H, D], rotated in place.
        positions: int64 [T].
        cos_sin_cache: float32 [positions, rotary_dim], as in `Ops.rotary_embedding`.
        is_neox: likewise.
    """
    tokens, kv_heads, head_size = key.shape
    if tokens == 0:
        return
    rotary = query is not None
    if query is None or positions is None or cos_sin_cache is None:
        query, positions, cos_sin_cache, half, heads = key, slot_mapping, key, 1, 0
    else:
        half, heads = cos_sin_cache.shape[1] // 2, query.shape[1]
        assert cos_sin_cache.is_contiguous()
    _rotate_and_write[(tokens, kv_heads + heads)](
        query,
        key,
        value,
        kv_cache,
        slot_mapping,
        positions,
        cos_sin_cache,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        half,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        PAGE=kv_cache.shape[2],
        ROTARY=rotary,
        NEOX=is_neox,
        FP8=format,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=1,
    )
