"""Rotary embedding and the write of keys and values to the KV cache, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import fp8

_ELEMENTS = 1024  # per program


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
    block_stride,
    half,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Process some heads of one token. Grid: (tokens, groups of KV heads, then of query heads)."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    KV_GROUPS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    if NEOX:
        first = i
        second = i + half
    else:
        first = 2 * i
        second = 2 * i + 1
    if ROTARY:
        at = cos_sin + tl.load(positions + token) * (2 * half)
        cos = tl.load(at + i, mask=i < half, other=0.0)
        sin = tl.load(at + half + i, mask=i < half, other=0.0)
    if group < KV_GROUPS:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            head = group * BLOCK_H + h
            there = head < KV_HEADS
            rows: tl.constexpr = KV_HEADS * HEAD_SIZE
            to = kv_cache + (slot // PAGE) * block_stride + (slot % PAGE) * rows
            to += head * HEAD_SIZE
            rest = there & (d < HEAD_SIZE)
            v = value + token * value_token_stride + head * value_head_stride
            v = tl.load(v + d, mask=rest & (d < VALUE_SIZE), other=0.0)
            _put(to + PAGE * rows + d, v, rest, FP8)
            k = key + token * key_token_stride + head * key_head_stride
            if ROTARY:
                pair = there & (i < half)
                a = tl.load(k + first, mask=pair, other=0.0).to(tl.float32)
                b = tl.load(k + second, mask=pair, other=0.0).to(tl.float32)
                _put(to + first, (a * cos - b * sin).to(key.dtype.element_ty), pair, FP8)
                _put(to + second, (b * cos + a * sin).to(key.dtype.element_ty), pair, FP8)
                rest = rest & (d >= 2 * half)
            _put(to + d, tl.load(k + d, mask=rest, other=0.0), rest, FP8)
    elif ROTARY:
        head = (group - KV_GROUPS) * BLOCK_H + h
        pair = (head < HEADS) & (i < half)
        # In place: only this thread reads and writes these elements.
        q = query + token * query_token_stride + head * query_head_stride
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
    """Store keys and values in their slots; with `query`, rotate query and key first.

    Args:
        key: [T, KVH, D]; not changed: rotated keys are only written to the cache.
        value: [T, KVH, V], V at most D; not changed. The cache receives zeros after it.
        kv_cache: [blocks, 2, block_size, KVH, D], any stride of blocks; uint8 for a cache in FP8.
        slot_mapping: int64 [T]; tokens with -1 are not stored.
        format: see `octavo.kernels.triton.fp8`.
        query: [T, H, D], rotated in place.
        positions: int64 [T].
        cos_sin_cache: float32 [positions, rotary_dim], as in `Ops.rotary_embedding`.
        is_neox: as in `Ops.rotary_embedding`.
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
    block_d = triton.next_power_of_2(head_size)
    block_h = max(1, min(triton.next_power_of_2(max(heads, kv_heads)), _ELEMENTS // block_d))
    groups = triton.cdiv(kv_heads, block_h) + triton.cdiv(heads, block_h)
    _rotate_and_write[(tokens, groups)](
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
        kv_cache.stride(0),
        half,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        VALUE_SIZE=value.shape[2],
        PAGE=kv_cache.shape[2],
        ROTARY=rotary,
        NEOX=is_neox,
        FP8=format,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=4,
    )


@triton.jit
def _write_latents(
    latents,
    cache,
    slot_mapping,
    stride,
    block_stride,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        d = tl.arange(0, BLOCK)
        x = tl.load(latents + token * stride + d, mask=d < SIZE, other=0.0)
        at = cache + (slot // PAGE) * block_stride + (slot % PAGE) * SIZE + d
        _put(at, x, d < SIZE, FP8)


def write_latents(latents: Tensor, cache: Tensor, format: int, slot_mapping: Tensor) -> None:
    """Store latents [T, D] in their slots.

    Args:
        latents: any stride of tokens.
        cache: [blocks, block_size, D], any stride of blocks; uint8 for a cache in FP8.
        format: see `octavo.kernels.triton.fp8`.
        slot_mapping: int64 [T]; tokens with -1 are not stored.
    """
    tokens, size = latents.shape
    if tokens:
        _write_latents[(tokens,)](
            latents,
            cache,
            slot_mapping,
            latents.stride(0),
            cache.stride(0),
            SIZE=size,
            PAGE=cache.shape[1],
            FP8=format,
            BLOCK=triton.next_power_of_2(size),
            num_warps=1 if size <= 128 else 4,
        )
