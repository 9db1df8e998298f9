"""Causal attention over a paged KV cache.

Online softmax over tiles of the KV (Dao et al., "FlashAttention", algorithm 1; Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Tiles begin at absolute positions.
`prefill` computes requests with several queries: a program for each tile of queries.

`attention` computes decode rows, and all queries if a token must have the same bits decoded and
prefilled. It cuts the KV into splits that begin at absolute positions, too. A row's result merges
that of its splits, from first to last. Usually one program computes all splits of a row and merges
them. If a step has few rows, several programs share their splits to fill the GPU (Flash-Decoding),
and a second kernel merges them with the same arithmetic. So a row's bits depend neither on the
other rows nor on the sharing.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import fp8
from octavo.kernels.triton.activation import tanh

MOST_SPLITS = 256
"""Maximum number of splits of a row."""


@triton.jit
def _merge(largest, total, acc, split_largest, split_total, split_acc):
    """Merge two parts of a softmax; the first may be empty: -inf, 0, 0."""
    new = tl.maximum(largest, split_largest)
    base = tl.where(new == float("-inf"), 0.0, new)
    a = tl.exp(largest - base)
    b = tl.exp(split_largest - base)
    return new, total * a + split_total * b, acc * a[:, None] + split_acc * b[:, None]


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _to_numbers(
    x, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr, UPCAST: tl.constexpr, DTYPE: tl.constexpr
):
    if FP8:
        if NATIVE_FP8:
            x = x.to(tl.float8e4nv if FP8 == 1 else tl.float8e5, bitcast=True)
            # GPUs convert float16 to bfloat16 slowly, and both to float32 fast.
            x = x.to(tl.float16).to(tl.float32)
        else:
            x = fp8.decode(x, FP8)
    return x.to(tl.float32 if UPCAST else DTYPE)


@triton.jit
def _find_request(tile, query_start_loc, num_reqs, QUERIES: tl.constexpr):
    """Return the request of a tile: r's tiles begin at query_start_loc[r] // QUERIES + r.

    This leaves room for one partial tile in each request.
    """
    low = tl.full([], 0, tl.int32)
    high = low + num_reqs
    while low < high:
        middle = (low + high) // 2
        begins = tl.load(query_start_loc + middle) // QUERIES + middle
        if begins <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _prefill_tiles(
    largest,
    total,
    acc,
    q,
    cells,
    table,
    slopes,
    rows,
    positions,
    from_n,
    to_n,
    begin,
    end,
    factor,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Continue an online softmax with the KV from `from_n` to `to_n`; base 2.

    Without MASKED every row sees all of it. A masked position changes no bit: its weight is 0.
    """
    d = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    for tile_n in range(from_n, to_n, BLOCK_N):
        n = tile_n + lanes
        if MASKED:
            there = (n >= begin) & (n < end)
            blocks = tl.load(table + n // PAGE, mask=there, other=0).to(tl.int64)
        else:
            blocks = tl.load(table + n // PAGE).to(tl.int64)
        at = cells + blocks * (2 * PAGE * ROW) + (n % PAGE) * ROW
        k_at = at[None, :] + d[:, None]
        v_at = at[:, None] + PAGE * ROW + d[None, :]
        if MASKED or HEAD_SIZE < BLOCK_D:
            mask = d < HEAD_SIZE
            if MASKED:
                k = tl.load(k_at, mask=mask[:, None] & there[None, :], other=0)
                v = tl.load(v_at, mask=there[:, None] & mask[None, :], other=0)
            else:
                k = tl.load(k_at, mask=mask[:, None], other=0)
                v = tl.load(v_at, mask=mask[None, :], other=0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        k = _to_numbers(k, FP8, NATIVE_FP8, UPCAST, DTYPE)
        v = _to_numbers(v, FP8, NATIVE_FP8, UPCAST, DTYPE)
        logits = tl.dot(q, k, input_precision="ieee")
        if SOFT_CAP:
            logits = soft_cap * tanh(logits * scale / soft_cap)
        if ALIBI:
            if not SOFT_CAP:
                logits = logits * scale
            logits += slopes[:, None] * (n[None, :] - positions[:, None])
        if MASKED:
            distance = n[None, :] - positions[:, None]
            seen = rows[:, None] & (distance <= 0)
            if WINDOW:
                seen = seen & (distance > -WINDOW)
            if LOCAL_CHUNK:
                seen = seen & (n[None, :] >= (positions // LOCAL_CHUNK * LOCAL_CHUNK)[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        new = tl.maximum(largest, tl.max(logits, axis=1) * factor)
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(tl.math.fma(logits, factor, -base[:, None]))
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        largest = new
    return largest, total, acc


@triton.jit(do_not_specialize=["num_reqs"])  # it changes from step to step
def _prefill(
    out,
    query,
    kv_cache,
    query_start_loc,
    seq_lens,
    block_table,
    alibi_slopes,
    sinks,
    scale,
    soft_cap,
    num_reqs,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute a tile of queries of a request with several, with all query heads of one KV head.

    Grid: (KV heads, tiles). The last tiles, which see the most, start first.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    req = _find_request(tile, query_start_loc, num_reqs, QUERIES)
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    first_query = (tile - (start // QUERIES + req)) * QUERIES
    if (first_query < query_len) & (query_len > 1):
        context = tl.load(seq_lens + req) - query_len
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        queries = first_query + m // GROUP
        heads = kv_head * GROUP + m % GROUP
        rows = (m < QUERIES * GROUP) & (queries < query_len)
        at = rows[:, None] & (d < HEAD_SIZE)[None, :]
        tokens = (start + queries).to(tl.int64)
        q_at = query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride
        q = tl.load(q_at + d[None, :], mask=at, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        positions = context + queries
        first = context + first_query
        end = tl.minimum(first + QUERIES, context + query_len)
        begin = 0
        if WINDOW:
            begin = tl.maximum(0, first - WINDOW + 1)
        if LOCAL_CHUNK:
            begin = first // LOCAL_CHUNK * LOCAL_CHUNK
        slopes = rows
        if ALIBI:
            slopes = tl.load(alibi_slopes + heads, mask=rows, other=0.0)
        LOG2_E: tl.constexpr = 1.4426950408889634
        factor = LOG2_E if SOFT_CAP or ALIBI else scale * LOG2_E
        cells = kv_cache + kv_head * HEAD_SIZE
        table = block_table + req.to(tl.int64) * table_stride
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        from_n = begin // BLOCK_N * BLOCK_N
        ROW: tl.constexpr = KV_HEADS * HEAD_SIZE
        if WINDOW == 0 and LOCAL_CHUNK == 0:
            # All rows see the tiles before the first query's.
            whole = (first + 1) // BLOCK_N * BLOCK_N
            largest, total, acc = _prefill_tiles(
                largest,
                total,
                acc,
                q,
                cells,
                table,
                slopes,
                rows,
                positions,
                0,
                whole,
                begin,
                end,
                factor,
                scale,
                soft_cap,
                False,
                HEAD_SIZE,
                ROW,
                PAGE,
                WINDOW,
                LOCAL_CHUNK,
                SOFT_CAP,
                ALIBI,
                FP8,
                NATIVE_FP8,
                UPCAST,
                query.dtype.element_ty,
                BLOCK_N,
                BLOCK_D,
            )
            from_n = whole
        largest, total, acc = _prefill_tiles(
            largest,
            total,
            acc,
            q,
            cells,
            table,
            slopes,
            rows,
            positions,
            from_n,
            end,
            begin,
            end,
            factor,
            scale,
            soft_cap,
            True,
            HEAD_SIZE,
            ROW,
            PAGE,
            WINDOW,
            LOCAL_CHUNK,
            SOFT_CAP,
            ALIBI,
            FP8,
            NATIVE_FP8,
            UPCAST,
            query.dtype.element_ty,
            BLOCK_N,
            BLOCK_D,
        )
        if SINKS:
            sink = tl.load(sinks + heads, mask=rows, other=float("-inf")).to(tl.float32) * LOG2_E
            new = tl.maximum(largest, sink)
            base = tl.where(new == float("-inf"), 0.0, new)
            decay = tl.exp2(largest - base)
            total = total * decay + tl.exp2(sink - base)
            acc *= decay[:, None]
        # Rows without a query have a total of 0.
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        out_at = out + tokens[:, None] * out_token_stride + heads[:, None] * out_head_stride
        at = at & (d < VALUE_SIZE)[None, :]
        tl.store(out_at + d[None, :], result.to(out.dtype.element_ty), mask=at)


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
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
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
    first_query = 0
    if ROWS == "one":
        req = tile
        start = tile
        query_len = 1
    elif ROWS == "decode":
        req = tile
        start = tl.load(query_start_loc + req)
        query_len = tl.load(query_start_loc + req + 1) - start
        query_len = tl.where(query_len == 1, 1, 0)
    else:
        req = _find_request(tile, query_start_loc, num_reqs, QUERIES)
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
        if LOCAL_CHUNK:
            begin = (context + first_query) // LOCAL_CHUNK * LOCAL_CHUNK
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
                k = tl.load(at[None, :] + d[:, None], mask=dims[:, None] & there[None, :], other=0)
                k = _to_numbers(k, FP8, NATIVE_FP8, UPCAST, query.dtype.element_ty)
                logits = tl.dot(q, k, input_precision="ieee") * scale
                if SOFT_CAP:
                    logits = soft_cap * tanh(logits / soft_cap)
                distance = n[None, :] - positions[:, None]
                if ALIBI:
                    logits += slopes[:, None] * distance
                seen = rows[:, None] & (distance <= 0)
                if WINDOW:
                    seen = seen & (distance > -WINDOW)
                if LOCAL_CHUNK:
                    seen = seen & (n[None, :] >= (positions // LOCAL_CHUNK * LOCAL_CHUNK)[:, None])
                logits = tl.where(seen, logits, float("-inf"))
                new = tl.maximum(split_largest, tl.max(logits, axis=1))
                base = tl.where(new == float("-inf"), 0.0, new)
                p = tl.exp(logits - base[:, None])
                decay = tl.exp(split_largest - base)
                v = tl.load(
                    at[:, None] + PAGE * row_size + d[None, :],
                    mask=there[:, None] & dims[None, :],
                    other=0,
                )
                v = _to_numbers(v, FP8, NATIVE_FP8, UPCAST, query.dtype.element_ty)
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
                tl.store(partial_stats + at_split * 4, split_largest, mask=rows)
                tl.store(partial_stats + at_split * 4 + 1, split_total, mask=rows)
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
                mask=rows[:, None] & (d < VALUE_SIZE)[None, :],
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
    VALUE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
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
    if LOCAL_CHUNK:
        first_split = (seq_len - 1) // LOCAL_CHUNK * LOCAL_CHUNK // SPLIT
    end_split = tl.cdiv(seq_len, SPLIT)
    if (query_len == 1) & (end_split - first_split > 1):
        d = tl.arange(0, BLOCK_D)
        row = (req.to(tl.int64) * HEADS + head) * max_splits
        one = tl.arange(0, 1)
        # Weights of all splits, as `_merge` computes them one after another.
        lanes = tl.arange(0, MOST_SPLITS)
        stats = partial_stats + (row + first_split + lanes) * 4
        there = lanes < end_split - first_split
        own = tl.load(stats, mask=there, other=float("-inf"))
        before = tl.load(stats - 4, mask=there & (lanes > 0), other=float("-inf"))
        new = tl.associative_scan(own, 0, _maximum)
        base = tl.where(new == float("-inf"), 0.0, new)
        decay = tl.exp(tl.associative_scan(before, 0, _maximum) - base)
        tl.store(stats + 2, decay, mask=there)
        tl.store(stats + 3, tl.exp(own - base), mask=there)
        largest = tl.max(new, axis=0) + tl.zeros([1], tl.float32)
        tl.debug_barrier()
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_D], tl.float32)
        for chunk in range(first_split, end_split, CHUNK):
            # All loads of a chunk come first: none waits for another.
            totals = ()
            decays = ()
            weights = ()
            accs = ()
            for i in tl.static_range(CHUNK):
                mask = chunk + i + one < end_split
                at_split = row + chunk + i + one
                at = partial_stats + at_split * 4
                totals = totals + (tl.load(at + 1, mask=mask, other=0.0),)
                decays = decays + (tl.load(at + 2, mask=mask, other=1.0),)
                weights = weights + (tl.load(at + 3, mask=mask, other=0.0),)
                at = partial_out + at_split[:, None] * BLOCK_D + d[None, :]
                accs = accs + (tl.load(at, mask=mask[:, None], other=0.0),)
            for i in tl.static_range(CHUNK):
                total = total * decays[i] + totals[i] * weights[i]
                acc = acc * decays[i][:, None] + accs[i] * weights[i][:, None]
        if SINKS:
            sink = tl.load(sinks + head + one).to(tl.float32)
            nothing = tl.zeros_like(acc)
            largest, total, acc = _merge(largest, total, acc, sink, one + 1.0, nothing)
        to = out + token.to(tl.int64) * out_token_stride + head * out_head_stride
        tl.store(
            to + d[None, :] + one[:, None],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=(d < VALUE_SIZE)[None, :],
        )


def _block_d(head_size: int) -> int:
    return int(max(16, triton.next_power_of_2(head_size)))


def splits_floats(query: Tensor, num_reqs: int, max_splits: int) -> int:
    """Return the number of floats of the splits of a step's decode rows; `query` is [T, H, D]."""
    _, heads, head_size = query.shape
    return num_reqs * heads * max_splits * (_block_d(head_size) + 4)


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
    chunk_size: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    format: int,
    native_fp8: bool,
    upcast: bool,
    rows: Literal["tiles", "decode", "one"],
    split: int,
    max_splits: int,
    programs: int,
    workspace: Tensor,
    block_m: int,
) -> None:
    """Implement `AttentionBackend.forward` with splits of the KV.

    Args:
        query: [T, H, D].
        kv_cache: [blocks, 2, block_size, KVH, D], dense; uint8 for a cache in FP8.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].
        block_table: int32 [R, blocks].
        out: [T, H, V], written; V is the size of the values.
        scale: factor of the logits.
        sliding_window: positions visible, or None.
        chunk_size: positions of a chunk, or None.
        logits_soft_cap: or None.
        alibi_slopes: float32 [H], or None.
        sinks: [H] in the query's dtype, or None.
        format: format of the cache; see `octavo.kernels.triton.fp8`.
        native_fp8: True if the GPU converts FP8.
        upcast: multiply in float32. Triton's interpreter cannot multiply bfloat16.
        rows: "tiles": compute all queries. "decode": only those of requests with one query. "one":
            each request has one query.
        split: number of positions of a split, a multiple of every tile.
        max_splits: number of splits of the longest context in the step, up to `MOST_SPLITS`.
        programs: number of programs that share the splits of a decode row and KV head; changes no
            bit.
        workspace: float32, at least `splits_floats` numbers if `programs` is above 1.
        block_m: maximum number of rows (queries times query heads of a KV head) of a program.
    """
    tokens, heads, head_size = query.shape
    num_reqs, kv_heads, page = seq_lens.shape[0], kv_cache.shape[3], kv_cache.shape[2]
    group = heads // kv_heads
    block_d = _block_d(head_size)
    # Limits of the registers and of 99 KiB of shared memory.
    most_rows, block_n = _most(query, block_d)
    block_m = max(min(block_m, most_rows), triton.next_power_of_2(group))
    large = block_m > 64 or (block_m > 16 and (block_d > 128 or query.element_size() == 4))
    assert split % block_n == 0
    assert max_splits <= MOST_SPLITS
    partial_out = partial_stats = workspace
    if programs > 1:
        assert len(workspace) >= splits_floats(query, num_reqs, max_splits)
        partial_stats = workspace[num_reqs * heads * max_splits * block_d :]
    window = sliding_window or 0
    tiles = tokens // (block_m // group) + num_reqs if rows == "tiles" else num_reqs
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
        ROWS=rows,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        VALUE_SIZE=out.shape[2],
        PAGE=page,
        WINDOW=window,
        LOCAL_CHUNK=chunk_size or 0,
        SOFT_CAP=logits_soft_cap is not None,
        ALIBI=alibi_slopes is not None,
        SINKS=sinks is not None,
        FP8=format,
        NATIVE_FP8=native_fp8,
        UPCAST=upcast,
        SPLIT=split,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=8 if large else 4,
        num_stages=3 if programs == 1 and block_m == 16 and block_d <= 128 else 2,
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
            VALUE_SIZE=out.shape[2],
            WINDOW=window,
            LOCAL_CHUNK=chunk_size or 0,
            SINKS=sinks is not None,
            SPLIT=split,
            BLOCK_D=block_d,
            MOST_SPLITS=MOST_SPLITS,
            CHUNK=32 if block_d <= 128 else 16,
            num_warps=1,
            enable_fp_fusion=False,
        )


def _most(query: Tensor, block_d: int) -> tuple[int, int]:
    """Return limits of the rows and of the KV of a tile."""
    match query.element_size() == 4, block_d > 128:
        case False, False:
            return 128, 64
        case True, True:
            return 32, 16
        case _:
            return 64, 32


def prefill(
    query: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    chunk_size: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    format: int,
    native_fp8: bool,
    upcast: bool,
) -> None:
    """Compute the attention of requests with several queries; see `attention` for the arguments."""
    tokens, heads, head_size = query.shape
    num_reqs, kv_heads, page = seq_lens.shape[0], kv_cache.shape[3], kv_cache.shape[2]
    group = heads // kv_heads
    block_d = _block_d(head_size)
    most_rows, block_n = _most(query, block_d)
    block_m = max(min(most_rows, 64), triton.next_power_of_2(group))
    _prefill[(kv_heads, tokens // (block_m // group) + num_reqs)](
        out,
        query,
        kv_cache,
        query_start_loc,
        seq_lens,
        block_table,
        alibi_slopes if alibi_slopes is not None else out,
        sinks if sinks is not None else out,
        scale,
        logits_soft_cap or 0.0,
        num_reqs,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        VALUE_SIZE=out.shape[2],
        PAGE=page,
        WINDOW=sliding_window or 0,
        LOCAL_CHUNK=chunk_size or 0,
        SOFT_CAP=logits_soft_cap is not None,
        ALIBI=alibi_slopes is not None,
        SINKS=sinks is not None,
        FP8=format,
        NATIVE_FP8=native_fp8,
        UPCAST=upcast,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=4 if block_m <= 64 and query.element_size() == 2 else 8,
        num_stages=2,
        enable_fp_fusion=False,
    )
