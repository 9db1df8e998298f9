"""Sampled tokens that stay on the device until the next step reads them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["count"])  # it changes from step to step
def _take(input_ids, last_tokens, rows, sampled, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    at = tl.load(last_tokens + i, mask=mask, other=0)
    row = tl.load(rows + i, mask=mask, other=-1)
    unknown = (row >= 0) & (tl.load(input_ids + at, mask=mask, other=0) < 0)
    token = tl.load(sampled + row, mask=unknown, other=0)
    tl.store(input_ids + at, tl.maximum(token, 0), mask=unknown)


def take_tokens(input_ids: Tensor, last_tokens: Tensor, rows: Tensor, sampled: Tensor) -> None:
    """Fill in the ids that the host does not know yet, which are below 0.

    A row that failed has the token -1; it continues with token 0, and its result is ignored.

    Args:
        input_ids: int64 [T], changed in place.
        last_tokens: int64 [S], index of the last token of each request that samples.
        rows: int64 [S], the rows of these requests; -1: no request.
        sampled: int64 [rows], the token sampled last in each row.
    """
    count = last_tokens.shape[0]
    if count:
        _take[(triton.cdiv(count, 256),)](input_ids, last_tokens, rows, sampled, count, BLOCK=256)
