"""Attention over a paged KV cache of decode rows, and of all queries with the same bits.

`attention` computes decode rows, and all queries if a token must have the same bits decoded and
prefilled. It cuts the KV into splits that begin at absolute positions, as tiles do
(`attention_tiles`). The results of a row's splits are merged from first to last. Usually one
program computes all splits of a row and merges them. If a step has few rows, several programs share
the splits of a row to fill the GPU (Flash-Decoding), and a second kernel merges them with the same
arithmetic. So a row's bits depend neither on the other rows nor on the sharing.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.attention_step import Step, block_d
from octavo.kernels.triton.attention_tiles import (
    attend_tiles,
    find_request,
    find_seen,
    finish,
    load_queries,
    merge,
)

MOST_SPLITS = 256
"""Maximum number of splits of a row."""


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


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
        req = find_request(tile, query_start_loc, num_reqs, QUERIES)
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
        q = load_queries(q_at, rows, HEAD_SIZE, UPCAST, BLOCK_D)
        q_rest = q
        if REST:
            q_rest = load_queries(q_at + HEAD_SIZE, rows, REST, UPCAST, BLOCK_REST)
        positions = context + queries
        begin, end, begins, ends = find_seen(
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
            split_largest, split_total, split_acc = attend_tiles(
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
                largest, total, acc = merge(
                    largest, total, acc, split_largest, split_total, split_acc
                )
        if (not shared) & (tl.program_id(2) == 0):
            out_at = out + tokens[:, None] * out_token_stride + heads[:, None] * out_head_stride
            finish(out_at, largest, total, acc, sinks, heads, rows, VALUE_SIZE, SINKS, BLOCK_D)


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
        # Weights of all splits, as `merge` computes them one after another.
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
        finish(
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
    group, lanes = heads // groups, block_d(step.head_size)
    most_rows, block_n = step.most
    block_m = max(min(block_m, most_rows), triton.next_power_of_2(group))
    large = block_m > 64 or (block_m > 16 and (lanes > 128 or query.element_size() == 4))
    large = large or lanes > 256
    assert split % block_n == 0
    assert max_splits <= MOST_SPLITS
    partial_out = partial_stats = workspace
    if programs > 1:
        assert len(workspace) >= step.splits_floats(max_splits)
        partial_stats = workspace[num_reqs * heads * max_splits * lanes :]
    tiles = tokens // (block_m // group) + num_reqs if rows == "tiles" else num_reqs
    _attention[(tiles, groups, programs)](
        partial_out=partial_out,
        partial_stats=partial_stats,
        max_splits=max_splits,
        ROWS=rows,
        SPLIT=split,
        num_warps=8 if large else 4,
        num_stages=3 if programs == 1 and block_m == 16 and lanes <= 128 else 2,
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
            BLOCK_D=lanes,
            MOST_SPLITS=MOST_SPLITS,
            CHUNK=min(32, 4096 // lanes),
            num_warps=1,
            enable_fp_fusion=False,
        )
