"""Linear layers with weights in 8-bit floats: against torch, and bitwise among other rows."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from octavo.kernels import native
from octavo.kernels.sizes import quantized_nbytes
from octavo.kernels.weights import Codes, QuantizedWeight
from tests.torch_ops import native_ops, reference_ops

ops, reference = native_ops(), reference_ops()
pytestmark = pytest.mark.usefixtures("isa")
groups = pytest.mark.parametrize("group", [0, 32, 64, 128])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
FINITE = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
SHAPES = [
    (0, 8, 8),
    (1, 1, 1),
    (2, 63, 3),
    (3, 65, 172),
    (5, 130, 129),
    (7, 64, 256),
    (97, 70, 515),
]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_codes(n: int, k: int, group: int) -> Codes:
    """Return codes of which every other eight inputs are normal: kernels may be faster there."""
    generator = torch.Generator().manual_seed(n + k)
    codes = FINITE[torch.randint(len(FINITE), (n, k), generator=generator)]
    codes[:, torch.arange(k) // 8 % 2 == 1] |= 8  # the last bit of the exponent
    codes[codes & 127 == 127] -= 1  # NaN
    return Codes(codes, torch.rand(n, -(-k // (group or k)), generator=generator) - 0.5)


def packed(n: int, k: int, group: int) -> QuantizedWeight:
    return ops.pack_quantized(n, k, "fp8", group, [random_codes(n, k, group)])


def weight_of(codes: Codes, group: int) -> Tensor:
    """Return the numbers of codes and scales by torch: float64 [N, K]."""
    numbers = codes.codes.view(torch.float8_e4m3fn).double()
    scales = codes.scales.double().repeat_interleave(group or numbers.shape[1], 1)
    return numbers * scales[:, : numbers.shape[1]]


def strided(x: Tensor) -> Tensor:
    """Return the same numbers with rows further apart, and NaN between: a wrong read shows."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), math.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


@groups
@dtypes
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear(m: int, n: int, k: int, dtype: torch.dtype, group: int):
    x, bias, codes = (
        strided(random(m, k, dtype=dtype)),
        random(n, dtype=dtype),
        random_codes(n, k, group),
    )
    weight = weight_of(codes, group)
    want = x.double() @ weight.T + bias.double()
    size = x.double().abs() @ weight.abs().T
    for table in (ops, reference):
        made = table.pack_quantized(n, k, "fp8", group, [codes])
        got = table.linear(x, made, bias, torch.float32)
        assert ((got - want).abs() <= 2e-6 * size + 2e-6).all()
        rounded = table.linear(x, made, bias)
        assert rounded.dtype == dtype
        assert torch.equal(rounded, got.to(dtype))


@dtypes
def test_every_code(dtype: torch.dtype):
    """One number in each row of x: the product is exact, from subnormal codes to 448."""
    codes = FINITE[None].repeat(3, 1)
    weight = ops.pack_quantized(3, len(FINITE), "fp8", 0, [Codes(codes, torch.ones(3, 1))])
    numbers = FINITE.view(torch.float8_e4m3fn).float()
    for rows in (1, len(FINITE)):
        x = torch.eye(len(FINITE), dtype=dtype)[-rows:]
        assert torch.equal(ops.linear(x, weight)[:, 1].float(), numbers[-rows:])


@groups
@dtypes
@pytest.mark.parametrize(("n", "k"), [(64, 64), (130, 165)])
def test_linear_is_batch_invariant(n: int, k: int, dtype: torch.dtype, group: int):
    x, bias, weight = random(100, k, dtype=dtype), random(n, dtype=dtype), packed(n, k, group)
    alone = torch.cat([ops.linear(x[i : i + 1], weight, bias) for i in range(100)])
    for m in (2, 3, 4, 5, 6, 7, 64, 100):
        for start in {0, (100 - m) // 2, 100 - m}:
            rows = slice(start, start + m)
            assert torch.equal(ops.linear(x[rows], weight, bias), alone[rows])


@groups
def test_linear_does_not_depend_on_threads(group: int, one_and_two_threads: tuple[int, int]):
    x, results = random(300, 200, dtype=torch.bfloat16), []
    for threads in one_and_two_threads:
        native.set_num_threads(threads)
        results.append(ops.linear(x, packed(300, 200, group)))
        results.append(ops.linear(x, ops.quantize_weight([random(300, 200)], "fp8", 0)))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


@groups
@dtypes
@pytest.mark.parametrize("rows", [3, 40, 300])
def test_gate_and_up_in_one_go(rows: int, dtype: torch.dtype, group: int):
    x, bias, weight = (
        random(rows, 200, dtype=dtype),
        random(256, dtype=dtype),
        packed(256, 200, group),
    )
    apart = ops.act_and_mul(ops.linear(x, weight, bias), "silu")
    assert torch.equal(ops.linear_act_and_mul(x, weight, bias, "silu"), apart)


@groups
@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, group: int, bad: float):
    x, weight = random(8, 101, dtype=dtype), packed(70, 101, group)
    good = ops.linear(x, weight)
    x[3, 100] = bad
    y = ops.linear(x, weight)
    assert not y[3].isfinite().any()
    rest = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(y[rest], good[rest])


@groups
def test_pack_in_parts(group: int):
    n, k = 203, 77
    whole = random_codes(n, k, group)
    parts = [
        Codes(whole.codes[a:b].clone(), whole.scales[a:b].clone())
        for a, b in itertools.pairwise([0, 100, 101, 128, n])
    ]
    x, weight = random(3, k), packed(n, k, group)
    assert torch.equal(
        ops.linear(x, ops.pack_quantized(n, k, "fp8", group, iter(parts))), ops.linear(x, weight)
    )
    assert weight.nbytes == quantized_nbytes(n, k, "fp8", group)


@dtypes
@pytest.mark.parametrize(("n", "k"), [(1, 1), (70, 172)])
def test_quantize_weight(n: int, k: int, dtype: torch.dtype):
    """The numbers are those that torch rounds to; the largest of each output is exact."""
    weight = random(n, k, dtype=dtype)
    got = ops.linear(torch.eye(k), ops.quantize_weight([strided(weight)], "fp8", 0)).T
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    want = (weight.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    assert torch.equal(got, want)
    assert torch.equal(
        got, reference.linear(torch.eye(k), reference.quantize_weight([weight], "fp8", 0)).T
    )


def test_quantize_in_parts():
    weight = random(203, 77)
    parts = [weight[:100], weight[100:101], weight[101:]]
    x = random(3, 77)
    assert torch.equal(
        ops.linear(x, ops.quantize_weight(parts, "fp8", 0)),
        ops.linear(x, ops.quantize_weight([weight], "fp8", 0)),
    )


def test_quantize_zeros_and_what_is_not_finite():
    weight = random(70, 256)
    weight[2] = 0
    weight[5] = 1e-38
    weight[3, 200], weight[4, 9] = math.nan, math.inf
    y = ops.linear(random(2, 256), ops.quantize_weight([weight], "fp8", 0))
    assert (y[:, [2, 5]] == 0).all()
    assert not y[:, [3, 4]].isfinite().any()
    assert y[:, [0, 1, *range(6, 70)]].isfinite().all()
