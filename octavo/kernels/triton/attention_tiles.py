"""Parts of the attention kernels: rows of queries against tiles of the KV cache.

Online softmax over tiles of the KV (Dao et al., "FlashAttention", algorithm 1; Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Tiles begin at absolute positions.

Latents (see `AttentionBackend.attend_latents`) are one head of keys, whose first numbers are the
value: one load of a tile gives keys and values. Query heads are divided into groups, each with a
program. Keys are multiplied in two parts, the value and the rest, so that neither part is padded by
much.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton import fp8
from octavo.kernels.triton.activation import tanh


@triton.jit
def merge(largest, total, acc, split_largest, split_total, split_acc):
    """Merge two parts of a softmax in base 2; the first may be empty: -inf, 0, 0."""
    new = tl.maximum(largest, split_largest)
    base = tl.where(new == float("-inf"), 0.0, new)
    a = tl.exp2(largest - base)
    b = tl.exp2(split_largest - base)
    return new, total * a + split_total * b, acc * a[:, None] + split_acc * b[:, None]


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
def find_request(tile, query_start_loc, num_reqs, QUERIES: tl.constexpr):
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
def attend_tiles(
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
def find_seen(
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
def load_queries(at, rows, SIZE: tl.constexpr, UPCAST: tl.constexpr, BLOCK: tl.constexpr):
    """Load the first numbers of queries at the addresses [M, 1]."""
    d = tl.arange(0, BLOCK)
    q = tl.load(at + d[None, :], mask=rows[:, None] & (d < SIZE)[None, :], other=0.0)
    return q.to(tl.float32) if UPCAST else q


@triton.jit
def finish(
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
        largest, total, acc = merge(largest, total, acc, sink, one, tl.zeros_like(acc))
    # Rows without a query have a total of 0.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    d = tl.arange(0, BLOCK_D)
    mask = rows[:, None] & (d < VALUE_SIZE)[None, :]
    tl.store(out_at + d[None, :], result.to(out_at.dtype.element_ty), mask=mask)
