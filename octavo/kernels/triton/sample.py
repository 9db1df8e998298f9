"""One token for each row of logits, and the grammar's bitmask.

The same choice as csrc/sample.h makes: a token's weight is the integer
floor(2^40 * exp((logit - max) / temperature)), so that sums are exact in any order. Where a filter
ends is found without sorting: the value of the last token that stays is searched for bit by bit,
each bit with one pass over the row; among equals the lower id ranks first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _key(x):
    """float32 to an int64 that sorts like it, from 0 to 2^32 - 1; -0 like 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int64) + 2147483648


@triton.jit
def _weight(x, largest, temperature, min_p, mask):
    p = tl.exp((x - largest) / temperature)
    p = tl.where(mask & (p >= min_p), p, 0.0)
    return (p * 1099511627776.0).to(tl.int64)  # 2^40


@triton.jit
def _kept(key, ids, last_key, last_id):
    """Whether a token ranks no later than the last one that stays."""
    return (key > last_key) | ((key == last_key) & (ids <= last_id))


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
    columns = tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row * 8)
    min_p = tl.load(temperatures + row * 8 + 1)
    top_p = tl.load(top_ps + row * 4 + 1)
    uniform = tl.load(top_ps + row * 4 + 2)
    top_k = tl.load(top_ks + row * 4 + 3)

    largest = float("-inf")
    first = vocab_size
    broken = 0
    for start in range(0, vocab_size, BLOCK):
        ids = start + columns
        v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
        broken += tl.sum((v != v).to(tl.int32), axis=0)
        block_largest = tl.max(tl.where(v == v, v, float("-inf")), axis=0)
        block_first = tl.min(tl.where(v == block_largest, ids, vocab_size), axis=0)
        first = tl.where(block_largest > largest, block_first, first)
        largest = tl.maximum(largest, block_largest)
    good = (broken == 0) & (largest > float("-inf")) & (largest < float("inf"))

    if good & (temperature > 0.0):
        last_key = tl.full([], 0, tl.int64)
        last_id = vocab_size
        if (top_k > 0) & (top_k < vocab_size):
            # The largest key that at least top_k tokens reach.
            for bit in range(32):
                candidate = last_key + (tl.full([], 1, tl.int64) << (31 - bit))
                count = tl.full([], 0, tl.int64)
                for start in range(0, vocab_size, BLOCK):
                    ids = start + columns
                    v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
                    reach = (_key(v) >= candidate) & (ids < vocab_size)
                    count += tl.sum(reach.to(tl.int64), axis=0)
                last_key = tl.where(count >= top_k, candidate, last_key)
            above = tl.full([], 0, tl.int64)
            for start in range(0, vocab_size, BLOCK):
                ids = start + columns
                v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
                above += tl.sum(((_key(v) > last_key) & (ids < vocab_size)).to(tl.int64), axis=0)
            last_id = -1
            seen = tl.full([], 0, tl.int64)
            for start in range(0, vocab_size, BLOCK):
                ids = start + columns
                v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
                equal = ((_key(v) == last_key) & (ids < vocab_size)).to(tl.int64)
                rank = above + seen + tl.cumsum(equal, axis=0)  # from 1
                stays = (equal > 0) & (rank <= top_k)
                last_id = tl.maximum(last_id, tl.max(tl.where(stays, ids, -1), axis=0))
                seen += tl.sum(equal, axis=0)
        total = tl.full([], 0, tl.int64)
        for start in range(0, vocab_size, BLOCK):
            ids = start + columns
            v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
            kept = _kept(_key(v), ids, last_key, last_id)
            w = _weight(v, largest, temperature, min_p, (ids < vocab_size) & kept)
            total += tl.sum(w, axis=0)
        if top_p < 1.0:
            # A token stays while the weights before it are below the limit: the largest key whose
            # tokens and those above them reach the limit is the last one that any token has.
            limit = top_p * total.to(tl.float64)
            found = tl.full([], 0, tl.int64)
            for bit in range(32):
                candidate = found + (tl.full([], 1, tl.int64) << (31 - bit))
                weights = tl.full([], 0, tl.int64)
                for start in range(0, vocab_size, BLOCK):
                    ids = start + columns
                    v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
                    key = _key(v)
                    kept = _kept(key, ids, last_key, last_id) & (key >= candidate)
                    w = _weight(v, largest, temperature, min_p, (ids < vocab_size) & kept)
                    weights += tl.sum(w, axis=0)
                found = tl.where(weights.to(tl.float64) >= limit, candidate, found)
            before = tl.full([], 0, tl.int64)
            for start in range(0, vocab_size, BLOCK):
                ids = start + columns
                v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
                key = _key(v)
                kept = _kept(key, ids, last_key, last_id) & (key > found)
                w = _weight(v, largest, temperature, min_p, (ids < vocab_size) & kept)
                before += tl.sum(w, axis=0)
            end = -1
            for start in range(0, vocab_size, BLOCK):
                ids = start + columns
                v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
                key = _key(v)
                equal = _kept(key, ids, last_key, last_id) & (key == found) & (ids < vocab_size)
                w = _weight(v, largest, temperature, min_p, equal)
                ahead = before + tl.cumsum(w, axis=0) - w
                stays = equal & (ahead.to(tl.float64) < limit)
                end = tl.maximum(end, tl.max(tl.where(stays, ids, -1), axis=0))
                before += tl.sum(w, axis=0)
            last_key = found
            last_id = end
            total = tl.full([], 0, tl.int64)
            for start in range(0, vocab_size, BLOCK):
                ids = start + columns
                v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
                kept = _kept(_key(v), ids, last_key, last_id)
                w = _weight(v, largest, temperature, min_p, (ids < vocab_size) & kept)
                total += tl.sum(w, axis=0)
        # The product may round up to the total itself, which no sum exceeds.
        threshold = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        first = vocab_size
        sum_before = tl.full([], 0, tl.int64)
        for start in range(0, vocab_size, BLOCK):
            ids = start + columns
            v = tl.load(x + ids, mask=ids < vocab_size, other=float("-inf"))
            kept = _kept(_key(v), ids, last_key, last_id)
            w = _weight(v, largest, temperature, min_p, (ids < vocab_size) & kept)
            beyond = sum_before + tl.cumsum(w, axis=0) > threshold
            first = tl.minimum(first, tl.min(tl.where(beyond, ids, vocab_size), axis=0))
            sum_before += tl.sum(w, axis=0)
    tl.store(out + row, tl.where(good, first, -1).to(tl.int64))


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
            num_warps=8,
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
