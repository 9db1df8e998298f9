"""Every native operation against float64 or the plain torch reference, for every instruction set,
and bitwise against itself among other rows."""

import math
import os
from collections.abc import Callable
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from octavo import _native
from octavo.kernels import native
from octavo.kernels.base import Activation, activate
from octavo.kernels.native import NativeOps
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.routing import Gate
from octavo.kernels.weights import PackedWeight, QuantizedWeight
from tests.torch_ops import native_ops, reference_ops

ops, reference = native_ops(), reference_ops()
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
pytestmark = pytest.mark.usefixtures("isa")

# Half a unit in the last place, relative
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def assert_same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    assert torch.equal(bits(a), bits(b))


def assert_near(got: Tensor, truth: Tensor, error: float = 4e-6, roundings: int = 1) -> None:
    """Check a result: within `roundings` of got's dtype plus the truth's `error`."""
    assert got.shape == truth.shape
    bound = error * (1 + truth.abs()) + roundings * ROUNDING[got.dtype] * truth.abs()
    if got.dtype == torch.float16:
        bound = bound + 2.0**-25  # subnormals
    assert ((got.double() - truth.double()).abs() <= bound).all()


def strided(x: Tensor) -> Tensor:
    """Return the same numbers with rows further apart, and other numbers between."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), 7.0, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


# ---- linear ----


def check_linear(m: int, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x, w, bias = (
        strided(random(m, k, dtype=dtype)),
        random(n, k, dtype=dtype, seed=1),
        random(n, dtype=dtype, seed=2),
    )
    packed = ops.pack_weight(strided(w))
    for b in (None, bias):
        got = ops.linear(x, packed, b, out_dtype)
        truth = x.double() @ w.double().T + (0 if b is None else b.double())
        # An omitted or repeated product would change about 1 / k of this
        size = x.double().abs() @ w.double().abs().T + bias.double().abs()
        assert got.dtype == out_dtype
        bound = 2.0**-20 * size + ROUNDING[out_dtype] * truth.abs() + 1e-7
        assert ((got.double() - truth).abs() <= bound).all()


@dtypes
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (0, 8, 8),
        (1, 1, 1),
        (1, 64, 2),
        (2, 63, 3),
        (3, 65, 17),
        (5, 130, 64),
        (6, 96, 129),
        (7, 16, 1023),
        (13, 40, 1025),
        (97, 70, 515),
        (200, 33, 48),
    ],
)
def test_linear(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    check_linear(m, n, k, dtype, dtype)


@dtypes
def test_linear_wider_result(dtype: torch.dtype) -> None:
    check_linear(5, 100, 2050, dtype, torch.float32)


@dtypes
def test_linear_many_rows(dtype: torch.dtype) -> None:
    check_linear(700, 65, 33, dtype, dtype)


@dtypes
def test_linear_of_infinity_stays_in_its_row(dtype: torch.dtype) -> None:
    x = torch.ones(8, 7, dtype=dtype)
    x[3] = math.inf
    y = ops.linear(x, ops.pack_weight(torch.ones(70, 7, dtype=dtype)))
    assert (y[3] == math.inf).all()
    assert (y[[0, 1, 2, 4, 5, 6, 7]] == 7).all()


@dtypes
def test_linear_reads_no_neighbours(dtype: torch.dtype) -> None:
    """NaN between the rows of x, and odd k: no data beyond a row's end may be read."""
    x = torch.full((9, 12), math.nan, dtype=dtype)
    x[:, :7] = 1
    y = ops.linear(x[:, :7], ops.pack_weight(torch.ones(5, 7, dtype=dtype)))
    assert (y == 7).all()


@dtypes
def test_pack_in_parts(dtype: torch.dtype) -> None:
    weight, x = random(203, 37, dtype=dtype), random(4, 37, dtype=dtype, seed=1)
    whole = ops.pack_weight(weight)
    parts = ops.pack_weight([weight[:100], weight[100:101], weight[101:128], weight[128:]])
    assert (parts.n, parts.k) == (203, 37)
    assert_same(ops.linear(x, parts), ops.linear(x, whole))


@dtypes
@pytest.mark.parametrize(("n", "k"), [(64, 64), (130, 1537), (70, 33)])
def test_linear_is_batch_invariant(n: int, k: int, dtype: torch.dtype) -> None:
    x, packed = random(97, k, dtype=dtype), ops.pack_weight(random(n, k, dtype=dtype, seed=1))
    bias = random(n, dtype=dtype, seed=2)
    alone = torch.cat([ops.linear(x[i : i + 1], packed, bias) for i in range(97)])
    for m in (2, 5, 6, 7, 64, 97):
        for start in {0, (97 - m) // 2, 97 - m}:
            rows = slice(start, start + m)
            assert_same(ops.linear(x[rows], packed, bias), alone[rows])


@dtypes
def test_linear_does_not_depend_on_threads(
    dtype: torch.dtype, one_and_two_threads: tuple[int, int]
) -> None:
    x, packed = random(70, 500, dtype=dtype), ops.pack_weight(random(300, 500, dtype=dtype, seed=1))
    results = []
    for threads in one_and_two_threads:
        native.set_num_threads(threads)
        results.append(ops.linear(x, packed))
    assert_same(*results)


@dtypes
@pytest.mark.parametrize(
    ("rows", "heads", "n", "k"), [(0, 2, 8, 8), (3, 5, 33, 11), (17, 3, 64, 70), (300, 2, 13, 40)]
)
def test_head_linear(rows: int, heads: int, n: int, k: int, dtype: torch.dtype) -> None:
    x = strided(random(rows, heads, k, dtype=dtype))
    weight = random(heads * n, k, dtype=dtype, seed=1)
    wide = torch.full((rows, heads, n + 9), 7.0, dtype=dtype)
    out = ops.head_linear(x, ops.pack_weight(weight), heads, wide[..., 3 : n + 3])
    truth = torch.einsum("thk,hnk->thn", x.double(), weight.double().view(heads, n, k))
    assert_near(out, truth, 2.0**-16)
    assert (wide[..., :3] == 7).all()
    assert (wide[..., n + 3 :] == 7).all()
    plain = reference.head_linear(x, reference.pack_weight(weight), heads)
    assert_near(plain, truth, 2.0**-16)
    for row in range(0, rows, 7):  # as alone, and as a product of one head
        alone = ops.head_linear(x[row : row + 1], ops.pack_weight(weight), heads)
        assert_same(alone, out[row : row + 1])
    for head in range(heads):
        one = ops.linear(x[:, head], ops.pack_weight(weight.view(heads, n, k)[head].contiguous()))
        assert_same(one, out[:, head])


def test_linear_refuses_foreign_weights() -> None:
    plain = reference.pack_weight(random(8, 8))
    with pytest.raises(AssertionError):
        ops.linear(random(1, 8), plain)


# ---- norms ----

DIMS = [1, 7, 8, 16, 31, 64, 100, 576]


@dtypes
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dim", DIMS)
def test_rms_norm(dim: int, offset: float, dtype: torch.dtype) -> None:
    x, weight = strided(random(5, dim, dtype=dtype)), random(dim, dtype=dtype, seed=1)
    got = ops.rms_norm(x, weight, 1e-5, offset)
    wide = x.double()
    truth = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    truth = truth * (weight.double() + offset)
    assert_near(got, truth, error=2e-6, roundings=2 if offset == 0.0 else 1)
    assert_near(got, reference.rms_norm(x, weight, 1e-5, offset), error=2e-6, roundings=3)


@dtypes
def test_rms_norm_rounds_as_llama_and_gemma_do(dtype: torch.dtype) -> None:
    """Almost all elements equal the reference bit for bit: one rounding more or less would show."""
    x, weight = random(50, 256, dtype=dtype), random(256, dtype=dtype, seed=1)
    for offset in (0.0, 1.0):
        got, truth = (
            ops.rms_norm(x, weight, 1e-6, offset),
            reference.rms_norm(x, weight, 1e-6, offset),
        )
        if dtype != torch.float32:
            assert (got == truth).double().mean() > 0.99


@dtypes
def test_rms_norm_of_heads_in_place(dtype: torch.dtype) -> None:
    qkv = random(6, 10 * 24, dtype=dtype)
    heads, weight = qkv[:, 24 : 5 * 24].view(6, 4, 24), random(24, dtype=dtype, seed=1)
    before, rest = heads.clone(), qkv[:, 5 * 24 :].clone()
    want = ops.rms_norm(before.reshape(24, 24), weight, 1e-6).view(6, 4, 24)
    assert_same(ops.rms_norm(heads, weight, 1e-6), want)
    assert ops.rms_norm(heads, weight, 1e-6, out=heads) is heads
    assert_same(heads, want)
    assert_same(qkv[:, 5 * 24 :], rest)


@dtypes
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fused_add_rms_norm(offset: float, dtype: torch.dtype) -> None:
    x, residual = strided(random(7, 70, dtype=dtype)), random(7, 70, dtype=dtype, seed=1)
    weight = random(70, dtype=dtype, seed=2)
    before = residual.clone()
    y, total = ops.fused_add_rms_norm(x, residual, weight, 1e-5, offset)
    assert_same(total, x + residual)
    assert_same(y, ops.rms_norm(total, weight, 1e-5, offset))
    assert_same(residual, before)


@dtypes
@pytest.mark.parametrize("dim", DIMS)
def test_layer_norm(dim: int, dtype: torch.dtype) -> None:
    x = strided(random(5, dim, dtype=dtype) + 3)
    weight, bias = random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2)
    for b, offset in ((None, 0.0), (bias, 0.0), (bias, 1.0)):
        wide_bias = None if b is None else b.double()
        truth = torch.nn.functional.layer_norm(
            x.double(), (dim,), weight.double() + offset, wide_bias, 1e-5
        )
        for table in (ops, reference):
            assert_near(table.layer_norm(x, weight, b, 1e-5, offset), truth, error=1e-5)


@dtypes
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fused_add_layer_norm(offset: float, dtype: torch.dtype) -> None:
    x, residual = strided(random(7, 70, dtype=dtype)), random(7, 70, dtype=dtype, seed=1)
    weight, bias = random(70, dtype=dtype, seed=2), random(70, dtype=dtype, seed=3)
    before = residual.clone()
    for b in (None, bias):
        y, total = ops.fused_add_layer_norm(x, residual, weight, b, 1e-5, offset)
        assert_same(total, x + residual)
        assert_same(y, ops.layer_norm(total, weight, b, 1e-5, offset))
        assert_same(residual, before)


@dtypes
@pytest.mark.parametrize("dim", DIMS)
def test_rms(dim: int, dtype: torch.dtype) -> None:
    x = strided(
        random(5, dim, dtype=dtype) * torch.tensor([[3.0], [1], [0.1], [1e-3], [0]]).to(dtype)
    )
    for least in (0.0, 1e-5):
        truth = x.double().square().mean(-1, keepdim=True).clamp(min=least).sqrt()
        for table in (ops, reference):
            assert_near(table.rms(x, least), truth, error=1e-6)
            inverse = table.rms(x, least, inverse=True)
            assert_near(inverse[truth > 0], 1 / truth[truth > 0], error=1e-3 if least else 2e-3)
            assert inverse.shape == (5, 1)


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("multiplier", [-0.3, 1.6448536])
def test_cutoff(multiplier: float, dim: int, dtype: torch.dtype) -> None:
    x = strided(random(5, dim, dtype=dtype) + 3)
    wide = x.double()
    deviation = wide.std(-1, correction=0, keepdim=True)
    truth = (wide - wide.mean(-1, keepdim=True) - multiplier * deviation).relu()
    for table in (ops, reference):
        assert_near(table.cutoff(x, multiplier), truth, error=1e-5)
    equal = torch.full((2, dim), 0.3, dtype=dtype)
    assert ops.cutoff(equal, 1.0).abs().max() < 1e-6


# ---- elementwise ----

WIDTHS = [1, 3, 8, 17, 64, 2500]


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("sigmoid", torch.sigmoid),
    ],
)
def test_gated(name: Gate, f: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> None:
    x = strided(3 * random(4, 2 * width, dtype=dtype))
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(ops.act_and_mul(x, name), f(gate) * up, roundings=3)
    assert_near(reference.act_and_mul(x, name), f(gate) * up, roundings=3)
    for factor in (gate, gate[0], gate[:, :1], gate[0, :1]):
        factor = factor.to(dtype)
        expected = up * f(factor.double())
        for table in (ops, reference):
            assert_near(table.multiply(up.to(dtype), factor, name), expected, 1e-5, roundings=3)


@dtypes
def test_factors_of_heads(dtype: torch.dtype) -> None:
    """Heads and their gates in turn in each row, as in some projections."""
    x = random(5, 6, 24, dtype=dtype)
    heads, gates = x[:, 0::2], x[:, 1::2]
    assert_same(ops.multiply(heads, gates), heads * gates)
    assert_same(ops.multiply(heads, gates[:, 0, :1]), heads * gates[:, :1, :1])
    out = torch.full((5, 100), 7.0, dtype=dtype)
    ops.multiply(heads, gates, out=out[:, 9:81].view(5, 3, 24))
    assert_same(out[:, 9:81], (heads * gates).reshape(5, -1))
    assert (out[:, :9] == 7).all()
    assert (out[:, 81:] == 7).all()


GATES: list[Gate] = ["silu", "gelu", "gelu_tanh", "sigmoid", "relu2"]


@dtypes
@pytest.mark.parametrize("width", [128, 96, 60])  # whole panels, on some processors, on none
def test_gate_and_up_in_one_go(width: int, dtype: torch.dtype) -> None:
    """With and without a bias, each number of rows with each activation."""
    w = random(2 * width, 70, dtype=dtype, seed=1)
    bias = random(2 * width, dtype=dtype, seed=2)
    weights: list[PackedWeight | QuantizedWeight] = [ops.pack_weight(w)]
    weights += [ops.quantize_weight([w], "int8", 0), ops.quantize_weight([w], "int4_levels", 32)]
    for weight, rows, (i, activation) in product(weights, (1, 5, 100), enumerate(GATES)):
        x, b = strided(random(rows, 70, dtype=dtype)), bias if (rows + i) % 2 else None
        apart = ops.act_and_mul(ops.linear(x, weight, b), activation)
        assert_same(ops.linear_act_and_mul(x, weight, b, activation), apart)


@dtypes
def test_activation_after_a_product(dtype: torch.dtype) -> None:
    """The same bits as apart; outputs of whole panels and not; formats with tiles and without."""
    w = random(100, 70, dtype=dtype, seed=1)
    bias = random(100, dtype=dtype, seed=2)
    weights: list[PackedWeight | QuantizedWeight] = [ops.pack_weight(w)]
    weights += [ops.quantize_weight([w], "int8", 0), ops.quantize_weight([w], "int4_levels", 32)]
    for weight, rows, activation in product(weights, (1, 5, 100), get_args(Activation)):
        x, b = strided(random(rows, 70, dtype=dtype)), bias if rows % 2 else None
        apart = activate(ops, ops.linear(x, weight, b), activation)
        assert_same(ops.linear_act(x, weight, b, activation), apart)


@dtypes
@pytest.mark.parametrize("k", [384, 3100])  # K in one block, and in several, of many rows
def test_many_rows_have_the_bits_of_one(k: int, dtype: torch.dtype) -> None:
    weight = ops.pack_weight(random(130, k, dtype=dtype, seed=1))
    x = random(500, k, dtype=dtype)
    together = ops.linear(x, weight)
    for row in (0, 95, 96, 383, 384, 499):
        assert_same(together[row : row + 1], ops.linear(x[row : row + 1], weight))


@dtypes
def test_gated_rounds_as_hugging_face_does(dtype: torch.dtype) -> None:
    x = random(20, 512, dtype=dtype)
    if dtype != torch.float32:
        same = ops.act_and_mul(x, "silu") == reference.act_and_mul(x, "silu")
        assert same.double().mean() > 0.99


@dtypes
def test_gelu_silu_relu_sigmoid_xielu_soft_cap(dtype: torch.dtype) -> None:
    x = 4 * random(3, 333, dtype=dtype)
    gelu = torch.nn.functional.gelu
    assert_near(ops.gelu(x, "none"), gelu(x.double()))
    assert_near(ops.gelu(x, "tanh"), gelu(x.double(), approximate="tanh"))
    assert_near(ops.silu(x), torch.nn.functional.silu(x.double()))
    assert_same(ops.relu(x), reference.relu(x))
    assert_near(ops.sigmoid(x), x.double().sigmoid())
    alphas = torch.tensor([-30.0, 1.7]).to(dtype)
    fine = x * torch.logspace(-6, 1, 333).to(dtype)
    for values in (x, fine, torch.tensor([[0.0, -0.0, 90.0, -90.0]], dtype=dtype)):
        wide = values.double()
        positive, negative = torch.nn.functional.softplus(alphas.double())
        rest = torch.expm1(wide.clamp(max=-1e-6)) - wide
        truth = torch.where(wide > 0, positive * wide**2, (negative + 0.5) * rest) + 0.5 * wide
        for table in (ops, reference):
            assert_near(table.xielu(values, alphas), truth, error=2e-6)
    for cap in (1.5, 50.0):
        for table in (ops, reference):
            capped = x.clone()
            table.soft_cap_(capped, cap)
            assert_near(capped, cap * torch.tanh(x.double() / cap), error=1e-5)


@dtypes
def test_clip(dtype: torch.dtype) -> None:
    x = random(5, 70, dtype=dtype)
    for bounds in ([-0.3, 0.7], [-torch.inf, 0.2], [-torch.inf, torch.inf]):
        limits = torch.tensor(bounds)
        truth = x.float().clamp(*bounds).to(dtype)
        for table in (ops, reference):
            assert_same(table.clip(x, limits), truth)
            changed = x.clone()
            part = changed[:, 3:50]
            table.clip(part, limits, part)
            assert_same(changed[:, 3:50], truth[:, 3:50])
            assert_same(changed[:, 50:], x[:, 50:])


def apply(kind: int, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _native.kernels.unary(
        x=x.data_ptr(),
        out=out.data_ptr(),
        out_stride=x.numel(),
        rows=1,
        dim=x.numel(),
        param=0.0,
        kind=kind,
        dtype=0,
    )
    return out


def ulps(got: Tensor, truth: Tensor) -> float:
    """Return the largest error in units in the last place of the true value."""
    exponent = torch.frexp(truth).exponent.clamp(min=-125).double()
    return float(((got.double() - truth).abs() / torch.exp2(exponent - 24)).max())


def test_exp() -> None:
    x = torch.cat([torch.linspace(-104, 88.7, 200_001), torch.linspace(-1e-3, 1e-3, 10_001)])
    assert ulps(ops.exp(x), torch.exp(x.double())) < 1.5
    special = torch.tensor([-math.inf, math.inf, math.nan, 0.0, -0.0, 88.8, 1e30, -1e30, -104.1])
    got = ops.exp(special)
    assert got[2].isnan()
    assert got[[0, 1, 3, 4, 5, 6, 7, 8]].tolist() == [0, math.inf, 1, 1, math.inf, math.inf, 0, 0]
    x = random(7)
    assert torch.allclose(ops.exp(x), reference.exp(x))


def test_log() -> None:
    x = torch.cat(
        [torch.linspace(1e-3, 4, 200_001), torch.logspace(-44, 38, 100_001), torch.tensor([1e-45])]
    )
    assert ulps(ops.log(x), torch.log(x.double())) < 2
    special = torch.tensor([0.0, -0.0, math.inf, 1.0, -1.0, -math.inf, math.nan])
    got = ops.log(special)
    assert got[:4].tolist() == [-math.inf, -math.inf, math.inf, 0]
    assert got[4:].isnan().all()
    x = random(7).abs()
    assert torch.allclose(ops.log(x), reference.log(x))


def test_tanh_and_erf() -> None:
    x = torch.cat([torch.linspace(-10, 10, 200_001), torch.linspace(-1e-3, 1e-3, 10_000)])
    special = torch.tensor([-math.inf, math.inf, 0.0, -0.0, 1e-40, math.nan])
    for kind, f in ((2, torch.tanh), (3, torch.erf)):
        assert ulps(apply(kind, x), f(x.double())) < 2
        got = apply(kind, special)
        assert got[:3].tolist() == [-1, 1, 0]
        assert math.copysign(1, got[3].item()) == -1
        assert got[4].item() == pytest.approx(f(special[4].double()).item(), rel=1e-4)
        assert got[5].isnan()


def capped(x: Tensor) -> Tensor:
    x = x.clone()
    ops.soft_cap_(x, 3)
    return x


@dtypes
def test_elementwise_results_do_not_depend_on_place(dtype: torch.dtype) -> None:
    x = 3 * random(1100, dtype=dtype)
    whole = [ops.gelu(x, "none"), ops.gelu(x, "tanh"), ops.exp(x), ops.log(x), capped(x)]
    for start, length in ((0, 1), (5, 3), (17, 15), (3, 1030)):
        part = x[start : start + length].contiguous()
        parts = [
            ops.gelu(part, "none"),
            ops.gelu(part, "tanh"),
            ops.exp(part),
            ops.log(part),
            capped(part),
        ]
        for a, b in zip(whole, parts, strict=True):
            assert torch.equal(bits(a[start : start + length]), bits(b))


@dtypes
def test_every_16_bit_number_survives_and_rounds(dtype: torch.dtype) -> None:
    """Conversions: all 65,536 numbers are restored; float32 rounds as torch rounds."""
    if dtype == torch.float32:
        return
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    one = ops.pack_weight(torch.ones(1, 1, dtype=dtype))
    finite = every[every.isfinite()][:, None]
    assert torch.equal(ops.linear(finite, one, out_dtype=torch.float32), subnormal_safe(finite))
    wide = torch.cat([random(5000) * 10.0**e for e in range(-9, 6)])
    ties = (finite.float() + finite.float().nextafter(torch.tensor(math.inf))) / 2
    wide = torch.cat([wide, ties[:, 0], torch.tensor([65519.9, 65520.0, -65520.0, 3e38, 2.0**-25])])
    got = ops.linear(wide[:, None], ops.pack_weight(torch.ones(1, 1)), out_dtype=dtype)
    assert torch.equal(got[:, 0], wide.to(dtype))


def subnormal_safe(x: Tensor) -> Tensor:
    """The bfloat16 dot products of AVX-512, AMX and ARM treat subnormal numbers as zero."""
    wide = x.float()
    flushing = ("amx", "avx512_bf16", "neon_bf16", "amx_emulated")
    if x.dtype == torch.bfloat16 and native.isa() in flushing:
        return torch.where(wide.abs() < 2.0**-126, torch.zeros(()), wide)
    return wide


# ---- rotary embedding ----


def cos_sin(positions: int, rotary_dim: int) -> Tensor:
    inverse = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(positions)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@dtypes
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("head_size", "rotary_dim"), [(8, 8), (64, 64), (80, 32), (40, 22), (96, 2)]
)
def test_rotary(head_size: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype) -> None:
    heads, kv_heads = 5, 2
    qkv = random(9, (heads + 2 * kv_heads) * head_size, dtype=dtype)
    cache = cos_sin(100, rotary_dim)
    positions = torch.tensor([0, 99, 3, 3, 50, 1, 2, 98, 7])

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = x.split([heads * head_size, kv_heads * head_size, kv_heads * head_size], dim=-1)
        return q.unflatten(1, (heads, head_size)), k.unflatten(1, (kv_heads, head_size))

    got, want = qkv.clone(), qkv.clone()
    ops.rotary_embedding(positions, *split(got), cache, is_neox)
    reference.rotary_embedding(positions, *split(want), cache, is_neox)
    assert_near(got, want, error=1e-6, roundings=2)
    assert not torch.equal(got, qkv)
    # Value and the dimensions beyond rotary_dim stay; angles keep each pair's length
    assert torch.equal(got[:, -kv_heads * head_size :], qkv[:, -kv_heads * head_size :])
    q = split(got)[0]
    assert torch.equal(q[..., rotary_dim:], split(qkv)[0][..., rotary_dim:])
    # A token alone
    alone = qkv[4:5].clone()
    ops.rotary_embedding(positions[4:5], *split(alone), cache, is_neox)
    assert_same(alone, got[4:5])


# ---- rows of logits ----


@pytest.mark.parametrize("dim", [1, 5, 16, 1000, 4099])
def test_softmax_and_log_softmax(dim: int) -> None:
    x = strided(10 * random(6, dim))
    if dim > 1:
        x[2, 0] = -math.inf
        x[3] = 5e4
        x[4, -1] = 200.0
    assert_near(ops.softmax(x), torch.softmax(x.double(), -1), error=1e-6)
    got, truth = ops.log_softmax(x), torch.log_softmax(x.double(), -1)
    assert torch.equal(got.isinf(), truth.isinf())
    assert_near(got.nan_to_num(), truth.float().nan_to_num(), error=2e-6)
    assert torch.allclose(reference.softmax(x), ops.softmax(x), atol=1e-6)
    assert torch.allclose(reference.log_softmax(x), got, atol=1e-5)


@pytest.mark.parametrize("table", [ops, reference], ids=["native", "reference"])
def test_argmax(table: NativeOps | ReferenceOps) -> None:
    nan, inf = math.nan, math.inf
    rows = [
        ([1.0, 3.0, 3.0, 2.0, 3.0], 1),
        ([nan, 3.0, nan, 4.0, 4.0], 3),
        ([-inf, -inf, -inf, -inf, -inf], 0),
        ([nan, nan, nan, nan, nan], 0),
        ([-inf, inf, nan, inf, 0.0], 1),
        ([-5.0, -4.0, -3.0, -2.0, -1.0], 4),
    ]
    x = torch.tensor([row for row, _ in rows])
    assert table.argmax(x).tolist() == [index for _, index in rows]
    x = strided(random(5, 1003).round(decimals=1))
    want = [row.tolist().index(max(row.tolist())) for row in x]
    assert table.argmax(x).tolist() == want


@pytest.mark.parametrize("table", [ops, reference], ids=["native", "reference"])
def test_top_k(table: NativeOps | ReferenceOps) -> None:
    x = strided(random(5, 1003).round(decimals=1))
    x[1, 3] = math.nan
    x[2, :] = 1.0
    for k in (0, 1, 7, 1003):
        values, indices = table.top_k(x, k)
        assert values.shape == indices.shape == (5, k)
        for row, v, i in zip(x.nan_to_num(-math.inf), values, indices, strict=True):
            order = sorted(range(1003), key=lambda j: (-row[j].item(), j))[:k]
            assert i.tolist() == order
            assert torch.equal(row[i], v)


def test_embedding() -> None:
    weight, ids = random(10, 3), torch.tensor([9, 0, 0])
    assert torch.equal(ops.embedding(weight, ids), weight[ids])
    assert torch.equal(reference.embedding(weight, ids), weight[ids])


@dtypes
def test_ids_that_the_table_does_not_have_read_nothing(dtype: torch.dtype) -> None:
    """Invalid values return rows of NaN, which fail the requests of the rows."""
    table = random(130, 19, dtype=dtype)
    ids = torch.tensor([129, -1, 0, 130, 2**40, -(2**63), 2**63 - 1, 64])
    for weight in (table, ops.pack_weight(table)):
        rows = ops.embedding(weight, ids)
        assert torch.equal(rows[[0, 2, 7]], table[[129, 0, 64]])
        assert rows[[1, 3, 4, 5, 6]].isnan().all()


# ---- all of them ----


def row_operations(dim: int, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    weight, bias = random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2)
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda x: ops.rms_norm(x, weight, 1e-5),
        "rms_norm_gemma": lambda x: ops.rms_norm(x, weight, 1e-5, 1.0),
        "fused_add_rms_norm": lambda x: ops.fused_add_rms_norm(x, x.clone(), weight, 1e-5)[0],
        "layer_norm": lambda x: ops.layer_norm(x, weight, bias, 1e-5, 1.0),
        "fused_add_layer_norm": lambda x: ops.fused_add_layer_norm(
            x, x.clone(), weight, bias, 1e-5
        )[0],
        "rms": ops.rms,
        "cutoff": lambda x: ops.cutoff(x, 0.5),
        "silu_and_mul": lambda x: ops.act_and_mul(x, "silu"),
        "gelu_and_mul": lambda x: ops.act_and_mul(x, "gelu"),
        "gelu_tanh_and_mul": lambda x: ops.act_and_mul(x, "gelu_tanh"),
        "multiply": lambda x: ops.multiply(x, weight, "sigmoid"),
    }
    if dtype == torch.float32:
        operations |= {"softmax": ops.softmax, "log_softmax": ops.log_softmax}
    return operations


@dtypes
def test_rows_do_not_depend_on_company_or_threads(
    dtype: torch.dtype, one_and_two_threads: tuple[int, int]
) -> None:
    x = random(201, 1106, dtype=dtype)  # enough work to be shared between threads
    for name, f in row_operations(1106, dtype).items():
        native.set_num_threads(one_and_two_threads[0])
        alone = torch.cat([f(x[i : i + 1]) for i in range(0, 201, 4)])
        for threads in one_and_two_threads:
            native.set_num_threads(threads)
            assert torch.equal(bits(f(x)[::4]), bits(alone)), name
            assert torch.equal(bits(f(x[40:47])[::4]), bits(alone[10:12])), name


@dtypes
def test_no_rows(dtype: torch.dtype) -> None:
    x = torch.empty(0, 8, dtype=dtype)
    for f in row_operations(8, dtype).values():
        assert f(x).shape[0] == 0
    assert ops.gelu(x, "none").shape == x.shape
    ops.rotary_embedding(
        torch.empty(0, dtype=torch.int64), x.view(0, 1, 8), x.view(0, 1, 8), cos_sin(4, 8)
    )
    assert ops.argmax(x.float()).shape == (0,)
    assert ops.top_k(x.float(), 2)[0].shape == (0, 2)


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="not available"):
        native.set_isa("vliw")
    assert native.isa() in native.available_isas()


def test_number_of_threads() -> None:
    for n in (1, 3, 2):
        native.set_num_threads(n)
        assert _native.num_threads() == n
    native.set_num_threads(0)
    assert _native.num_threads() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 37])
def test_results_go_where_they_are_wanted(dtype: torch.dtype, columns: int) -> None:
    """The results are in columns of wider rows, with the same bits; other columns stay."""
    ops, k = native_ops(), 48
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, k, generator=generator).to(dtype)
    weight = torch.randn(2 * columns, k, generator=generator).to(dtype)
    packed = ops.pack_weight(weight)
    y = ops.linear(x, packed)
    cases = {
        "linear": lambda out: ops.linear(x, ops.pack_weight(weight[:columns]), out=out),
        "linear_act_and_mul": lambda out: ops.linear_act_and_mul(x, packed, None, "silu", out),
        "act_and_mul": lambda out: ops.act_and_mul(y, "gelu", out),
        "gelu": lambda out: ops.gelu(y[:, :columns].contiguous(), "none", out),
        "silu": lambda out: ops.silu(y[:, :columns].contiguous(), out),
        "relu": lambda out: ops.relu(y[:, :columns].contiguous(), out),
        "sigmoid": lambda out: ops.sigmoid(y[:, :columns].contiguous(), out),
        "xielu": lambda out: ops.xielu(y[:, :columns].contiguous(), weight[0, :2], out),
        "quantized": lambda out: ops.linear(
            x, ops.quantize_weight([weight[:columns]], "int8", 0), out=out
        ),
    }
    for name, compute in cases.items():
        wide = torch.full((5, columns + 23), 7.0, dtype=dtype)
        out = wide[:, 11 : 11 + columns]
        compute(out)
        assert torch.equal(out, compute(None)), name
        assert (wide[:, :11] == 7).all(), name
        assert (wide[:, 11 + columns :] == 7).all(), name


def test_every_other_row() -> None:
    """Ranks that divide the rows of a norm use such views."""
    x, residual, weight = random(7, 48), random(7, 48, seed=1), random(48, seed=2)
    rows = slice(1, None, 2)
    others = slice(0, None, 2)
    fused = torch.full((2, 7, 48), 7.0)
    normed, total = fused[0, rows], fused[1, rows]
    ops.fused_add_rms_norm(x[rows], residual[rows], weight, 1e-5, out=(normed, total))
    wanted = ops.fused_add_rms_norm(x[rows].clone(), residual[rows].clone(), weight, 1e-5)
    assert_same(normed, wanted[0])
    assert_same(total, wanted[1])
    assert (fused[:, others] == 7).all()
    ops.fused_add_layer_norm(x[rows], residual[rows], weight, None, 1e-5, out=(normed, total))
    assert_same(normed, ops.layer_norm(wanted[1], weight, None, 1e-5))
    assert_same(total, wanted[1])
    assert (fused[:, others] == 7).all()
    calls: dict[str, Callable[[slice, Tensor | None], Tensor]] = {
        "rms_norm": lambda rows, out: ops.rms_norm(x[rows], weight, 1e-5, out=out),
        "layer_norm": lambda rows, out: ops.layer_norm(x[rows], weight, weight, 1e-5, out=out),
        "add": lambda rows, out: ops.add(x[rows], residual[rows], out),
    }
    for name, call in calls.items():
        out = torch.full((7, 48), 7.0)
        call(rows, out[rows])
        assert_same(out[rows], call(slice(0, 7), None)[rows])
        assert (out[others] == 7).all(), name
    parts, out = random(7, 96), torch.full((7, 48), 7.0)
    ops.sum_parts(parts[rows], 2, None, torch.float32, out[rows])
    assert_same(out[rows], ops.sum_parts(parts, 2, None, torch.float32)[rows])
    assert (out[others] == 7).all()


@dtypes
@pytest.mark.parametrize(("rows", "dim"), [(1, 7), (5, 64), (33, 2100)])
def test_add_of_one_vector_to_all_rows(rows: int, dim: int, dtype: torch.dtype) -> None:
    x, y = random(rows, dim, dtype=dtype), random(dim, dtype=dtype, seed=1)
    assert_same(ops.add(x, y), x + y)
    assert_same(ops.add(x, y), ops.add(x, y.expand(rows, dim).contiguous()))


# ---- sums over ranks ----


@dtypes
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "parts", "dim"), [(1, 2, 7), (5, 3, 64), (33, 2, 2100)])
def test_sum_parts(rows: int, parts: int, dim: int, with_bias: bool, dtype: torch.dtype) -> None:
    x = random(rows, parts * dim)
    bias = random(dim, dtype=dtype, seed=1) if with_bias else None
    got = ops.sum_parts(x, parts, bias, dtype)
    assert_same(got, reference.sum_parts(x, parts, bias, dtype))  # in one order
    for row in range(0, rows, 7):
        assert_same(ops.sum_parts(x[row : row + 1], parts, bias, dtype)[0], got[row])
