"""Native attention kernel against dense attention in float64, and bitwise against itself."""

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from octavo import _native
from octavo.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    LargestAttention,
)
from octavo.attention.cpu import BLOCK_SIZES, CPUAttention
from octavo.attention.reference import ReferenceAttention
from octavo.errors import ConfigError
from octavo.kernels import native
from octavo.kernels.memory import Arena
from octavo.kernels.torch_tensors import dtype_name, from_torch
from tests.attention.cases import Case, assert_near, new_cache
from tests.torch_ops import cpu_attention, native_ops

backend = cpu_attention()
BYTES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
byte_caches = pytest.mark.parametrize("cache_dtype", BYTES, ids=str)
isas = pytest.mark.usefixtures("isa")


def taking_turns(name: str, first: list[int], other: str, turns: list[int]) -> pytest.MarkDecorator:
    """Parametrize with each value and each dtype; the turns' values occur with all of both."""
    given = [
        (value, turns[(i + j) % len(turns)], dtype)
        for i, value in enumerate(first)
        for j, dtype in enumerate(DTYPES)
    ]
    return pytest.mark.parametrize((name, other, "dtype"), given, ids=str)


MIXED = ((1, 1), (70, 1), (33, 33), (150, 7), (5, 0), (130, 130), (64, 64), (65, 1), (16, 2))


def assert_same(a: Tensor, b: Tensor) -> None:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    assert torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@isas
@dtypes
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    case = Case(MIXED, block_size=block_size, dtype=dtype)
    assert_near(case.run(backend), case.truth())


@isas
@dtypes
@pytest.mark.parametrize("head_size", [1, 2, 7, 8, 12, 15, 20, 24, 33, 40, 64, 100, 128, 256])
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    case = Case(((70, 1), (90, 20)), head_size=head_size, dtype=dtype, scale=head_size**-0.5)
    assert_near(case.run(backend), case.truth())


@isas
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (14, 2), (40, 1)])
def test_groups_of_heads(heads: int, kv_heads: int) -> None:
    case = Case(((70, 1), (40, 40), (81, 5)), heads=heads, kv_heads=kv_heads)
    assert_near(case.run(backend), case.truth())


@isas
@taking_turns("window", [1, 16, 63, 64, 65, 1000], "block_size", [8, 128])
def test_sliding_window(window: int, block_size: int, dtype: torch.dtype) -> None:
    """Blocks before the window do not exist: reading one would end the process."""
    case = Case((*MIXED, (300, 1), (300, 90)), window=window, block_size=block_size, dtype=dtype)
    assert_near(case.run(backend), case.truth())


@isas
@taking_turns("chunk", [1, 16, 63, 64, 90, 1000], "block_size", [8, 128])
def test_chunks(chunk: int, block_size: int, dtype: torch.dtype) -> None:
    """Blocks before the chunk of the step's first token do not exist."""
    requests = (*MIXED, (300, 1), (300, 90), (181, 1))
    case = Case(requests, chunk=chunk, block_size=block_size, dtype=dtype)
    assert_near(case.run(backend), case.truth())
    shared = Case(((1000, 2),), chunk=700, block_size=block_size, dtype=dtype)  # by the threads
    assert_near(shared.run(backend), shared.truth())


@isas
@taking_turns("window", [None, 1, 16, 65], "block_size", [8, 128])
def test_ranges(window: int | None, block_size: int, dtype: torch.dtype) -> None:
    """Tokens of a range see each other, alone and beyond a window."""
    requests = (*MIXED, (300, 1), (300, 90), (300, 200), (700, 660), (700, 3))
    ranges = (3, 33), (33, 60), (100, 150), (170, 300), (400, 660)
    for widens in (False, True):
        case = Case(
            requests,
            window=window,
            block_size=block_size,
            dtype=dtype,
            ranges=ranges,
            widens=widens,
        )
        assert_near(case.run(backend), case.truth())
        case = dataclasses.replace(case, heads=6, kv_heads=1, soft_cap=3.0, head_size=32)
        assert_near(case.run(backend), case.truth())
    shared = dataclasses.replace(case, requests=((700, 5),))  # by the threads
    assert_near(shared.run(backend), shared.truth())


@isas
@dtypes
def test_ranges_change_no_bit_of_others(dtype: torch.dtype) -> None:
    """One request: whole, in chunks that do not cut a range, from within one; and among others."""
    length, ranges = 200, ((3, 60), (100, 150))

    def run(*requests: tuple[int, int], seeds: tuple[int, ...] = (7,), **fields: Any) -> Tensor:
        given = {"window": 50, "ranges": ranges, "head_size": 32} | fields
        return Case(requests, seeds=seeds, dtype=dtype, **given).run(backend)

    whole = run((length, length))
    starts, ends = (0, 3, 60, 61, 100, 150, 170), (3, 60, 61, 100, 150, 170, 200)
    chunks = [run((end, end - start)) for start, end in zip(starts, ends, strict=True)]
    assert_same(torch.cat(chunks), whole)
    for start, end in ((20, 60), (59, 60), (90, 155), (120, 150)):
        assert_same(run((end, end - start)), whole[start:end])
        among = run((80, 1), (60, 60), (end, end - start), (33, 33), seeds=(1, 2, 7, 3))
        assert_same(among[61 : 61 + end - start], whole[start:end])
    plain = run((length, length), ranges=())
    assert_same(whole[:3], plain[:3])
    assert_same(whole[60:100], plain[60:100])
    assert not torch.equal(whole[3:60], plain[3:60])


@isas
@dtypes
@pytest.mark.parametrize(("head_size", "small"), [(192, 128), (24, 16), (33, 32), (40, 7)])
def test_values_smaller_than_keys(head_size: int, small: int, dtype: torch.dtype) -> None:
    """The numbers after a value in the cache are NaN here, and must not be used."""
    case = Case(MIXED, head_size=head_size, small=small, dtype=dtype, scale=head_size**-0.5)
    assert_near(case.run(backend), case.truth())
    assert_same(case.run(backend, views=True), case.run(backend))
    for cache_dtype in BYTES:
        case = dataclasses.replace(case, cache_dtype=cache_dtype)
        assert_near(case.run(backend), case.truth(), LARGEST)


@isas
@dtypes
@pytest.mark.parametrize("block_size", [8, 32])
def test_soft_cap_alibi_and_sinks(block_size: int, dtype: torch.dtype) -> None:
    for soft_cap, alibi, window in [(2.0, False, None), (None, True, None), (3.0, True, 20)]:
        case = Case(
            MIXED,
            soft_cap=soft_cap,
            alibi=alibi,
            window=window,
            block_size=block_size,
            dtype=dtype,
        )
        assert_near(case.run(backend), case.truth())
        case = dataclasses.replace(case, sinks=True)
        assert_near(case.run(backend), case.truth())
    shared = Case(((1000, 2),), sinks=True, block_size=block_size, dtype=dtype)  # by the threads
    assert_near(shared.run(backend), shared.truth())


@dtypes
@pytest.mark.parametrize("head_size", [16, 17])
def test_keys_are_read_as_they_were_written(head_size: int, dtype: torch.dtype) -> None:
    key = torch.randn(20, 3, head_size).to(dtype)
    cache = new_cache(backend.kv_cache_shape(4, 8, 3, head_size), dtype)
    blocks = [3, 0, 2]
    slots = torch.tensor([blocks[i // 8] * 8 + i % 8 for i in range(20)])
    backend.write_kv(key, torch.zeros_like(key), cache, slots)
    for head in range(3):
        found = CPUAttention().read_keys(from_torch(cache), blocks, head, 20)
        assert torch.equal(torch.from_numpy(found), key[:, head].float())


@isas
@dtypes
def test_views(dtype: torch.dtype) -> None:
    case = Case(MIXED, dtype=dtype)
    assert_same(case.run(backend, views=True), case.run(backend))


@isas
def test_nothing_to_do() -> None:
    assert Case(()).run(backend).shape == (0, 4, 16)
    assert Case(((5, 0), (7, 0))).run(backend).shape == (0, 4, 16)


@isas
def test_huge_logits() -> None:
    """The largest logit takes all: no overflow, no NaN."""
    for scale in (1e4, 1e10):
        case = Case(((100, 100), (700, 2)), scale=scale, sinks=True)
        assert_near(case.run(backend), case.truth())


# All tokens of every request in one step, as encoders have them
WHOLE = ((5, 5), (1, 1), (130, 130), (0, 0), (33, 33), (64, 64), (300, 300), (17, 17))


@isas
@taking_turns("block_size", list(BLOCK_SIZES), "head_size", [15, 32, 64])
def test_not_causal(head_size: int, block_size: int, dtype: torch.dtype) -> None:
    case = Case(WHOLE, causal=False, head_size=head_size, block_size=block_size, dtype=dtype)
    assert_near(case.run(backend), case.truth())


@isas
@dtypes
@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 1000])
def test_windows_of_both_sides(window: int, dtype: torch.dtype) -> None:
    case = Case(WHOLE, causal=False, window=window, dtype=dtype)
    assert_near(case.run(backend), case.truth())
    case = dataclasses.replace(case, block_size=8, head_size=24, alibi=True, bias_distance=30)
    assert_near(case.run(backend), case.truth())


@isas
@dtypes
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("unseen", [1, 16, 70, 200])
def test_tokens_that_none_sees(unseen: int, window: int | None, dtype: torch.dtype) -> None:
    """With a window, tokens at the end may see nothing at all."""
    case = Case(WHOLE, causal=False, unseen=unseen, window=window, dtype=dtype)
    assert_near(case.run(backend), case.truth())
    case = dataclasses.replace(case, block_size=8, head_size=24, alibi=True, bias_distance=30)
    assert_near(case.run(backend), case.truth())
    case = dataclasses.replace(case, sinks=True, cache_dtype=torch.int8)
    assert_near(case.run(backend), case.truth(), LARGEST)


@isas
@taking_turns("distance", [0, 1, 7, 8, 63, 127, 1000], "causal", [True, False])
def test_position_bias(distance: int, causal: bool, dtype: torch.dtype) -> None:
    requests = (*MIXED, (600, 3)) if causal else WHOLE
    case = Case(requests, causal=causal, bias_distance=distance, dtype=dtype)
    assert_near(case.run(backend), case.truth())
    case = dataclasses.replace(case, heads=6, kv_heads=1, soft_cap=3.0, alibi=True, sinks=True)
    assert_near(case.run(backend), case.truth())


@isas
@dtypes
@pytest.mark.parametrize("distance", [0, 1, 7, 63, 127, 1000])
def test_products_with_distances(distance: int, dtype: torch.dtype) -> None:
    case = Case(WHOLE, causal=False, product_distance=distance, dtype=dtype)
    assert_near(case.run(backend), case.truth())
    for multiplied in (("queries",), ("keys",)):
        one = dataclasses.replace(case, multiplied=multiplied, head_size=24, block_size=8)
        assert_near(one.run(backend), one.truth())
    case = dataclasses.replace(case, heads=6, kv_heads=1, soft_cap=3.0, alibi=True, window=50)
    assert_near(case.run(backend), case.truth())
    case = dataclasses.replace(case, causal=True, window=12, multiplied=("queries",))
    assert_near(case.run(backend), case.truth())


@isas
@pytest.mark.parametrize("cache_dtype", BYTES, ids=str)
def test_not_causal_over_a_cache_of_bytes(cache_dtype: torch.dtype) -> None:
    for features in (
        {"head_size": 32},
        {"window": 20, "bias_distance": 9, "block_size": 32},
        {"product_distance": 20},
    ):
        case = Case(WHOLE, causal=False, dtype=torch.bfloat16, cache_dtype=cache_dtype, **features)  # type: ignore[arg-type]
        assert_near(case.run(backend), case.truth(), LARGEST)


@isas
@dtypes
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"window": 40},
        {"alibi": True, "bias_distance": 20, "heads": 6, "kv_heads": 1},
        {"product_distance": 40},
        {"unseen": 30, "window": 40},
    ],
    ids=str,
)
def test_a_whole_text_has_the_same_bits_in_a_batch(
    features: dict[str, int], dtype: torch.dtype
) -> None:
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            case = Case(WHOLE, causal=False, head_size=32, dtype=dtype, **features)  # type: ignore[arg-type]
            results.append(case.run(backend))
    finally:
        native.set_num_threads(0)
    alone = torch.cat(
        [
            dataclasses.replace(case, requests=(request,), seeds=(i,)).run(backend)
            for i, request in enumerate(WHOLE)
        ]
    )
    for result in results:
        assert_same(result, alone)


FEATURES = [
    {},
    {"window": 50, "sinks": True},
    {"window": 3, "block_size": 8},
    {"soft_cap": 3.0, "alibi": True, "heads": 6, "kv_heads": 1},
    {"heads": 2, "kv_heads": 2, "head_size": 40, "block_size": 128},
    {"heads": 2, "kv_heads": 1, "head_size": 15},
    {"chunk": 70, "head_size": 24, "small": 16},
    {"bias_distance": 50, "window": 90, "heads": 3, "kv_heads": 3},
]


@isas
@pytest.mark.parametrize("cache_dtype", [None, *BYTES], ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_batch_and_chunks_change_no_bit(
    features: dict[str, int], cache_dtype: torch.dtype | None
) -> None:
    """One request of 200 tokens: whole, in chunks, token by token; alone and among others.

    The types take turns, so that each occurs with each type of the cache and each feature.
    """
    dtype = DTYPES[(FEATURES.index(features) + [None, *BYTES].index(cache_dtype)) % 3]
    length = 200

    def run(*requests: tuple[int, int], seeds: tuple[int, ...] = (7,)) -> Tensor:
        case = Case(requests, seeds=seeds, dtype=dtype, cache_dtype=cache_dtype, **features)  # type: ignore[arg-type]
        return case.run(backend)

    whole = run((length, length))
    for size in (13, 33, 130):
        ends = [*range(size, length, size), length]
        chunks = [run((end, (end - 1) % size + 1)) for end in ends]
        assert_same(torch.cat(chunks), whole)
    for end in (1, 2, 16, 17, 65, 128, 200):
        assert_same(run((end, 1)), whole[end - 1 : end])
        others = (80, 1), (90, 60), (end, 1), (33, 33), (1, 1)
        among = run(*others, seeds=(1, 2, 7, 3, 4))
        assert_same(among[61:62], whole[end - 1 : end])


# Largest value of the cases, which multiplies the error of a probability in the result
LARGEST = 5


@isas
@byte_caches
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_caches_of_bytes(cache_dtype: torch.dtype, block_size: int) -> None:
    """Attention over exactly the numbers that the format holds, with every feature.

    The types take turns, so that each occurs with each type of the cache.
    """
    dtype = DTYPES[(BYTES.index(cache_dtype) + BLOCK_SIZES.index(block_size)) % 3]
    base = Case(MIXED, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype)
    for features in (
        {"head_size": 24},
        {"heads": 8, "kv_heads": 1, "head_size": 64, "window": 20},
        {"soft_cap": 3.0, "alibi": True, "head_size": 128, "scale": 0.1},
        {"requests": ((300, 1), (300, 90), (600, 3)), "window": 65},
        {"heads": 2, "kv_heads": 1, "head_size": 15, "window": 70},
    ):
        case = dataclasses.replace(base, **features)  # type: ignore[arg-type]
        assert_near(case.run(backend), case.truth(), LARGEST)


@isas
@byte_caches
def test_head_sizes_of_caches_of_bytes(cache_dtype: torch.dtype) -> None:
    for head_size in (1, 7, 8, 12, 33, 40, 100, 256, 512):
        case = Case(
            ((70, 1), (90, 20)),
            head_size=head_size,
            scale=head_size**-0.5,
            dtype=torch.bfloat16,
            cache_dtype=cache_dtype,
        )
        assert_near(case.run(backend), case.truth(), LARGEST)


def through_the_cache(value: Tensor, cache_dtype: torch.dtype, backend: AttentionBackend) -> Tensor:
    """Return values [T, 8] read back from a cache, by tokens that attend only to themselves."""
    tokens = len(value)
    kv_cache = new_cache(
        backend.kv_cache_shape(tokens, 8, 1, 8, dtype_name(cache_dtype)), cache_dtype
    )
    slots = torch.arange(tokens) * 8
    key = torch.zeros_like(value)
    backend.write_kv(key[:, None], value[:, None], kv_cache, slots)
    ones = torch.arange(tokens + 1, dtype=torch.int32)
    metadata = AttentionMetadata(
        num_reqs=tokens,
        num_tokens=tokens,
        max_query_len=1,
        max_seq_len=1,
        query_start_loc=ones,
        seq_lens=torch.ones(tokens, dtype=torch.int32),
        block_table=ones[:-1, None].contiguous(),
        slot_mapping=slots,
    )
    out = torch.empty_like(value)[:, None]
    backend.forward(key[:, None], kv_cache, metadata, out, AttentionParams(scale=1.0))
    return out[:, 0]


@isas
@dtypes
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_rounds_as_torch_does(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Every FP8 number, every midpoint between two, their neighbours, and too large numbers."""
    numbers = torch.arange(256, dtype=torch.uint8).view(cache_dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    halfway = (numbers[1:] + numbers[:-1]) / 2
    up, down = (halfway.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))
    most = torch.finfo(cache_dtype).max
    edges = torch.tensor([most * 1.03, most * 1.07, 1e38, torch.inf, torch.nan, 1e-30, 0.0])
    x = torch.cat([numbers, halfway, up, down, edges, -edges, torch.zeros(8)])
    x = x[: len(x) // 8 * 8].view(-1, 8).to(dtype)
    want = x.float().clamp(-most, most).to(cache_dtype).to(dtype)
    for other in (backend, ReferenceAttention()):
        got = through_the_cache(x, cache_dtype, other)
        assert torch.equal(got.nan_to_num(12345.0), want.nan_to_num(12345.0))


@isas
@dtypes
def test_int8_has_a_scale_for_each_head_of_each_token(dtype: torch.dtype) -> None:
    steps = torch.arange(-127, 129, dtype=torch.float32).view(-1, 8)
    steps[:, 0], steps[-1] = 127, 0  # every row's largest; the last row is nothing
    powers = torch.tensor([1.0, 2.0**-10, 2.0**6]).repeat(11)[: len(steps), None]
    x = (steps * powers).to(dtype)
    x[3, 5], x[4, 1] = torch.inf, torch.nan
    want = x.clone()
    want[3:5] = torch.nan
    for other in (backend, ReferenceAttention()):
        got = through_the_cache(x, torch.int8, other)
        assert torch.equal(got[3:5].isnan(), want[3:5].isnan())
        torch.testing.assert_close(got, want, rtol=2**-8, atol=0.0, equal_nan=True)


@isas
@dtypes
@byte_caches
def test_other_tokens_stay_in_the_future(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """A later token of the same chunk must not affect an earlier one."""

    class Broken(Case):
        def tensors(self, request: int) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = super().tensors(request)
            key, value = key.clone(), value.clone()
            key[21:], value[21:] = torch.nan, torch.nan
            return query, key, value

    got = Broken(((40, 40),), dtype=dtype, cache_dtype=cache_dtype).run(backend)
    whole = Case(((40, 40),), dtype=dtype, cache_dtype=cache_dtype).run(backend)
    assert_same(got[:21], whole[:21])
    assert got[21:].isnan().all()


@isas
@dtypes
def test_infinite_values_stay_in_the_future(dtype: torch.dtype) -> None:
    """A later token of the same chunk must not affect an earlier one."""

    class Broken(Case):
        def tensors(self, request: int) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = super().tensors(request)
            value = value.clone()
            value[20:] = torch.inf
            return query, key, value

    got = Broken(((40, 40),), dtype=dtype).run(backend)
    assert_same(got[:20], Case(((40, 40),), dtype=dtype).run(backend)[:20])
    assert (got[20:] == torch.inf).all()


@isas
@dtypes
@pytest.mark.parametrize("head_size", [16, 64])
def test_infinite_values_stay_outside_the_window(head_size: int, dtype: torch.dtype) -> None:
    """Some rows of a chunk see position 10 or 70, others do not see it yet, or no longer."""
    window, length = 40, 100
    good = Case(((length, length),), dtype=dtype, window=window, head_size=head_size)

    class Broken(Case):
        def tensors(self, request: int) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = super().tensors(request)
            value = value.clone()
            value[[10, 70]] = torch.inf
            return query, key, value

    got = Broken(good.requests, dtype=dtype, window=window, head_size=head_size).run(backend)
    sees = torch.zeros(length, dtype=torch.bool)
    sees[10 : 10 + window] = sees[70 : 70 + window] = True
    assert_same(got[~sees], good.run(backend)[~sees])
    assert (got[sees] == torch.inf).all()


@isas
@dtypes
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            case = Case((*MIXED, (900, 1), (700, 200)), dtype=dtype)
            few = Case(((1000, 1), (30, 1)), dtype=dtype, cache_dtype=torch.int8)
            results.append(torch.cat([case.run(backend), few.run(backend)]))
    finally:
        native.set_num_threads(0)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@isas
@pytest.mark.parametrize("cache_dtype", [None, *BYTES], ids=str)
def test_few_and_many_rows_change_no_bit(cache_dtype: torch.dtype | None) -> None:
    """More rows than share a task, over several segments, and each of some of them alone."""

    def run(*requests: tuple[int, int]) -> Tensor:
        seeds = (7,) * len(requests)
        case = Case(
            requests,
            heads=5,
            kv_heads=1,
            head_size=32,
            window=600,
            seeds=seeds,
            dtype=torch.bfloat16,
            cache_dtype=cache_dtype,
        )
        return case.run(backend)

    ends = (890, 896, 897, 1023, 1024)
    few = run(*((end, 1) for end in ends))
    alone = torch.cat([run((end, 1)) for end in ends])
    many = run((1024, 140))
    assert_same(few, alone)
    assert_same(few, many[[end - 1024 + 139 for end in ends]])


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exponentials_too_small_to_count_are_zero(dtype: torch.dtype) -> None:
    """A share below 2^-126 of the largest probability has no effect, and costs no time."""
    base = Case(((60, 60),), heads=1, kv_heads=1, head_size=8, dtype=dtype, scale=1.0)

    class Far(Case):
        def tensors(self, request: int) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = super().tensors(request)
            query, key = torch.zeros_like(query), torch.zeros_like(key)
            query[..., 0] = 1
            key[0, :, 0], value = 88.0, torch.full_like(value, 1e38)
            value[0] = 1.0
            return query, key, value

    case = Far(base.requests, heads=1, kv_heads=1, head_size=8, dtype=dtype, scale=1.0)
    assert (case.run(backend) == 1).all()


@isas
def test_block_size_changes_no_bit() -> None:
    for dtype, head_size in ((torch.float32, 16), (torch.bfloat16, 15), (torch.bfloat16, 32)):
        results = [
            Case(MIXED, block_size=size, dtype=dtype, head_size=head_size).run(backend)
            for size in BLOCK_SIZES
        ]
        for result in results[1:]:
            assert_same(result, results[0])


class Recorded:
    """Attention whose calls are recorded, and run by the plan."""

    def __getattr__(self, name: str) -> Any:
        return getattr(backend, name)

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        out: Tensor,
        params: AttentionParams,
    ) -> None:
        plan = _native.Plan()
        with native_ops().record(plan, Arena(2**12)):
            backend.forward(query, kv_cache, metadata, out, params)
        assert len(plan) == 1
        assert out.isnan().all(), "recording computes nothing"
        plan.run(metadata.num_tokens, metadata.num_reqs, 0)


@pytest.mark.parametrize(
    "features",
    [
        {"alibi": True, "window": 50},
        {"causal": False},
        {"causal": False, "bias_distance": 20, "window": 40},
        {"causal": False, "alibi": True, "sinks": True},
        {"causal": False, "product_distance": 20},
    ],
    ids=str,
)
def test_a_recorded_call_has_the_bits_of_a_direct_one(features: dict[str, int]) -> None:
    case = Case(WHOLE, **features)  # type: ignore[arg-type]
    assert_same(case.run(cast(AttentionBackend, Recorded())), case.run(backend))


def test_shapes_it_cannot_do() -> None:
    assert backend.kv_cache_shape(3, 16, 2, 64) == (3, 2, 2, 16, 64)
    assert backend.kv_cache_shape(3, 16, 2, 64, "int8") == (3, 2, 2, 16, 68)
    with pytest.raises(ConfigError, match="block_size=24"):
        backend.kv_cache_shape(3, 24, 2, 64)
    assert backend.latent_cache_shape(3, 16, 576) == (3, 16, 576)
    assert backend.latent_cache_shape(3, 16, 40, "int8") == (3, 16, 44)
    for size in (0, 577):
        with pytest.raises(ConfigError, match="head_size="):
            backend.kv_cache_shape(3, 16, 2, size)
        with pytest.raises(ConfigError, match="latent_size="):
            backend.latent_cache_shape(3, 16, size)


def test_what_each_thread_takes_is_planned() -> None:
    """One segment, so nothing is shared; each has a query and two sums for 36 rows at least."""

    def planned(threads: int, head_size: int) -> int:
        largest = LargestAttention(
            num_tokens=64,
            max_model_len=512,
            num_heads=8,
            num_kv_heads=2,
            head_size=head_size,
            num_threads=threads,
        )
        return cpu_attention().scratch_nbytes(largest)

    assert planned(2, 64) == 2 * planned(1, 64)
    assert planned(1, 64) >= 36 * 64 * (2 + 4 + 4) + 36 * 64 * (4 + 2)
    assert planned(1, 512) > planned(1, 64)
