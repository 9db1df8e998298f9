"""Products on tiles, real or emulated: the chosen variant, and the bits of every partition."""

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octavo import _native
from octavo.kernels import native
from octavo.kernels.weights import Codes, QuantizedWeight
from octavo.system.block_types import BLOCK_TYPES
from tests.kernels.test_blocks import pack, random_blocks
from tests.kernels.test_quant import FORMATS, random_codes
from tests.torch_ops import native_ops, with_outliers

ops = native_ops()


def variants() -> list[str]:
    return [isa for isa in native.available_isas() if isa.startswith("amx")]


@pytest.fixture(params=variants())
def tiles(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test on the variants that have tiles."""
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)
    native.set_num_threads(0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_emulated_tiles_are_built_for_tests_and_never_chosen() -> None:
    """`make dev` builds them: see OCTAVO_EMULATED_TILES in CMakeLists.txt."""
    code = "from octavo import _native; print(_native.isa(), *_native.available_isas())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    chosen, *available = out.stdout.split()
    assert available[-1] == "amx_emulated"
    assert chosen == available[0] != "amx_emulated"


def test_real_tiles_need_a_processor_that_has_them() -> None:
    if "amx" in native.available_isas():
        with open("/proc/cpuinfo") as file:
            flags = file.read()
        assert all(flag in flags for flag in ("amx_tile", "amx_bf16", "amx_int8"))
        assert native.available_isas()[0] == "amx"


# Whole panels and not, K of whole tiles and not, K so long that many rows are divided differently
SHAPES = [(70, 33), (130, 515), (64, 64), (192, 1000), (130, 2450)]
ROWS = [2, 15, 16, 17, 31, 32, 33, 49, 65, 100, 257, 300]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bfloat16_has_the_same_bits_in_any_company(n: int, k: int, tiles: str) -> None:
    """The number of threads affects how rows are divided."""
    x, bias = random(300, k), random(n, seed=2)
    packed = ops.pack_weight(random(n, k, seed=1))
    alone = {i: ops.linear(x[i : i + 1], packed, bias) for i in (0, 1, 14, 16, 31, 64, 256, 299)}
    few = [m for m in ROWS if k < 2000 or m in (2, 17, 65, 257, 300)]
    for threads, rows in ((1, few), (2, (17, 65, 257, 300)), (7, (2, 33, 100, 300))):
        native.set_num_threads(threads)
        for m in rows:
            y = ops.linear(x[300 - m :], packed, bias)
            for i, want in alone.items():
                if i >= 300 - m:
                    assert torch.equal(y[i - 300 + m], want[0]), (threads, m, i)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_written_past_the_caches(out_dtype: torch.dtype, tiles: str) -> None:
    """From 256 rows on, and if results are in whole cache lines."""
    for n in (64, 96, 100):
        x, packed = random(270, 40), ops.pack_weight(random(n, 40, seed=1))
        y = ops.linear(x, packed, None, out_dtype)
        parts = [ops.linear(x[i : i + 90], packed, None, out_dtype) for i in (0, 90, 180)]
        assert torch.equal(y, torch.cat(parts))


@pytest.mark.parametrize(("rows", "k"), [(3, 96), (33, 2450), (260, 2450), (300, 96)])
def test_gate_and_up_in_one_go(rows: int, k: int, tiles: str) -> None:
    x, w, bias = random(rows, k), random(128, k, seed=1), random(128, seed=2)
    codes = Codes(torch.randint(0, 120, (128, k), dtype=torch.uint8), torch.rand(128, -(-k // 128)))
    for weight in (
        ops.pack_weight(w),
        ops.quantize_weight([w], "int8", 0),
        ops.quantize_weight([w], "fp8", 0),
        ops.pack_quantized(128, k, "fp8", 128, [codes]),
    ):
        y = ops.linear(x, weight, bias)
        assert torch.equal(ops.linear(x[2:3], weight, bias), y[2:3])
        fused = ops.linear_act_and_mul(x, weight, bias, "silu")
        assert torch.equal(fused, ops.act_and_mul(y, "silu"))


@pytest.mark.parametrize(("n", "k"), [(70, 33), (130, 515), (64, 64), (128, 5000)])
def test_int8_has_the_bits_of_vectors(n: int, k: int, tiles: str) -> None:
    x, weight, bias = random(400, k), [random(n, k, seed=1)], random(n, seed=2)
    rows = [m for m in (1, 4, 5, 16, 17, 33, 65, 257, 400) if k < 1000 or m < 200]
    on_tiles = ops.quantize_weight(weight, "int8", 0)
    got = [ops.linear(x[:m], on_tiles, bias) for m in rows]
    native.set_isa("portable")
    on_vectors = ops.quantize_weight(weight, "int8", 0)
    for m, y in zip(rows, got, strict=True):
        assert torch.equal(y, ops.linear(x[:m], on_vectors, bias)), m


def grouped_weight(format: str, group: int, n: int, k: int) -> QuantizedWeight:
    """Return a weight with a scale for each group; blocks have a multiple of 32 or 256 inputs."""
    if format in BLOCK_TYPES:
        multiple = BLOCK_TYPES[format].numbers
        k = -(-k // multiple) * multiple
        return pack(random_blocks(n, k, format), format, k)
    return ops.pack_quantized(n, k, format, group, [random_codes(n, k, format, group)])


GROUPED = [*(f for f in FORMATS if f[1]), *((block_type, 0) for block_type in BLOCK_TYPES)]
grouped = pytest.mark.parametrize(("format", "group"), GROUPED)


@grouped
@pytest.mark.parametrize(("n", "k"), [(70, 33), (130, 417)])
def test_groups_have_the_bits_of_vectors(
    n: int, k: int, format: str, group: int, tiles: str
) -> None:
    """Up to 12 rows are multiplied on vectors; blocks of 32 have an odd number of them."""
    weight, bias = grouped_weight(format, group, n, k), random(n, seed=2)
    x = with_outliers(random(49, weight.k))
    on_vectors = torch.cat([ops.linear(some, weight, bias) for some in x.split(7)])
    for first, last in ((0, 49), (3, 16), (5, 21), (1, 18), (7, 40)):
        y = ops.linear(x[first:last], weight, bias)
        assert torch.equal(y, on_vectors[first:last]), (first, last)


@pytest.mark.parametrize(("format", "group"), [("int4", 32), ("nf4", 64), ("q6_k", 0)])
def test_groups_do_not_depend_on_the_partition(format: str, group: int, tiles: str) -> None:
    """With long sums, and with more rows than are quantized together."""
    for n, k, rows in ((70, 4900, 150), (128, 256, 400)):
        weight = grouped_weight(format, group, n, k)
        x = with_outliers(random(rows, weight.k))
        places = (0, 16, 127, 149, rows - 1)
        alone = [ops.linear(x[at : at + 1], weight)[0] for at in places]
        for threads in (1, 2, 7):
            native.set_num_threads(threads)
            y = ops.linear(x, weight)
            for at, want in zip(places, alone, strict=True):
                assert torch.equal(y[at], want), (threads, k, at)
    assert torch.equal(ops.linear_act_and_mul(x, weight, None, "silu"), ops.act_and_mul(y, "silu"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("format", "group"), [("int4", 32), ("int8_groups", 32), ("q4_k", 0)])
def test_what_is_not_finite_stays_in_its_row_of_groups(
    format: str, group: int, bad: float, tiles: str
) -> None:
    weight = grouped_weight(format, group, 70, 96)
    x = random(40, weight.k)
    good = ops.linear(x, weight)
    x[17, 33] = bad
    y = ops.linear(x, weight)
    assert not y[17].isfinite().any()
    rest = torch.arange(40) != 17
    assert torch.equal(y[rest], good[rest])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float, tiles: str) -> None:
    """NaN is between the rows, too, and in a buffer before the call."""
    weight = random(70, 33, seed=1)
    packed = ops.pack_weight(weight)
    ops.linear(torch.full((64, 40), math.nan, dtype=torch.bfloat16)[:, :33], packed)
    x = torch.full((40, 38), math.nan, dtype=torch.bfloat16)[:, :33]
    x.copy_(random(40, 33))
    good = ops.linear(x, packed)
    assert good.isfinite().all()
    x[17, 32] = bad
    y = ops.linear(x, packed)
    assert not y[17].isfinite().any()
    rest = torch.arange(40) != 17
    assert torch.equal(y[rest], good[rest])


def test_a_packed_table_gives_its_rows(tiles: str) -> None:
    table = random(70, 33)
    ids = torch.tensor([0, 69, 64, 3])
    assert torch.equal(ops.embedding(ops.pack_weight(table), ids), table[ids])


def test_scratch_is_told(tiles: str) -> None:
    """At least x as tiles; a fixed amount for each thread; at most 2,048 rows at once."""
    assert 3 * 16 * 64 * 2 <= _native.linear_scratch(33, 64, 1) < 3 * 16 * 64 * 4 + 2**15
    some, more = (_native.linear_scratch(2048, 576, t) for t in (1, 2))
    assert some >= 2048 * 576 * 2
    assert more - some < 2 * 2**20
    assert _native.linear_scratch(10**6, 576, 1) == some
    native.set_isa("portable")
    assert _native.linear_scratch(2048, 576, 2) == 0
