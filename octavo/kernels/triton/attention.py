"""Causal attention over a paged KV cache, for prefill chunks and decode rows in one launch.

Online softmax over tiles of the KV (Dao et al., "FlashAttention", algorithm 1; Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Tiles begin at absolute positions,
and so do the splits that the KV is cut into. A row's result merges that of its splits, from first
to last. Usually one program computes all splits of a row and merges them. If a step has few rows,
several programs share their splits to fill the GPU (Flash-Decoding), and a second kernel merges
them with the same arithmetic. So a row's bits depend neither on the other rows nor on the sharing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import fp8
from octavo.kernels.triton.activation import tanh


@triton.jit
def _merge(largest, total, acc, split_largest, split_total, split_acc):
    """Merge two parts of a softmax; the first may be empty: -inf, 0, 0."""
    new = tl.maximum(largest, split_largest)
    base = tl.where(new == float("-inf"), 0.0, new)
    a = tl.exp(largest - base)
    b = tl.exp(split_largest - base)
    return new, total * a + split_total * b, acc * a[:, None] + split_acc * b[:, None]


@triton.jit
def _load_kv(at, mask, FP8: tl.constexpr, UPCAST: tl.constexpr, DTYPE: tl.constexpr):
    x = tl.load(at, mask=mask, other=0)
    if FP8:
        x = fp8.decode(x, FP8)
    return x.to(tl.float32 if UPCAST else DTYPE)


@triton.jit(do_not_specialize=["num_reqs", "max_splits"])  # they change from step to step
def _attention(
    out,
    query,
    kv_cache,
    query_start_loc,
    seq_lens,
    block_table,
    alibi_slopes,
    sinks,
    partial_out,
    partial_stats,
    scale,
    soft_cap,
    num_reqs,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    max_splits,
    ONE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute a tile of queries of one request, with all query heads of one KV head.

    Grid: (tiles, KV heads, programs that share the splits of a decode row). With ONE query in each
    request, tiles are requests. Otherwise request r's tiles begin at query_start_loc[r] // QUERIES
    + r: this leaves room for one partial tile in each request.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    if ONE:
        req = tile
        start = tile
        query_len = 1
        first_query = 0
    else:
        low = tl.full([], 0, tl.int32)
        high = low + num_reqs
        while low < high:
            middle = (low + high) // 2
            begins = tl.load(query_start_loc + middle) // QUERIES + middle
            if begins <= tile:
                low = middle + 1
            else:
                high = middle
        req = low - 1
        start = tl.load(query_start_loc + req)
        query_len = tl.load(query_start_loc + req + 1) - start
        first_query = (tile - (start // QUERIES + req)) * QUERIES
    if first_query < query_len:
        context = tl.load(seq_lens + req) - query_len
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        queries = first_query + m // GROUP
        heads = kv_head * GROUP + m % GROUP
        rows = (m < QUERIES * GROUP) & (queries < query_len)
        dims = d < HEAD_SIZE
        tokens = (start + queries).to(tl.int64)
        q = tl.load(
            query
            + tokens[:, None] * query_token_stride
            + heads[:, None] * query_head_stride
            + d[None, :],
            mask=rows[:, None] & dims[None, :],
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
        positions = context + queries
        end = tl.minimum(context + first_query + QUERIES, context + query_len)
        begin = 0
        if WINDOW:
            begin = tl.maximum(0, context + first_query - WINDOW + 1)
        first_split = begin // SPLIT
        end_split = tl.cdiv(end, SPLIT)
        programs = tl.num_programs(2)
        shared = (query_len == 1) & (programs > 1) & (end_split - first_split > 1)
        my_split = first_split + tl.program_id(2)
        if not shared:
            # The first program computes all splits.
            my_split = tl.where(tl.program_id(2) == 0, first_split, end_split)
            programs = 1
        if ALIBI:
            slopes = tl.load(alibi_slopes + heads, mask=rows, other=0.0)
        row_size: tl.constexpr = KV_HEADS * HEAD_SIZE
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for split in range(my_split, end_split, programs):
            split_largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            split_total = tl.zeros([BLOCK_M], tl.float32)
            split_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            from_n = tl.maximum(split * SPLIT, begin // BLOCK_N * BLOCK_N)
            to_n = tl.minimum(split * SPLIT + SPLIT, end)
            for tile_n in range(from_n, to_n, BLOCK_N):
                n = tile_n + tl.arange(0, BLOCK_N)
                there = (n >= begin) & (n < end)
                blocks = tl.load(
                    block_table + req.to(tl.int64) * table_stride + n // PAGE, mask=there, other=0
                ).to(tl.int64)
                at = kv_cache + blocks * (2 * PAGE * row_size) + (n % PAGE) * row_size
                at += kv_head * HEAD_SIZE
                k = _load_kv(
                    at[None, :] + d[:, None],
                    dims[:, None] & there[None, :],
                    FP8,
                    UPCAST,
                    query.dtype.element_ty,
                )
                logits = tl.dot(q, k, input_precision="ieee") * scale
                if SOFT_CAP:
                    logits = soft_cap * tanh(logits / soft_cap)
                distance = n[None, :] - positions[:, None]
                if ALIBI:
                    logits += slopes[:, None] * distance
                seen = rows[:, None] & (distance <= 0)
                if WINDOW:
                    seen = seen & (distance > -WINDOW)
                logits = tl.where(seen, logits, float("-inf"))
                new = tl.maximum(split_largest, tl.max(logits, axis=1))
                base = tl.where(new == float("-inf"), 0.0, new)
                p = tl.exp(logits - base[:, None])
                decay = tl.exp(split_largest - base)
                v = _load_kv(
                    at[:, None] + PAGE * row_size + d[None, :],
                    there[:, None] & dims[None, :],
                    FP8,
                    UPCAST,
                    query.dtype.element_ty,
                )
                split_total = split_total * decay + tl.sum(p, axis=1)
                split_acc = tl.dot(
                    p.to(v.dtype), v, split_acc * decay[:, None], input_precision="ieee"
                )
                split_largest = new
            if shared:
                head_row = req.to(tl.int64) * (KV_HEADS * GROUP) + heads
                at_split = head_row * max_splits + split
                tl.store(
                    partial_out + at_split[:, None] * BLOCK_D + d[None, :],
                    split_acc,
                    mask=rows[:, None],
                )
                tl.store(partial_stats + at_split * 2, split_largest, mask=rows)
                tl.store(partial_stats + at_split * 2 + 1, split_total, mask=rows)
            else:
                largest, total, acc = _merge(
                    largest, total, acc, split_largest, split_total, split_acc
                )
        if (not shared) & (tl.program_id(2) == 0):
            if SINKS:
                sink = tl.load(sinks + heads, mask=rows, other=float("-inf")).to(tl.float32)
                one = tl.where(rows, 1.0, 0.0)
                largest, total, acc = _merge(largest, total, acc, sink, one, tl.zeros_like(acc))
            # Rows without a query have a total of 0.
            result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(
                out
                + tokens[:, None] * out_token_stride
                + heads[:, None] * out_head_stride
                + d[None, :],
                result.to(out.dtype.element_ty),
                mask=rows[:, None] & dims[None, :],
            )


@triton.jit(do_not_specialize=["max_splits"])
def _merge_splits(
    out,
    query_start_loc,
    seq_lens,
    sinks,
    partial_out,
    partial_stats,
    out_token_stride,
    out_head_stride,
    max_splits,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the splits of one head of one decode row that several programs computed."""
    req = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - token
    seq_len = tl.load(seq_lens + req)
    first_split = 0
    if WINDOW:
        first_split = tl.maximum(0, seq_len - WINDOW) // SPLIT
    end_split = tl.cdiv(seq_len, SPLIT)
    if (query_len == 1) & (end_split - first_split > 1):
        d = tl.arange(0, BLOCK_D)
        largest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_D], tl.float32)
        row = (req.to(tl.int64) * HEADS + head) * max_splits
        one = tl.arange(0, 1)
        for split in tl.range(first_split, end_split, num_stages=4):
            at = row + split + one
            split_largest = tl.load(partial_stats + at * 2)
            split_total = tl.load(partial_stats + at * 2 + 1)
            split_acc = tl.load(partial_out + at[:, None] * BLOCK_D + d[None, :])
            largest, total, acc = _merge(largest, total, acc, split_largest, split_total, split_acc)
        if SINKS:
            sink = tl.load(sinks + head + one).to(tl.float32)
            nothing = tl.zeros_like(acc)
            largest, total, acc = _merge(largest, total, acc, sink, one + 1.0, nothing)
        to = out + token.to(tl.int64) * out_token_stride + head * out_head_stride
        tl.store(
            to + d[None, :] + one[:, None],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=(d < HEAD_SIZE)[None, :],
        )


def _block_d(head_size: int) -> int:
    return int(max(16, triton.next_power_of_2(head_size)))


def splits_floats(query: Tensor, num_reqs: int, max_splits: int) -> int:
    """Return the number of floats of the splits of a step's decode rows; `query` is [T, H, D]."""
    _, heads, head_size = query.shape
    return num_reqs * heads * max_splits * (_block_d(head_size) + 2)


def attention(
    query: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    format: int,
    one_query: bool,
    split: int,
    max_splits: int,
    programs: int,
    workspace: Tensor,
    block_m: int,
    upcast: bool,
) -> None:
    """Implement `AttentionBackend.forward`.

    Args:
        query: [T, H, D].
        kv_cache: [blocks, 2, block_size, KVH, D], dense; uint8 for a cache in FP8.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].
        block_table: int32 [R, blocks].
        out: [T, H, D], written.
        scale: factor of the logits.
        sliding_window: positions visible, or None.
        logits_soft_cap: or None.
        alibi_slopes: float32 [H], or None.
        sinks: [H] in the query's dtype, or None.
        format: format of the cache; see `octavo.kernels.triton.fp8`.
        one_query: True if each request has one query.
        split: number of positions of a split, a multiple of every tile.
        max_splits: number of splits of the longest context in the step.
            programs: number of programs that share the splits of a decode row and KV head; changes
                no bit.
        workspace: float32, at least `splits_floats` numbers if `programs` is above 1.
        block_m: maximum number of rows (queries times query heads of a KV head) of a program.
        upcast: multiply in float32. Triton's interpreter cannot multiply bfloat16.
    """
    tokens, heads, head_size = query.shape
    if tokens == 0:
        return
    num_reqs, kv_heads, page = seq_lens.shape[0], kv_cache.shape[3], kv_cache.shape[2]
    group = heads // kv_heads
    block_d = _block_d(head_size)
    # Limits of the registers and of 99 KiB of shared memory.
    match query.element_size() == 4, block_d > 128:
        case False, False:
            most_rows, block_n = 128, 64
        case True, True:
            most_rows, block_n = 32, 16
        case _:
            most_rows, block_n = 64, 32
    block_m = max(min(block_m, most_rows), triton.next_power_of_2(group))
    large = block_m > 64 or (block_m > 16 and (block_d > 128 or query.element_size() == 4))
    assert split % block_n == 0
    partial_out = partial_stats = workspace
    if programs > 1:
        assert len(workspace) >= splits_floats(query, num_reqs, max_splits)
        partial_stats = workspace[num_reqs * heads * max_splits * block_d :]
    window = sliding_window or 0
    tiles = num_reqs if one_query else tokens // (block_m // group) + num_reqs
    _attention[(tiles, kv_heads, programs)](
        out,
        query,
        kv_cache,
        query_start_loc,
        seq_lens,
        block_table,
        alibi_slopes if alibi_slopes is not None else out,
        sinks if sinks is not None else out,
        partial_out,
        partial_stats,
        scale,
        logits_soft_cap or 0.0,
        num_reqs,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        max_splits,
        ONE=one_query,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        PAGE=page,
        WINDOW=window,
        SOFT_CAP=logits_soft_cap is not None,
        ALIBI=alibi_slopes is not None,
        SINKS=sinks is not None,
        FP8=format,
        UPCAST=upcast,
        SPLIT=split,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=8 if large or format else 4,
        num_stages=2,
        enable_fp_fusion=False,
    )
    if programs > 1:
        _merge_splits[(num_reqs, heads)](
            out,
            query_start_loc,
            seq_lens,
            sinks if sinks is not None else out,
            partial_out,
            partial_stats,
            out.stride(0),
            out.stride(1),
            max_splits,
            HEADS=heads,
            HEAD_SIZE=head_size,
            WINDOW=window,
            SINKS=sinks is not None,
            SPLIT=split,
            BLOCK_D=block_d,
            num_warps=1,
            enable_fp_fusion=False,
        )
