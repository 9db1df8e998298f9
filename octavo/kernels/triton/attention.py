"""Attention over a paged KV cache.

Online softmax over tiles of the KV (Dao et al., "FlashAttention", algorithm 1; Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Tiles begin at absolute positions.
`prefill` computes requests with several queries: a program for each tile of queries.

`attention` computes decode rows, and all queries if a token must have the same bits decoded and
prefilled. It cuts the KV into splits that begin at absolute positions, too. The results of a row's
splits are merged from first to last. Usually one program computes all splits of a row and merges
them. If a step has few rows, several programs share the splits of a row to fill the GPU
(Flash-Decoding), and a second kernel merges them with the same arithmetic. So a row's bits depend
neither on the other rows nor on the sharing.

Latents (see `AttentionBackend.attend_latents`) are one head of keys, whose first numbers are the
value: one load of a tile gives keys and values. Query heads are divided into groups, each with a
program. Keys are multiplied in two parts, the value and the rest, so that neither part is padded by
much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import fp8
from octavo.kernels.triton.activation import tanh

MOST_SPLITS = 256
"""Maximum number of splits of a row."""


@triton.jit
def _merge(largest, total, acc, split_largest, split_total, split_acc):
    """Merge two parts of a softmax in base 2; the first may be empty: -inf, 0, 0."""
    new = tl.maximum(largest, split_largest)
    base = tl.where(new == float("-inf"), 0.0, new)
    a = tl.exp2(largest - base)
    b = tl.exp2(split_largest - base)
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
def _tiles(
    largest,
    total,
    acc,
    q,
    q_rest,
    cells,
    table,
    slopes,
    biases,
    query_products,
    key_products,
    product_columns,
    products_stride,
    rows,
    positions,
    begins,
    ends,
    from_n,
    to_n,
    begin,
    end,
    factor,
    scale,
    soft_cap,
    MASKED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    REST: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS_DISTANCE: tl.constexpr,
    PRODUCT_DISTANCE: tl.constexpr,
    QUERY_PRODUCTS: tl.constexpr,
    KEY_PRODUCTS: tl.constexpr,
    RANGES: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Continue an online softmax with the KV from `from_n` to `to_n`; base 2.

    Without MASKED every row sees all of it. A masked position changes no bit: its weight is 0.
    With REST the cache has latents of HEAD_SIZE and REST numbers; None: keys and values.
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
        at = cells + blocks * BLOCK_STRIDE + (n % PAGE) * ROW
        k_at = at[None, :] + d[:, None]
        if MASKED or HEAD_SIZE < BLOCK_D:
            mask = (d < HEAD_SIZE)[:, None]
            if MASKED:
                mask = mask & there[None, :]
            k = tl.load(k_at, mask=mask, other=0)
        else:
            k = tl.load(k_at)
        k = _to_numbers(k, FP8, NATIVE_FP8, UPCAST, DTYPE)
        logits = tl.dot(q, k, input_precision="ieee")
        if REST:
            more = tl.arange(0, BLOCK_REST)
            mask = (more < REST)[:, None]
            if MASKED:
                mask = mask & there[None, :]
            rest = tl.load(at[None, :] + HEAD_SIZE + more[:, None], mask=mask, other=0)
            rest = _to_numbers(rest, FP8, NATIVE_FP8, UPCAST, DTYPE)
            logits = tl.dot(q_rest, rest, logits, input_precision="ieee")
        if REST is not None:
            v = tl.trans(k)
        else:
            v_at = at[:, None] + PAGE * ROW + d[None, :]
            if MASKED or HEAD_SIZE < BLOCK_D:
                mask = (d < HEAD_SIZE)[None, :]
                if MASKED:
                    mask = mask & there[:, None]
                v = tl.load(v_at, mask=mask, other=0)
            else:
                v = tl.load(v_at)
            v = _to_numbers(v, FP8, NATIVE_FP8, UPCAST, DTYPE)
        distance = n[None, :] - positions[:, None]
        if PRODUCT_DISTANCE is not None:
            near = tl.minimum(tl.maximum(distance, -PRODUCT_DISTANCE), PRODUCT_DISTANCE)
            column = tl.load(product_columns + PRODUCT_DISTANCE + near)
            mask = rows[:, None] & (n < end)[None, :]
            if QUERY_PRODUCTS:
                own = query_products[:, None] + column
                logits += tl.load(own, mask=mask, other=0.0).to(tl.float32)
            if KEY_PRODUCTS:
                others = key_products[:, None] + n[None, :].to(tl.int64) * products_stride + column
                logits += tl.load(others, mask=mask, other=0.0).to(tl.float32)
        if SOFT_CAP:
            logits = soft_cap * tanh(logits * scale / soft_cap)
        if (ALIBI or BIAS_DISTANCE is not None) and not SOFT_CAP:
            logits = logits * scale
        if ALIBI:
            logits += slopes[:, None] * (distance if CAUSAL else -tl.abs(distance))
        if BIAS_DISTANCE is not None:
            near = tl.minimum(tl.maximum(distance, -BIAS_DISTANCE), BIAS_DISTANCE)
            logits += tl.load(biases[:, None] + near)
        if MASKED:
            seen = rows[:, None] & (distance <= 0 if CAUSAL else there[None, :])
            if WINDOW:
                seen = seen & (distance > -WINDOW)
                if not CAUSAL:
                    seen = seen & (distance < WINDOW)
            if LOCAL_CHUNK:
                seen = seen & (n[None, :] >= (positions // LOCAL_CHUNK * LOCAL_CHUNK)[:, None])
            if RANGES:
                seen = seen | ((n[None, :] >= begins[:, None]) & (n[None, :] < ends[:, None]))
            logits = tl.where(seen, logits, float("-inf"))
        new = tl.maximum(largest, tl.max(logits, axis=1) * factor)
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(tl.math.fma(logits, factor, -base[:, None]))
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        largest = new
    return largest, total, acc


@triton.jit
def _end(end_row, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the end of the positions that rows before position `end_row` see."""
    if CAUSAL:
        end = tl.minimum(end_row, length)
    elif WINDOW:
        end = tl.minimum(end_row + WINDOW - 1, length)
    else:
        end = length
    return end


@triton.jit
def _ranges(ranges, tokens, positions, length, rows):
    """Return the begins and ends of what rows also see: their ranges, or nothing.

    See `AttentionParams`. A row without a query has the begin and the end 0.
    """
    begins = tl.load(ranges + tokens * 2, mask=rows, other=0)
    ends = tl.load(ranges + tokens * 2 + 1, mask=rows, other=0)
    begins = tl.maximum(tl.minimum(begins, positions + 1), 0)
    ends = tl.minimum(tl.maximum(ends, positions + 1), length)
    return tl.where(rows, begins, 0), tl.where(rows, ends, 0)


@triton.jit
def _seen(
    ranges,
    tokens,
    positions,
    first,
    length,
    rows,
    QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    RANGES: tl.constexpr,
):
    """Return what the rows of a tile see, whose first query has the position `first`.

    Returns:
        The begin and the end of all that they see, and the begins and the ends of each row's own
        range (with RANGES; else they are unused).
    """
    end = _end(first + QUERIES, length, CAUSAL, WINDOW)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, first - WINDOW + 1)
    if LOCAL_CHUNK:
        begin = first // LOCAL_CHUNK * LOCAL_CHUNK
    begins = positions
    ends = positions
    if RANGES:
        begins, ends = _ranges(ranges, tokens, positions, length, rows)
        begin = tl.minimum(begin, tl.min(tl.where(rows, begins, length), axis=0))
        end = tl.maximum(end, tl.max(ends, axis=0))
    return begin, end, begins, ends


@triton.jit
def _queries(at, rows, SIZE: tl.constexpr, UPCAST: tl.constexpr, BLOCK: tl.constexpr):
    """Load the first numbers of queries at the addresses [M, 1]."""
    d = tl.arange(0, BLOCK)
    q = tl.load(at + d[None, :], mask=rows[:, None] & (d < SIZE)[None, :], other=0.0)
    return q.to(tl.float32) if UPCAST else q


@triton.jit
def _finish(
    out_at,
    largest,
    total,
    acc,
    sinks,
    heads,
    rows,
    VALUE_SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the sinks, divide by the total, and store rows at the addresses [M, 1]."""
    if SINKS:
        LOG2_E: tl.constexpr = 1.4426950408889634
        sink = tl.load(sinks + heads, mask=rows, other=float("-inf")).to(tl.float32) * LOG2_E
        one = tl.where(rows, 1.0, 0.0)
        largest, total, acc = _merge(largest, total, acc, sink, one, tl.zeros_like(acc))
    # Rows without a query have a total of 0.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    d = tl.arange(0, BLOCK_D)
    mask = rows[:, None] & (d < VALUE_SIZE)[None, :]
    tl.store(out_at + d[None, :], result.to(out_at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_reqs"])  # it changes from step to step
def _prefill(
    out,
    query,
    kv_cache,
    query_start_loc,
    seq_lens,
    block_table,
    alibi_slopes,
    position_bias,
    query_products,
    key_products,
    product_columns,
    products_stride,
    products_head_stride,
    ranges,
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
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    REST: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS_DISTANCE: tl.constexpr,
    PRODUCT_DISTANCE: tl.constexpr,
    QUERY_PRODUCTS: tl.constexpr,
    KEY_PRODUCTS: tl.constexpr,
    RANGES: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
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
        length = tl.load(seq_lens + req)
        context = length - query_len if CAUSAL else 0
        m = tl.arange(0, BLOCK_M)
        queries = first_query + m // GROUP
        heads = kv_head * GROUP + m % GROUP
        rows = (m < QUERIES * GROUP) & (queries < query_len)
        tokens = (start + queries).to(tl.int64)
        q_at = query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride
        q = _queries(q_at, rows, HEAD_SIZE, UPCAST, BLOCK_D)
        q_rest = q
        if REST:
            q_rest = _queries(q_at + HEAD_SIZE, rows, REST, UPCAST, BLOCK_REST)
        positions = context + queries
        first = context + first_query
        begin, end, begins, ends = _seen(
            ranges,
            tokens,
            positions,
            first,
            length,
            rows,
            QUERIES,
            CAUSAL,
            WINDOW,
            LOCAL_CHUNK,
            RANGES,
        )
        slopes = rows
        if ALIBI:
            slopes = tl.load(alibi_slopes + heads, mask=rows, other=0.0)
        biases = rows
        if BIAS_DISTANCE is not None:
            biases = position_bias + heads * (2 * BIAS_DISTANCE + 1) + BIAS_DISTANCE
        own_products = rows
        text_products = rows
        if QUERY_PRODUCTS:
            own_products = query_products + tokens * products_stride + heads * products_head_stride
        if KEY_PRODUCTS:
            text = key_products + (start - context).to(tl.int64) * products_stride
            text_products = text + heads * products_head_stride
        LOG2_E: tl.constexpr = 1.4426950408889634
        factor = LOG2_E if SOFT_CAP or ALIBI or BIAS_DISTANCE is not None else scale * LOG2_E
        cells = kv_cache
        if REST is None:
            cells += kv_head * HEAD_SIZE
        table = block_table + req.to(tl.int64) * table_stride
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        from_n = begin // BLOCK_N * BLOCK_N
        if WINDOW == 0 and LOCAL_CHUNK == 0:
            # All rows see the tiles before the first query's, or before the end.
            whole = (first + 1 if CAUSAL else end) // BLOCK_N * BLOCK_N
            largest, total, acc = _tiles(
                largest,
                total,
                acc,
                q,
                q_rest,
                cells,
                table,
                slopes,
                biases,
                own_products,
                text_products,
                product_columns,
                products_stride,
                rows,
                positions,
                begins,
                ends,
                0,
                whole,
                begin,
                end,
                factor,
                scale,
                soft_cap,
                False,
                HEAD_SIZE,
                REST,
                ROW,
                BLOCK_STRIDE,
                PAGE,
                CAUSAL,
                WINDOW,
                LOCAL_CHUNK,
                SOFT_CAP,
                ALIBI,
                BIAS_DISTANCE,
                PRODUCT_DISTANCE,
                QUERY_PRODUCTS,
                KEY_PRODUCTS,
                RANGES,
                FP8,
                NATIVE_FP8,
                UPCAST,
                query.dtype.element_ty,
                BLOCK_N,
                BLOCK_D,
                BLOCK_REST,
            )
            from_n = whole
        largest, total, acc = _tiles(
            largest,
            total,
            acc,
            q,
            q_rest,
            cells,
            table,
            slopes,
            biases,
            own_products,
            text_products,
            product_columns,
            products_stride,
            rows,
            positions,
            begins,
            ends,
            from_n,
            end,
            begin,
            end,
            factor,
            scale,
            soft_cap,
            True,
            HEAD_SIZE,
            REST,
            ROW,
            BLOCK_STRIDE,
            PAGE,
            CAUSAL,
            WINDOW,
            LOCAL_CHUNK,
            SOFT_CAP,
            ALIBI,
            BIAS_DISTANCE,
            PRODUCT_DISTANCE,
            QUERY_PRODUCTS,
            KEY_PRODUCTS,
            RANGES,
            FP8,
            NATIVE_FP8,
            UPCAST,
            query.dtype.element_ty,
            BLOCK_N,
            BLOCK_D,
            BLOCK_REST,
        )
        out_at = out + tokens[:, None] * out_token_stride + heads[:, None] * out_head_stride
        _finish(out_at, largest, total, acc, sinks, heads, rows, VALUE_SIZE, SINKS, BLOCK_D)


@triton.jit(do_not_specialize=["num_reqs", "max_splits"])  # they change from step to step
def _attention(
    out,
    query,
    kv_cache,
    query_start_loc,
    seq_lens,
    block_table,
    alibi_slopes,
    position_bias,
    query_products,
    key_products,
    product_columns,
    products_stride,
    products_head_stride,
    ranges,
    sinks,
    scale,
    soft_cap,
    num_reqs,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    partial_out,
    partial_stats,
    max_splits,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    REST: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS_DISTANCE: tl.constexpr,
    PRODUCT_DISTANCE: tl.constexpr,
    QUERY_PRODUCTS: tl.constexpr,
    KEY_PRODUCTS: tl.constexpr,
    RANGES: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
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
        length = tl.load(seq_lens + req)
        context = length - query_len if CAUSAL else 0
        m = tl.arange(0, BLOCK_M)
        queries = first_query + m // GROUP
        heads = kv_head * GROUP + m % GROUP
        rows = (m < QUERIES * GROUP) & (queries < query_len)
        tokens = (start + queries).to(tl.int64)
        q_at = query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride
        q = _queries(q_at, rows, HEAD_SIZE, UPCAST, BLOCK_D)
        q_rest = q
        if REST:
            q_rest = _queries(q_at + HEAD_SIZE, rows, REST, UPCAST, BLOCK_REST)
        positions = context + queries
        begin, end, begins, ends = _seen(
            ranges,
            tokens,
            positions,
            context + first_query,
            length,
            rows,
            QUERIES,
            CAUSAL,
            WINDOW,
            LOCAL_CHUNK,
            RANGES,
        )
        first_split = begin // SPLIT
        end_split = tl.cdiv(end, SPLIT)
        programs = tl.num_programs(2)
        shared = (query_len == 1) & (programs > 1) & (end_split - first_split > 1)
        my_split = first_split + tl.program_id(2)
        if not shared:
            # The first program computes all splits.
            my_split = tl.where(tl.program_id(2) == 0, first_split, end_split)
            programs = 1
        slopes = rows
        if ALIBI:
            slopes = tl.load(alibi_slopes + heads, mask=rows, other=0.0)
        biases = rows
        if BIAS_DISTANCE is not None:
            biases = position_bias + heads * (2 * BIAS_DISTANCE + 1) + BIAS_DISTANCE
        own_products = rows
        text_products = rows
        if QUERY_PRODUCTS:
            own_products = query_products + tokens * products_stride + heads * products_head_stride
        if KEY_PRODUCTS:
            text = key_products + (start - context).to(tl.int64) * products_stride
            text_products = text + heads * products_head_stride
        LOG2_E: tl.constexpr = 1.4426950408889634
        factor = LOG2_E if SOFT_CAP or ALIBI or BIAS_DISTANCE is not None else scale * LOG2_E
        cells = kv_cache
        if REST is None:
            cells += kv_head * HEAD_SIZE
        table = block_table + req.to(tl.int64) * table_stride
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for split in range(my_split, end_split, programs):
            split_largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            split_total = tl.zeros([BLOCK_M], tl.float32)
            split_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            from_n = tl.maximum(split * SPLIT, begin // BLOCK_N * BLOCK_N)
            to_n = tl.minimum(split * SPLIT + SPLIT, end)
            split_largest, split_total, split_acc = _tiles(
                split_largest,
                split_total,
                split_acc,
                q,
                q_rest,
                cells,
                table,
                slopes,
                biases,
                own_products,
                text_products,
                product_columns,
                products_stride,
                rows,
                positions,
                begins,
                ends,
                from_n,
                to_n,
                begin,
                end,
                factor,
                scale,
                soft_cap,
                True,
                HEAD_SIZE,
                REST,
                ROW,
                BLOCK_STRIDE,
                PAGE,
                CAUSAL,
                WINDOW,
                LOCAL_CHUNK,
                SOFT_CAP,
                ALIBI,
                BIAS_DISTANCE,
                PRODUCT_DISTANCE,
                QUERY_PRODUCTS,
                KEY_PRODUCTS,
                RANGES,
                FP8,
                NATIVE_FP8,
                UPCAST,
                query.dtype.element_ty,
                BLOCK_N,
                BLOCK_D,
                BLOCK_REST,
            )
            if shared:
                num_heads = tl.num_programs(1) * GROUP
                at_split = (req.to(tl.int64) * num_heads + heads) * max_splits + split
                d = tl.arange(0, BLOCK_D)
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
            out_at = out + tokens[:, None] * out_token_stride + heads[:, None] * out_head_stride
            _finish(out_at, largest, total, acc, sinks, heads, rows, VALUE_SIZE, SINKS, BLOCK_D)


@triton.jit(do_not_specialize=["max_splits"])
def _merge_splits(
    out,
    query_start_loc,
    seq_lens,
    ranges,
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
    RANGES: tl.constexpr,
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
    if RANGES:
        begin = tl.maximum(tl.load(ranges + token.to(tl.int64) * 2), 0)
        first_split = tl.minimum(first_split, begin // SPLIT)
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
        decay = tl.exp2(tl.associative_scan(before, 0, _maximum) - base)
        tl.store(stats + 2, decay, mask=there)
        tl.store(stats + 3, tl.exp2(own - base), mask=there)
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
        to = out + token.to(tl.int64) * out_token_stride + head * out_head_stride
        rows = one == 0
        _finish(
            to + one[:, None],
            largest,
            total,
            acc,
            sinks,
            head + one,
            rows,
            VALUE_SIZE,
            SINKS,
            BLOCK_D,
        )


def _block_d(head_size: int) -> int:
    return int(max(16, triton.next_power_of_2(head_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Arguments of `attention` and `prefill`.

    Attributes:
        query: [T, H, D].
        kv_cache: [blocks, 2, block_size, KVH, D], or latents [blocks, block_size, D], with any
            stride of blocks; uint8 for a cache in FP8.
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
        causal: False: rows see all positions of their requests.
        position_bias: float32 [H, 2 * D + 1], contiguous, or None.
        product_columns: int32 [2 * D + 1], or None; see `octavo.attention.base.DistanceProducts`.
        query_products: [T, H, C], contiguous, or None.
        key_products: [T, H, C], contiguous, or None.
        ranges: int32 [T, 2], contiguous, or None; see `octavo.attention.base.AttentionMetadata`.
        format: format of the cache; see `octavo.kernels.triton.fp8`.
        native_fp8: True if the GPU converts FP8.
        upcast: multiply in float32. Triton's interpreter cannot multiply bfloat16.
    """

    query: Tensor
    kv_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    out: Tensor
    scale: float
    sliding_window: int | None = None
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    causal: bool = True
    position_bias: Tensor | None = None
    product_columns: Tensor | None = None
    query_products: Tensor | None = None
    key_products: Tensor | None = None
    ranges: Tensor | None = None
    format: int
    native_fp8: bool
    upcast: bool

    @property
    def latent(self) -> bool:
        """True if the cache has latents."""
        return self.kv_cache.dim() == 3

    @property
    def head_size(self) -> int:
        """Number of elements of a key, or of those of a latent that are the value."""
        return (self.out if self.latent else self.query).shape[2]

    def splits_floats(self, max_splits: int) -> int:
        """Return the number of floats of the splits of the step's decode rows."""
        rows = self.seq_lens.shape[0] * self.out.shape[1]
        return rows * max_splits * (_block_d(self.head_size) + 4)

    @property
    def groups(self) -> int:
        """Number of the programs that compute a query: KV heads, or groups of query heads."""
        if not self.latent:
            return self.kv_cache.shape[3]
        heads, most = self.query.shape[1], self.most[0]
        return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= most)

    @property
    def most(self) -> tuple[int, int]:
        """Limits of the rows and of the KV of a tile.

        They are those of the registers and of 99 KiB of shared memory.
        """
        wide, block_d = self.query.element_size() == 4, _block_d(self.head_size)
        if block_d > 256:
            return (16, 16) if wide else (32, 16)
        match wide, block_d > 128:
            case False, False:
                return 128, 64
            case True, True:
                return 32, 16
            case _:
                return 64, 32

    def arguments(self, block_m: int) -> dict[str, Any]:
        """Return the arguments that both kernels have; `block_m` is the number of rows."""
        query, out, cache = self.query, self.out, self.kv_cache
        head_size, size = self.head_size, query.shape[2]
        page = cache.shape[1 if self.latent else 2]
        return {
            "out": out,
            "query": query,
            "kv_cache": cache,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "alibi_slopes": out if self.alibi_slopes is None else self.alibi_slopes,
            "position_bias": out if self.position_bias is None else self.position_bias,
            **self._products(),
            "ranges": out if self.ranges is None else self.ranges,
            "sinks": out if self.sinks is None else self.sinks,
            "scale": self.scale,
            "soft_cap": self.logits_soft_cap or 0.0,
            "num_reqs": self.seq_lens.shape[0],
            "query_token_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "out_token_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            "table_stride": self.block_table.stride(0),
            "GROUP": query.shape[1] // self.groups,
            "HEAD_SIZE": head_size,
            "VALUE_SIZE": out.shape[2],
            "REST": size - head_size if self.latent else None,
            "ROW": size if self.latent else self.groups * size,
            "BLOCK_STRIDE": cache.stride(0),
            "PAGE": page,
            "CAUSAL": self.causal,
            "WINDOW": self.sliding_window or 0,
            "LOCAL_CHUNK": self.chunk_size or 0,
            "SOFT_CAP": self.logits_soft_cap is not None,
            "ALIBI": self.alibi_slopes is not None,
            "BIAS_DISTANCE": None
            if self.position_bias is None
            else self.position_bias.shape[1] // 2,
            "RANGES": self.ranges is not None,
            "SINKS": self.sinks is not None,
            "FP8": self.format,
            "NATIVE_FP8": self.native_fp8,
            "UPCAST": self.upcast,
            "BLOCK_M": block_m,
            "BLOCK_N": self.most[1],
            "BLOCK_D": _block_d(head_size),
            "BLOCK_REST": _block_d(size - head_size),
            "enable_fp_fusion": False,
        }

    def _products(self) -> dict[str, Any]:
        """Return the arguments for products with vectors of distances."""
        given = self.query_products, self.key_products
        some = next((products for products in given if products is not None), self.out)
        columns = self.product_columns
        return {
            "query_products": some if given[0] is None else given[0],
            "key_products": some if given[1] is None else given[1],
            "product_columns": self.out if columns is None else columns,
            "products_stride": some.stride(0),
            "products_head_stride": some.stride(1),
            "PRODUCT_DISTANCE": None if columns is None else len(columns) // 2,
            "QUERY_PRODUCTS": given[0] is not None,
            "KEY_PRODUCTS": given[1] is not None,
        }


def attention(
    step: Step,
    *,
    rows: Literal["tiles", "decode", "one"],
    split: int,
    max_splits: int,
    programs: int,
    workspace: Tensor,
    block_m: int,
) -> None:
    """Implement `AttentionBackend.forward` with splits of the KV.

    Args:
        step: the other arguments.
        rows: "tiles": compute all queries. "decode": only those of requests with one query. "one":
            each request has one query.
        split: number of positions of a split, a multiple of every tile.
        max_splits: number of splits of the longest context in the step, up to `MOST_SPLITS`.
        programs: number of programs that share the splits of a decode row and KV head; changes no
            bit.
        workspace: float32, at least `Step.splits_floats` numbers if `programs` is above 1.
        block_m: maximum number of rows (queries times query heads of a KV head) of a program.
    """
    query, out = step.query, step.out
    tokens, heads, value_size = out.shape
    num_reqs, groups = step.seq_lens.shape[0], step.groups
    group, block_d = heads // groups, _block_d(step.head_size)
    most_rows, block_n = step.most
    block_m = max(min(block_m, most_rows), triton.next_power_of_2(group))
    large = block_m > 64 or (block_m > 16 and (block_d > 128 or query.element_size() == 4))
    large = large or block_d > 256
    assert split % block_n == 0
    assert max_splits <= MOST_SPLITS
    partial_out = partial_stats = workspace
    if programs > 1:
        assert len(workspace) >= step.splits_floats(max_splits)
        partial_stats = workspace[num_reqs * heads * max_splits * block_d :]
    tiles = tokens // (block_m // group) + num_reqs if rows == "tiles" else num_reqs
    _attention[(tiles, groups, programs)](
        partial_out=partial_out,
        partial_stats=partial_stats,
        max_splits=max_splits,
        ROWS=rows,
        SPLIT=split,
        num_warps=8 if large else 4,
        num_stages=3 if programs == 1 and block_m == 16 and block_d <= 128 else 2,
        **step.arguments(block_m),
    )
    if programs > 1:
        _merge_splits[(num_reqs, heads)](
            out,
            step.query_start_loc,
            step.seq_lens,
            out if step.ranges is None else step.ranges,
            out if step.sinks is None else step.sinks,
            partial_out,
            partial_stats,
            out.stride(0),
            out.stride(1),
            max_splits,
            HEADS=heads,
            VALUE_SIZE=value_size,
            WINDOW=step.sliding_window or 0,
            LOCAL_CHUNK=step.chunk_size or 0,
            RANGES=step.ranges is not None,
            SINKS=step.sinks is not None,
            SPLIT=split,
            BLOCK_D=block_d,
            MOST_SPLITS=MOST_SPLITS,
            CHUNK=min(32, 4096 // block_d),
            num_warps=1,
            enable_fp_fusion=False,
        )


def prefill(step: Step) -> None:
    """Compute the attention of requests with several queries."""
    query = step.query
    tokens, heads, _ = query.shape
    groups = step.groups
    block_m = max(min(step.most[0], 64), triton.next_power_of_2(heads // groups))
    few = block_m <= 64 and query.element_size() == 2 and not step.latent
    _prefill[(groups, tokens // (block_m // (heads // groups)) + step.seq_lens.shape[0])](
        num_warps=4 if few else 8,
        num_stages=2,
        **step.arguments(block_m),
    )
