"""Attention over a paged KV cache of requests with several queries.

A program computes a tile of queries; see `attention_tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.attention_step import Step
from octavo.kernels.triton.attention_tiles import (
    attend_tiles,
    find_request,
    find_seen,
    finish,
    load_queries,
)


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
    req = find_request(tile, query_start_loc, num_reqs, QUERIES)
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
        q = load_queries(q_at, rows, HEAD_SIZE, UPCAST, BLOCK_D)
        q_rest = q
        if REST:
            q_rest = load_queries(q_at + HEAD_SIZE, rows, REST, UPCAST, BLOCK_REST)
        positions = context + queries
        first = context + first_query
        begin, end, begins, ends = find_seen(
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
            largest, total, acc = attend_tiles(
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
        largest, total, acc = attend_tiles(
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
        finish(out_at, largest, total, acc, sinks, heads, rows, VALUE_SIZE, SINKS, BLOCK_D)


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
