"""Attention over latents against dense attention in float64, and bitwise against itself."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.attention.base import LargestAttention
from octavo.attention.cpu import CPUAttention
from octavo.attention.reference import ReferenceAttention
from octavo.kernels import native
from tests.attention.cases import Case, assert_near
from tests.attention.test_cpu import BYTES, LARGEST, assert_same, dtypes, isas
from tests.torch_ops import cpu_attention

backend = cpu_attention()
caches = pytest.mark.parametrize("cache_dtype", [None, *BYTES], ids=str)
MIXED = ((1, 1), (70, 1), (150, 7), (5, 0), (130, 130), (16, 2))


def latents(requests: tuple[tuple[int, int], ...], **shape: object) -> Case:
    """Return a case of few heads with odd sizes; `shape` replaces some of them."""
    base = Case(requests, heads=5, kv_heads=1, head_size=41, value_size=33, scale=0.2)
    return replace(base, **shape)  # type: ignore[arg-type]


@isas
@dtypes
@caches
def test_attention(cache_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Odd sizes, those of tile registers, and values that are whole keys."""
    for sizes in (
        {},
        {"block_size": 8, "head_size": 64, "value_size": 32},
        {"block_size": 128, "head_size": 96, "value_size": 64, "heads": 3},
        {"heads": 20, "head_size": 24, "value_size": 24, "block_size": 32},
    ):
        case = latents(MIXED, dtype=dtype, cache_dtype=cache_dtype, **sizes)
        assert_near(case.run(backend), case.truth(), LARGEST)
    assert_same(case.run(backend, views=True), case.run(backend))


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_published_size(dtype: torch.dtype) -> None:
    """The size of DeepSeek's latents; the second request has more segments than one."""
    case = latents(
        ((40, 3), (520, 1)), heads=7, head_size=576, value_size=512, scale=0.03, dtype=dtype
    )
    assert_near(case.run(backend), case.truth(), LARGEST)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
def test_reference(cache_dtype: torch.dtype | None) -> None:
    case = latents(MIXED, cache_dtype=cache_dtype)
    assert_near(case.run(ReferenceAttention()), case.truth(), LARGEST)


@isas
@dtypes
@caches
def test_batch_and_chunks_change_no_bit(
    cache_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    """One request: whole, in chunks, token by token; alone and among others; any block size."""

    def run(
        *requests: tuple[int, int], seeds: tuple[int, ...] = (7,), block_size: int = 16
    ) -> Tensor:
        return latents(
            requests, seeds=seeds, dtype=dtype, cache_dtype=cache_dtype, block_size=block_size
        ).run(backend)

    length = 150
    whole = run((length, length))
    assert_same(run((length, length), block_size=8), whole)
    for size in (33, 64):
        ends = [*range(size, length, size), length]
        assert_same(torch.cat([run((end, (end - 1) % size + 1)) for end in ends]), whole)
    for end in (1, 17, 65, 128, 150):
        assert_same(run((end, 1)), whole[end - 1 : end])
        among = run((80, 1), (90, 60), (end, 1), (33, 33), seeds=(1, 2, 7, 3))
        assert_same(among[61:62], whole[end - 1 : end])


@isas
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
def test_shared_segments_change_no_bit(cache_dtype: torch.dtype | None) -> None:
    """Rows that threads share by segments, more rows than a task has, and any number of threads."""

    def run(*requests: tuple[int, int], heads: int = 40) -> Tensor:
        seeds = (7,) * len(requests)
        case = latents(requests, heads=heads, seeds=seeds, dtype=torch.bfloat16)
        return replace(case, cache_dtype=cache_dtype).run(backend)

    many = run((1024, 5))
    try:
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            assert_same(run((1023, 1), (1024, 1)), many[3:])
    finally:
        native.set_num_threads(0)


@isas
@dtypes
def test_infinite_latents_stay_in_the_future(dtype: torch.dtype) -> None:
    class Broken(Case):
        def tensors(self, request: int) -> tuple[Tensor, Tensor, Tensor]:
            query, key, _ = super().tensors(request)
            key = key.clone()
            key[20:] = torch.inf
            return query, key, key

    good = latents(((40, 40),), dtype=dtype)
    got = Broken(**good.__dict__).run(backend)
    assert_same(got[:20], good.run(backend)[:20])
    assert not got[20:].isfinite().any()


def test_memory_of_shared_segments_is_planned() -> None:
    """All heads of a token share one task; many tasks share a limited memory."""

    def planned(heads: int, threads: int = 2, length: int = 8192) -> int:
        return CPUAttention().scratch_nbytes(
            LargestAttention(512, length, heads, 1, 576, threads, latent=True)
        )

    segment = 4 * (576 + 2)
    assert planned(64) - planned(64, length=512) == 8 * 16 * 128 * segment
    assert planned(64, 64) - planned(64, 64, 512) == 64 << 20
    longest = 202_752
    assert planned(128, 1, longest) - planned(128, 1, 512) == longest // 512 * 128 * segment
