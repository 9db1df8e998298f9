"""The native attention kernel against dense attention in float64, and bitwise against itself."""

import pytest
import torch
from torch import Tensor

from octavo.attention.cpu import BLOCK_SIZES, CPUAttention
from octavo.errors import ConfigError
from octavo.kernels import native
from tests.attention.cases import Case, assert_near

backend = CPUAttention()
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
isas = pytest.mark.usefixtures("isa")
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
@pytest.mark.parametrize("head_size", [8, 24, 40, 64, 128, 256])
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    case = Case(((70, 1), (90, 20)), head_size=head_size, dtype=dtype, scale=head_size**-0.5)
    assert_near(case.run(backend), case.truth())


@isas
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (14, 2), (40, 1)])
def test_groups_of_heads(heads: int, kv_heads: int) -> None:
    case = Case(((70, 1), (40, 40), (81, 5)), heads=heads, kv_heads=kv_heads)
    assert_near(case.run(backend), case.truth())


@isas
@dtypes
@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 1000])
@pytest.mark.parametrize("block_size", [8, 128])
def test_sliding_window(window: int, block_size: int, dtype: torch.dtype) -> None:
    """Blocks before the window do not exist: reading one would end the process."""
    case = Case((*MIXED, (300, 1), (300, 90)), window=window, block_size=block_size, dtype=dtype)
    assert_near(case.run(backend), case.truth())


@isas
@dtypes
@pytest.mark.parametrize("block_size", [8, 32])
def test_soft_cap_and_alibi(block_size: int, dtype: torch.dtype) -> None:
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
    case = Case(((100, 100),), scale=1e4)
    assert_near(case.run(backend), case.truth())


FEATURES = [
    {},
    {"window": 50},
    {"window": 3, "block_size": 8},
    {"soft_cap": 3.0, "alibi": True, "heads": 6, "kv_heads": 1},
    {"heads": 2, "kv_heads": 2, "head_size": 40, "block_size": 128},
]


@isas
@dtypes
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_batch_and_chunks_change_no_bit(features: dict[str, int], dtype: torch.dtype) -> None:
    """One request of 200 tokens: whole, in chunks, token by token; alone and among others."""
    length = 200

    def run(*requests: tuple[int, int], seeds: tuple[int, ...] = (7,)) -> Tensor:
        return Case(requests, seeds=seeds, dtype=dtype, **features).run(backend)  # type: ignore[arg-type]

    whole = run((length, length))
    for size in (7, 16, 130):
        ends = [*range(size, length, size), length]
        chunks = [run((end, (end - 1) % size + 1)) for end in ends]
        assert_same(torch.cat(chunks), whole)
    for end in (1, 2, 15, 16, 17, 50, 64, 65, 66, 128, 129, 200):
        assert_same(run((end, 1)), whole[end - 1 : end])
        others = (80, 1), (90, 60), (end, 1), (33, 33), (1, 1)
        among = run(*others, seeds=(1, 2, 7, 3, 4))
        assert_same(among[61:62], whole[end - 1 : end])


@isas
@dtypes
def test_infinite_values_stay_in_the_future(dtype: torch.dtype) -> None:
    """What a later token of the same chunk holds must not reach an earlier one."""

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
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            case = Case((*MIXED, (900, 1), (700, 200)), dtype=dtype)
            results.append(case.run(backend))
    finally:
        native.set_num_threads(0)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@isas
def test_block_size_changes_no_bit() -> None:
    results = [Case(MIXED, block_size=size).run(backend) for size in BLOCK_SIZES]
    for result in results[1:]:
        assert_same(result, results[0])


def test_shapes_it_cannot_do() -> None:
    assert backend.kv_cache_shape(3, 16, 2, 64) == (3, 2, 2, 16, 64)
    with pytest.raises(ConfigError, match="block_size=24"):
        backend.kv_cache_shape(3, 24, 2, 64)
    for head_size in (0, 12, 520):
        with pytest.raises(ConfigError, match="head_size="):
            backend.kv_cache_shape(3, 16, 2, head_size)
