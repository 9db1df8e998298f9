import dataclasses

import pytest
import torch

from octavo.attention.reference import ReferenceAttention
from tests.attention.cases import Case, assert_near

MIXED = ((1, 1), (40, 1), (33, 33), (50, 7), (5, 0), (64, 64))
WHOLE = ((1, 1), (5, 5), (33, 33), (0, 0), (64, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(MIXED),
        Case(MIXED, window=9),
        Case(MIXED, soft_cap=2.0),
        Case(MIXED, alibi=True),
        Case(MIXED, sinks=True),
        Case(MIXED, heads=6, kv_heads=1, block_size=8, head_size=24, window=17, soft_cap=5.0),
        Case(MIXED, chunk=19, head_size=24, small=16),
        Case(MIXED, bias_distance=9, soft_cap=2.0),
        Case(MIXED, ranges=((0, 33), (44, 48)), window=9),
        Case(MIXED, ranges=((3, 30), (34, 50)), window=9, widens=False, soft_cap=2.0),
        Case(WHOLE, causal=False),
        Case(WHOLE, causal=False, window=9, bias_distance=0),
        Case(WHOLE, causal=False, unseen=3),
        Case(WHOLE, causal=False, unseen=30, window=9),
        Case(WHOLE, causal=False, alibi=True, sinks=True, bias_distance=40, heads=6, kv_heads=1),
        Case(()),
    ],
    ids=str,
)
def test_against_dense_attention(case: Case, dtype: torch.dtype) -> None:
    for cache_dtype in (None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        case = dataclasses.replace(case, dtype=dtype, cache_dtype=cache_dtype)
        truth = case.truth() if case.requests else torch.empty(0, 4, 16)
        assert_near(case.run(ReferenceAttention()), truth)
