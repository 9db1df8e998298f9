"""Triton attention kernels, in the interpreter, against dense attention in float64."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention.reference import ReferenceAttention
from octavo.errors import ConfigError
from tests.attention import cases

pytest.importorskip("triton", reason="the package triton is not installed")

from octavo.attention import triton as under_test
from octavo.attention.triton import TritonAttention

CPU = torch.device("cpu")
BYTES = [torch.float8_e4m3fn, torch.float8_e5m2]
MIXED = ((1, 1), (70, 1), (33, 33), (90, 7), (5, 0), (64, 64), (65, 1), (16, 2))
# The interpreter truncates float32 to bfloat16 instead of rounding it.
ERROR = {torch.float32: 2e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


# The interpreter needs a millisecond for every head that it writes.
Case = partial(cases.Case, history=ReferenceAttention())


def backend(max_model_len: int = 1024, *, batch_invariant: bool = False) -> TritonAttention:
    return TritonAttention(CPU, max_model_len, batch_invariant=batch_invariant)


def check(
    case: cases.Case, attention: TritonAttention | None = None, *, views: bool = False
) -> None:
    got, truth = case.run(attention or backend(), views=views), case.truth()
    error = ERROR[case.dtype]
    torch.testing.assert_close(got.double(), truth, rtol=error, atol=error)


@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_prefill_and_decode_in_one_step(block_size: int) -> None:
    check(Case(MIXED, block_size=block_size))


@pytest.mark.parametrize("dtype", list(ERROR), ids=str)
def test_types(dtype: torch.dtype) -> None:
    check(Case(((70, 1), (90, 40)), dtype=dtype))


@pytest.mark.parametrize("head_size", [8, 40, 64, 128, 256, 512])
def test_head_sizes(head_size: int) -> None:
    check(Case(((70, 1), (90, 20)), head_size=head_size, scale=head_size**-0.5))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (14, 2), (40, 1)])
def test_groups_of_heads(heads: int, kv_heads: int) -> None:
    check(Case(((70, 1), (40, 40), (81, 5)), heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("window", [1, 16, 63, 65, 1000])
def test_sliding_window(window: int) -> None:
    """Blocks before the window do not exist: reading one would end the process."""
    check(Case(((1, 1), (70, 1), (90, 40), (200, 1), (200, 50)), window=window))


@pytest.mark.parametrize("chunk", [1, 16, 63, 90, 1000])
def test_chunks(chunk: int) -> None:
    """Blocks before the chunk of the step's first token do not exist."""
    check(Case(((1, 1), (70, 1), (90, 40), (200, 1), (200, 50)), chunk=chunk))


@pytest.mark.parametrize("cache_dtype", [None, *BYTES], ids=str)
def test_values_smaller_than_keys(cache_dtype: torch.dtype | None) -> None:
    check(Case(MIXED, head_size=24, small=16, cache_dtype=cache_dtype, window=50, sinks=True))


@pytest.mark.parametrize(
    ("soft_cap", "alibi", "window"), [(2.0, False, None), (None, True, None), (3.0, True, 20)]
)
def test_soft_cap_alibi_and_sinks(soft_cap: float | None, alibi: bool, window: int | None) -> None:
    check(Case(MIXED, soft_cap=soft_cap, alibi=alibi, window=window))
    check(Case(MIXED, soft_cap=soft_cap, alibi=alibi, window=window, sinks=True))


WHOLE = ((1, 1), (5, 5), (33, 33), (130, 130), (0, 0), (64, 64))
FEATURES = [
    {},
    {"window": 1},
    {"window": 40, "bias_distance": 9},
    {"window": 65, "alibi": True},
    {"soft_cap": 2.0, "alibi": True, "bias_distance": 50, "sinks": True},
    {"product_distance": 30},
    {"soft_cap": 2.0, "alibi": True, "product_distance": 200, "heads": 6, "kv_heads": 1},
    {"product_distance": 0, "multiplied": ("keys",)},
    {"product_distance": 9, "multiplied": ("queries",), "window": 40},
    {"unseen": 70},
    {"unseen": 70, "window": 20},
]


@pytest.mark.parametrize(
    ("features", "batch_invariant"),
    [*((features, False) for features in FEATURES), (FEATURES[0], True), (FEATURES[4], True)],
    ids=str,
)
def test_not_causal(features: dict[str, int], batch_invariant: bool) -> None:
    attention = backend(batch_invariant=batch_invariant)
    check(Case(WHOLE, causal=False, **features), attention)  # type: ignore[arg-type]


@pytest.mark.parametrize("features", FEATURES[::2], ids=str)
def test_a_whole_text_has_the_same_bits_in_a_batch(features: dict[str, int]) -> None:
    case = Case(WHOLE, causal=False, **features)  # type: ignore[arg-type]
    alone = [
        dataclasses.replace(case, requests=(request,), seeds=(i,)).run(backend())
        for i, request in enumerate(WHOLE)
    ]
    assert torch.equal(torch.cat(alone), case.run(backend()))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("window", "widens"), [(None, True), (50, True), (50, False)])
def test_ranges(window: int | None, widens: bool, batch_invariant: bool) -> None:
    """Tokens of a range see each other, alone and beyond a window, in all splits."""
    requests = (100, 90), (60, 1), (70, 37), (40, 40), (300, 10), (300, 1)
    ranges = (3, 33), (33, 60), (110, 150), (170, 300)
    case = Case(requests, window=window, ranges=ranges, widens=widens)
    check(case, backend(batch_invariant=batch_invariant))


def test_ranges_change_no_bit_of_others() -> None:
    """Whole, in chunks that do not cut a range, and among others."""
    attention, given = backend(batch_invariant=True), {"window": 50, "ranges": ((3, 60),)}

    def run(*requests: tuple[int, int], seeds: tuple[int, ...] = (7,)) -> Tensor:
        return Case(requests, seeds=seeds, **given).run(attention)  # type: ignore[arg-type]

    whole = run((100, 100))
    assert torch.equal(torch.cat([run((3, 3)), run((60, 57)), run((100, 40))]), whole)
    assert torch.equal(run((60, 40)), whole[20:60])
    among = run((80, 1), (60, 40), (33, 33), seeds=(1, 7, 3))
    assert torch.equal(among[1:41], whole[20:60])


@pytest.mark.parametrize("distance", [0, 1, 20, 500])
def test_position_bias(distance: int) -> None:
    check(Case(MIXED, bias_distance=distance))
    check(Case(MIXED, bias_distance=distance, soft_cap=2.0, window=40, heads=6, kv_heads=1))


@pytest.mark.parametrize("cache_dtype", BYTES, ids=str)
@pytest.mark.parametrize("features", [{}, {"window": 50}, {"head_size": 40}], ids=str)
def test_a_cache_in_fp8(features: dict[str, int], cache_dtype: torch.dtype) -> None:
    check(Case(((70, 1), (90, 20)), cache_dtype=cache_dtype, **features))  # type: ignore[arg-type]


@st.composite
def cases_of_all_kinds(draw: st.DrawFn) -> tuple[cases.Case, int]:
    lengths = draw(st.lists(st.integers(1, 45), min_size=1, max_size=3))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1), (1, 17)]))
    causal = draw(st.booleans())
    case = Case(
        tuple((n, draw(st.integers(0, n)) if causal else n) for n in lengths),
        causal=causal,
        bias_distance=draw(st.sampled_from([None, 0, 6, 50])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([8, 16, 20])),
        block_size=draw(st.sampled_from([1, 8, 24])),
        cache_dtype=draw(st.sampled_from([None, *BYTES])),
        window=draw(st.sampled_from([None, 1, 7, 40])),
        soft_cap=draw(st.sampled_from([None, 2.0])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        small=draw(st.sampled_from([None, 5])),
        product_distance=None if causal else draw(st.sampled_from([None, 0, 30])),
    )
    if case.window is None and causal:
        case = dataclasses.replace(case, chunk=draw(st.sampled_from([None, 1, 7, 32])))
    return case, draw(st.sampled_from([0, 4, 100]))


@settings(max_examples=25, deadline=None)
@given(cases_of_all_kinds())
def test_anything_at_once(case_and_cores: tuple[cases.Case, int]) -> None:
    case, attention = case_and_cores[0], backend()
    attention.split, attention.cores = 32, case_and_cores[1]
    torch.testing.assert_close(case.run(attention).double(), case.truth(), rtol=2e-5, atol=2e-5)


def test_views() -> None:
    check(Case(MIXED), views=True)


def test_nothing_to_do() -> None:
    assert Case(()).run(backend()).shape == (0, 4, 16)
    assert Case(((5, 0), (7, 0))).run(backend()).shape == (0, 4, 16)


LONG = ((300, 1), (1, 1), (128, 1), (257, 1))


@pytest.mark.parametrize(
    ("cores", "features"),
    [(1000, {}), (4, {}), (1000, {"window": 200}), (1000, {"chunk": 180, "small": 9})],
)
def test_sharing_out_splits_changes_no_bit(
    cores: int, features: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "MIN_SPLIT", 128)
    case = Case(LONG, heads=2, kv_heads=1, **features)  # type: ignore[arg-type]
    alone, shared = backend(), backend()
    assert alone.split == 128
    alone.cores, shared.cores = 0, cores
    result = case.run(shared)
    torch.testing.assert_close(result.double(), case.truth(), rtol=2e-5, atol=2e-5)
    assert torch.equal(result, case.run(alone))


def test_others_in_the_batch_change_no_bit() -> None:
    whole = Case(LONG).run(backend())
    for i, request in enumerate(LONG):
        assert torch.equal(Case((request,), seeds=(i,)).run(backend())[0], whole[i])


@pytest.mark.parametrize("features", [{}, {"window": 50}, {"chunk": 70}], ids=str)
def test_batch_invariant_chunks_change_nothing(features: dict[str, int]) -> None:
    attention = backend(batch_invariant=True)

    def run(*requests: tuple[int, int]) -> Tensor:
        return Case(requests, seeds=(7, 8)[: len(requests)], **features).run(attention)  # type: ignore[arg-type]

    whole = run((150, 150))
    chunks = [run((n, 50)) for n in range(50, 151, 50)]
    assert torch.equal(torch.cat(chunks), whole)
    for length in (1, 64, 65, 150):
        assert torch.equal(run((length, 1), (20, 20))[0], whole[length - 1])


def test_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="head_size=513"):
        backend().kv_cache_shape(4, 16, 2, 513)
    with pytest.raises(ConfigError, match="int8"):
        backend().kv_cache_shape(4, 16, 2, 64, "int8")
