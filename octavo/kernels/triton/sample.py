"""Sampling of one token for each row of logits, and the grammar's bitmask.

The choice equals that of csrc/sample.h: the winner of an exponential race. A token's weight is the
integer floor(2^40 * exp((logit - max) / temperature)), so that sums are exact in any order. The end
of a filter is found without sorting: a search finds the value of the last token that stays. Each
pass over the row leaves a quarter of the possible values. Among equals the lower id ranks first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_GROUP = 64  # tokens with the random numbers of 16 neighbouring counters


@triton.jit
def _key(x):
    """Map float32 to a uint32 with the same order; -0 equals 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _load(row, start, vocab_size, BLOCK: tl.constexpr):
    """Return the ids of a block of a row, their logits, and the mask of those that exist."""
    ids = start + tl.arange(0, BLOCK)
    mask = ids < vocab_size
    return ids, tl.load(row + ids, mask=mask, other=float("-inf")), mask


@triton.jit
def _weight(x, largest, temperature, min_p, mask):
    p = tl.exp((x - largest) / temperature)
    p = tl.where(mask & (p >= min_p), p, 0.0)
    # floor(2^40 * p) by its bits: few GPUs convert floats to 64-bit integers fast.
    bits = p.to(tl.int32, bitcast=True)
    whole = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    shift = (bits >> 23) - 110
    return tl.where(
        shift >= 0, whole << tl.maximum(shift, 0), whole >> tl.minimum(tl.maximum(-shift, 0), 63)
    )


@triton.jit
def _kept(key, ids, last_key, last_id):
    """Return True if a token ranks no later than the last one that stays."""
    return (key > last_key) | ((key == last_key) & (ids <= last_id))


@triton.jit
def _total(row, vocab_size, last_key, last_id, largest, temperature, min_p, BLOCK: tl.constexpr):
    """Return the weight of the tokens that stay."""
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
    """Return key and id of the last token with less than `limit` (float64) ranked before it.

    The tokens up to `last_key`, `last_id` are ranked; the measure is their number (COUNT) or
    weight.
    """
    # Search for the greatest key at which the measure reaches `limit`. Each pass cuts low..high
    # to a quarter, and then to the keys that exist.
    low = tl.full([], 0, tl.uint32)
    high = _key(largest)
    before = tl.full([], 0, tl.int64)  # measure of the keys above `high`
    while low < high:
        quarter = (high - low) // 4 + 1
        first = tl.minimum(low + quarter, high)
        second = tl.minimum(first + quarter, high)
        third = tl.minimum(second + quarter, high)
        # Sum lane by lane, and across lanes once after the loop.
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
def _sooner(
    x,
    ids,
    word,
    first,
    token,
    vocab_size,
    last_key,
    last_id,
    largest,
    temperature,
    min_p,
    bound,
):
    """Return the earlier of `first` (with `token`) and the arrivals of `ids`, lane by lane."""
    mask = ids < vocab_size
    v = tl.load(x + ids, mask=mask, other=float("-inf"))
    mask = mask & _kept(_key(v), ids, last_key, last_id)
    weight = _weight(v, largest, temperature, min_p, mask)
    # -log(u) is at least 1 - u, here rounded down: few tokens need 64-bit numbers.
    least = (word >> 8).to(tl.float32) * (1.0 / 16777216)
    in_time = (weight > 0) & (least <= weight.to(tl.float32) * bound)
    if tl.max(in_time.to(tl.int32), axis=0) > 0:
        u = 1.0 - (word.to(tl.float64) + 0.5) * (1.0 / 4294967296)
        arrives = -tl.log(u) / tl.maximum(weight, 1).to(tl.float64)
        sooner = in_time & ((arrives < first) | ((arrives == first) & (ids < token)))
        first = tl.where(sooner, arrives, first)
        token = tl.where(sooner, ids, token)
    return first, token


@triton.jit
def _sample(
    logits,
    stride,
    temperatures,
    top_ps,
    words,
    integers,
    out,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Sample one row.

    All parameters after `out` up to the sizes view the same `SAMPLING_ROW`s [R]: as 4-byte and
    8-byte floats, 4-byte unsigned integers and 8-byte integers.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    temperature = tl.load(temperatures + row * 10)
    min_p = tl.load(temperatures + row * 10 + 1)
    top_p = tl.load(top_ps + row * 5 + 1)
    seed = tl.load(integers + row * 5 + 2)
    position = tl.load(words + row * 10 + 6)
    stream = tl.load(words + row * 10 + 7)
    top_k = tl.load(integers + row * 5 + 4)

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
        if top_p < 1.0:
            total = _total(x, vocab_size, key, end, largest, temperature, min_p, BLOCK)
            limit = top_p * total.to(tl.float64)
            key, end = _cut(
                x, vocab_size, key, end, limit, largest, temperature, min_p, False, BLOCK
            )
        lanes = tl.arange(0, BLOCK // 4)
        first = tl.full([BLOCK // 4], float("inf"), tl.float64)
        tokens = tl.zeros([BLOCK // 4], tl.int32)
        zeros = tl.zeros([BLOCK // 4], tl.uint32)
        # The most probable token arrives before -log of the smallest u.
        bound = tl.full([], 23.0 / 1099511627776, tl.float32)
        for start in range(0, vocab_size, BLOCK):
            block = (start // 4 + lanes).to(tl.uint32)
            drawn = tl.philox(seed, zeros + position, zeros + stream, block, zeros)
            ids = start + lanes // 16 * 64 + lanes % 16
            for word in tl.static_range(4):
                first, tokens = _sooner(
                    x,
                    ids + word * 16,
                    drawn[word],
                    first,
                    tokens,
                    vocab_size,
                    key,
                    end,
                    largest,
                    temperature,
                    min_p,
                    bound,
                )
            # Slightly later, to allow for rounding.
            bound = tl.minimum(bound, tl.min(first, axis=0).to(tl.float32) * 1.0001)
        best = tl.min(first, axis=0)
        token = tl.min(tl.where(first == best, tokens, 2147483647), axis=0)
    tl.store(out + row, tl.where(good, token, -1).to(tl.int64))


def sample(logits: Tensor, params: Tensor, out: Tensor) -> None:
    """Implement `Ops.sample`.

    Args:
        logits: float32 [R, V].
        params: `SAMPLING_ROW` [R] on the logits' device, as int64 [R, 5].
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
            params.view(torch.uint32),
            params,
            out,
            vocab_size,
            BLOCK=max(_GROUP, min(_BLOCK, triton.next_power_of_2(vocab_size))),
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
    """Implement `Ops.apply_bitmask_`."""
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
