"""One token for each row of logits, and the grammar's bitmask.

The same choice as csrc/sample.h makes: a token's weight is the integer
floor(2^40 * exp((logit - max) / temperature)), so that sums are exact in any order. Where a filter
ends is found without sorting: the value of the last token that stays is searched for, and each pass
over the row leaves a quarter of the values that it may be; among equals the lower id ranks first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _key(x):
    """float32 to a uint32 that sorts like it; -0 like 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _load(row, start, vocab_size, BLOCK: tl.constexpr):
    """Ids of a block of a row, their logits, and which of them exist."""
    ids = start + tl.arange(0, BLOCK)
    mask = ids < vocab_size
    return ids, tl.load(row + ids, mask=mask, other=float("-inf")), mask


@triton.jit
def _weight(x, largest, temperature, min_p, mask):
    p = tl.exp((x - largest) / temperature)
    p = tl.where(mask & (p >= min_p), p, 0.0)
    # floor(2^40 * p) from the bits: few cards are quick at making integers of 64 bits of floats.
    bits = p.to(tl.int32, bitcast=True)
    whole = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    shift = (bits >> 23) - 110
    return tl.where(
        shift >= 0, whole << tl.maximum(shift, 0), whole >> tl.minimum(tl.maximum(-shift, 0), 63)
    )


@triton.jit
def _kept(key, ids, last_key, last_id):
    """Whether a token ranks no later than the last one that stays."""
    return (key > last_key) | ((key == last_key) & (ids <= last_id))


@triton.jit
def _total(row, vocab_size, last_key, last_id, largest, temperature, min_p, BLOCK: tl.constexpr):
    """Weight of the tokens that stay."""
    total = tl.zeros([BLOCK], tl.int64)  # summed across lanes once, not in every block
    for start in range(0, vocab_size, BLOCK):
        ids, v, mask = _load(row, start, vocab_size, BLOCK)
        mask = mask & _kept(_key(v), ids, last_key, last_id)
        total += _weight(v, largest, temperature, min_p, mask)
    return tl.sum(total, axis=0)


@triton.jit
def _cut(
    row,
    vocab_size,
    last_key,
    last_id,
    limit,
    largest,
    temperature,
    min_p,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Key and id of the last token that has less than `limit` (float64) ranked before it.

    What is ranked: the tokens up to `last_key`, `last_id`; measured in tokens (COUNT) or weights.
    """
    # The greatest key that `limit` is reached with is looked for in quarters of low..high, which
    # shrink to the keys that there are.
    low = tl.full([], 0, tl.uint32)
    high = _key(largest)
    before = tl.full([], 0, tl.int64)  # measure of the keys above `high`
    while low < high:
        quarter = (high - low) // 4 + 1
        first = tl.minimum(low + quarter, high)
        second = tl.minimum(first + quarter, high)
        third = tl.minimum(second + quarter, high)
        # Lane by lane; across lanes once, behind the loop.
        from_first = tl.zeros([BLOCK], tl.int64)
        from_second = tl.zeros([BLOCK], tl.int64)
        from_third = tl.zeros([BLOCK], tl.int64)
        lowest = tl.zeros([BLOCK], tl.uint32) + high
        highest = tl.zeros([BLOCK], tl.uint32) + low
        for start in range(0, vocab_size, BLOCK):
            ids, v, mask = _load(row, start, vocab_size, BLOCK)
            key = _key(v)
            mask = mask & _kept(key, ids, last_key, last_id)
            if COUNT:
                m = mask.to(tl.int64)
            else:
                m = _weight(v, largest, temperature, min_p, mask)
            from_first += tl.where(key >= first, m, 0)
            from_second += tl.where(key >= second, m, 0)
            from_third += tl.where(key >= third, m, 0)
            inside = mask & (key >= low) & (key <= high)
            lowest = tl.minimum(lowest, tl.where(inside, key, high))
            highest = tl.maximum(highest, tl.where(inside, key, low))
        from_first = tl.sum(from_first, axis=0)
        from_second = tl.sum(from_second, axis=0)
        from_third = tl.sum(from_third, axis=0)
        low = tl.maximum(low, tl.min(lowest, axis=0))
        high = tl.minimum(high, tl.max(highest, axis=0))
        if from_third.to(tl.float64) >= limit:
            low = tl.maximum(low, third)
        elif from_second.to(tl.float64) >= limit:
            low = tl.maximum(low, second)
            high = tl.minimum(high, third - 1)
            before = from_third
        elif from_first.to(tl.float64) >= limit:
            low = tl.maximum(low, first)
            high = tl.minimum(high, second - 1)
            before = from_second
        else:
            high = tl.minimum(high, first - 1)
            before = from_first
    end = tl.full([], -1, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids, v, mask = _load(row, start, vocab_size, BLOCK)
        mask = mask & (_key(v) == low) & _kept(low, ids, last_key, last_id)
        if tl.max(mask.to(tl.int32), axis=0) > 0:
            if COUNT:
                m = mask.to(tl.int64)
            else:
                m = _weight(v, largest, temperature, min_p, mask)
            ahead = before + tl.cumsum(m, axis=0) - m
            stays = mask & (ahead.to(tl.float64) < limit)
            end = tl.maximum(end, tl.max(tl.where(stays, ids, -1), axis=0))
            before += tl.sum(m, axis=0)
    return low, end


@triton.jit
def _sample(
    logits,
    stride,
    temperatures,
    top_ps,
    top_ks,
    out,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """`temperatures`, `top_ps` and `top_ks` are `SAMPLING_ROW`s [R], read as floats of 4 and 8
    bytes and as integers of 8."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    temperature = tl.load(temperatures + row * 8)
    min_p = tl.load(temperatures + row * 8 + 1)
    top_p = tl.load(top_ps + row * 4 + 1)
    uniform = tl.load(top_ps + row * 4 + 2)
    top_k = tl.load(top_ks + row * 4 + 3)

    most = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids, v, _ = _load(x, start, vocab_size, BLOCK)
        broken |= (v != v).to(tl.int32)
        at = tl.where(v > most, ids, at)
        most = tl.where(v > most, v, most)
    largest = tl.max(most, axis=0)
    token = tl.min(tl.where(most == largest, at, 2147483647), axis=0)
    good = (tl.max(broken, axis=0) == 0) & (largest > float("-inf")) & (largest < float("inf"))

    if good & (temperature > 0.0):
        key = tl.full([], 0, tl.uint32)
        end = tl.full([], 2147483647, tl.int32)
        if (top_k > 0) & (top_k < vocab_size):
            limit = top_k.to(tl.float64)
            key, end = _cut(
                x, vocab_size, key, end, limit, largest, temperature, min_p, True, BLOCK
            )
        total = _total(x, vocab_size, key, end, largest, temperature, min_p, BLOCK)
        if top_p < 1.0:
            limit = top_p * total.to(tl.float64)
            key, end = _cut(
                x, vocab_size, key, end, limit, largest, temperature, min_p, False, BLOCK
            )
            total = _total(x, vocab_size, key, end, largest, temperature, min_p, BLOCK)
        # The product may round up to the total itself, which no sum exceeds.
        threshold = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        before = tl.full([], 0, tl.int64)
        start = tl.full([], 0, tl.int32)
        while (before <= threshold) & (start < vocab_size):
            ids, v, mask = _load(x, start, vocab_size, BLOCK)
            mask = mask & _kept(_key(v), ids, key, end)
            w = _weight(v, largest, temperature, min_p, mask)
            sum_here = tl.sum(w, axis=0)
            if before + sum_here > threshold:
                beyond = before + tl.cumsum(w, axis=0) > threshold
                token = tl.min(tl.where(beyond, ids, 2147483647), axis=0)
            before += sum_here
            start += BLOCK
    tl.store(out + row, tl.where(good, token, -1).to(tl.int64))


def sample(logits: Tensor, params: Tensor, out: Tensor) -> None:
    """See `Ops.sample`.

    Args:
        logits: float32 [R, V].
        params: `SAMPLING_ROW` [R] on the logits' device, as int64 [R, 4].
        out: int64 [R], written.
    """
    rows, vocab_size = logits.shape
    assert params.dtype == torch.int64
    assert params.is_contiguous()
    if rows:
        _sample[(rows,)](
            logits,
            logits.stride(0),
            params.view(torch.float32),
            params.view(torch.float64),
            params,
            out,
            vocab_size,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=32,
        )


@triton.jit
def _apply_bitmask(logits, stride, bitmask, mask_stride, rows, vocab_size, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bitmask + entry * mask_stride + ids // 32, mask=ids < vocab_size, other=-1)
    denied = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits + row * stride + ids, float("-inf"), mask=denied & (ids < vocab_size))


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """See `Ops.apply_bitmask_`."""
    vocab_size = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    if len(rows):
        _apply_bitmask[(len(rows), triton.cdiv(vocab_size, block))](
            logits,
            logits.stride(0),
            bitmask,
            bitmask.stride(0),
            rows,
            vocab_size,
            BLOCK=block,
        )
