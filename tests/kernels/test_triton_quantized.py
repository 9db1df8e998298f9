"""Triton's products with quantized weights, in the interpreter, against the torch reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import to_bytes
from octavo.kernels.sizes import quantized_nbytes
from octavo.kernels.weights import Codes, QuantFormat, QuantizedWeight
from tests.torch_ops import Named, reference_ops

pytest.importorskip("triton", reason="the package triton is not installed")

from octavo.kernels.triton import quantized
from octavo.kernels.triton.ops import TritonOps

ops, reference = Named(TritonOps(upcast=True)), reference_ops()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FORMATS: list[tuple[QuantFormat, int]] = [
    ("int8", 0),
    ("int4_levels", 32),
    ("int4", 64),
    ("int4_zeros", 32),
    ("int4_zeros", 128),
    ("nf4", 64),
    ("int8_groups", 32),
    ("int8_groups", 128),
    ("fp8", 0),
    ("fp8", 32),
    ("fp8", 128),
]
formats = pytest.mark.parametrize(
    ("format", "group"), FORMATS, ids=[f"{format}-{group}" for format, group in FORMATS]
)
FINITE = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: Tensor) -> Tensor:
    """Return the same numbers with rows further apart, and NaN between: a wrong read shows."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), math.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def random_codes(n: int, k: int, format: QuantFormat, group: int) -> Codes:
    """Return codes of which every number occurs, with scales of both signs."""
    generator = torch.Generator().manual_seed(n + k)
    most = 16 if format in ("int4_levels", "int4", "int4_zeros", "nf4") else 256
    codes = torch.randint(most, (n, k), generator=generator, dtype=torch.uint8)
    if format == "fp8":
        codes = FINITE[codes.long() % len(FINITE)]
    groups = -(-k // (group or k))
    scales = (torch.rand(n, groups, generator=generator) - 0.5).half().float()
    if format == "nf4":
        scales /= 2**15
    zeros = None
    if format in ("int4_zeros", "int8_groups"):
        zeros = torch.randint(most, (n, groups), generator=generator, dtype=torch.uint8)
    return Codes(codes, scales, zeros)


def pack(n: int, k: int, format: QuantFormat, group: int) -> QuantizedWeight:
    return ops.pack_quantized(n, k, format, group, [random_codes(n, k, format, group)])


def both(n: int, k: int, format: QuantFormat, group: int) -> list[QuantizedWeight]:
    parts = [random_codes(n, k, format, group)]
    return [table.pack_quantized(n, k, format, group, parts) for table in (ops, reference)]


def numbers_of(weight: QuantizedWeight) -> Tensor:
    """Return the numbers of the reference's weight: float64 [N, K]."""
    data = weight.data.double()
    return (data[..., :-1] * data[..., -1:]).flatten(1)[:, : weight.k]


def assert_product(got: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | float) -> None:
    """Check a float32 product with the reference's weight: exact for int8."""
    if weight.format == "int8":
        want = reference.linear(x, weight, None, torch.float32)
        assert torch.equal(got, want + bias)
        return
    rows = numbers_of(weight)
    want, size = x.double() @ rows.T + bias, x.double().abs() @ rows.abs().T
    assert ((got - want).abs() <= 1e-6 * size + 1e-6).all()


@formats
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 130, 70), (17, 63, 257)])
def test_linear(m: int, n: int, k: int, format: QuantFormat, group: int) -> None:
    """The types take turns, so that each occurs with each shape."""
    dtype = DTYPES[(m + FORMATS.index((format, group))) % 3]
    x, bias = strided(random(m, k, dtype=dtype)), random(n, dtype=dtype, seed=1)
    packed, truth = both(n, k, format, group)
    got = ops.linear(x, packed, bias, torch.float32)
    assert_product(got, x, truth, bias.float())
    # The interpreter truncates float32 to bfloat16 instead of rounding.
    unit = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 2.0**-7}[dtype]
    rounded = ops.linear(x, packed, bias)
    torch.testing.assert_close(rounded, got.to(dtype), rtol=unit, atol=0)


@formats
def test_linear_in_float16(format: QuantFormat, group: int) -> None:
    """Numbers of codes are exact in the model's type; those of nf4 are rounded to it."""
    x, (packed, truth) = random(3, 200, dtype=torch.float16), both(40, 200, format, group)
    got = TritonOps().linear(x, packed, None, "float32")
    if format == "nf4":
        truth.data[..., :-1] = truth.data[..., :-1].half().float()
    assert_product(got, x, truth, 0.0)


@formats
def test_linear_is_batch_invariant(format: QuantFormat, group: int) -> None:
    x, packed = random(70, 150), pack(40, 150, format, group)
    whole = ops.linear(x, packed)
    for rows in (1, 3, 17, 64):
        assert torch.equal(ops.linear(x[:rows], packed), whole[:rows])
    assert torch.equal(ops.linear(x.flip(0), packed), whole.flip(0))


@pytest.mark.parametrize(
    ("format", "group"), [("int4_levels", 32), ("int4_zeros", 128), ("fp8", 0)]
)
def test_splits_change_no_bit(
    format: QuantFormat, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few rows a program for each split, with many one for all; also more than one tile."""
    monkeypatch.setattr(quantized, "_LONGEST_SPLIT", 128)
    x, (packed, truth) = random(260, 400), both(70, 400, format, group)
    whole = ops.linear(x, packed, None, "float32")
    assert_product(whole, x, truth, 0.0)
    for rows in (1, 17, 33):
        assert torch.equal(ops.linear(x[:rows], packed, None, "float32"), whole[:rows])
    # The largest tile is that of types with 16 bits.
    half = x.half()
    whole = TritonOps().linear(half, packed, None, "float32")
    assert torch.equal(TritonOps().linear(half[259:], packed, None, "float32"), whole[259:])


def test_codes_of_nan_show() -> None:
    part = random_codes(3, 100, "fp8", 32)
    part.codes[1, 70] = 0xFF
    for group, scales in ((32, part.scales), (0, part.scales[:, :1])):
        weight = ops.pack_quantized(3, 100, "fp8", group, [Codes(part.codes, scales)])
        y = ops.linear(random(2, 100), weight)
        assert y[:, 1].isnan().all()
        assert y[:, [0, 2]].isfinite().all()


@formats
def test_order_of_inputs(format: QuantFormat, group: int) -> None:
    """A product with an order has the bits of the product with gathered columns."""
    part, order = random_codes(20, 70, format, group), torch.randperm(70, dtype=torch.int32)
    ordered = ops.pack_quantized(20, 70, format, group, [part], order=order.numpy())
    packed = pack(20, 70, format, group)
    x = strided(random(3, 70))
    assert torch.equal(ops.linear(x, ordered), ops.linear(x[:, order].contiguous(), packed))


@formats
def test_no_rows_and_other_memory(format: QuantFormat, group: int) -> None:
    packed = pack(20, 70, format, group)
    assert ops.linear(torch.empty(0, 70), packed).shape == (0, 20)
    out = torch.zeros(3, 25)
    assert ops.linear(random(3, 70), packed, out=out[:, :20]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :20], ops.linear(random(3, 70), packed))


@formats
def test_pack_in_parts(format: QuantFormat, group: int) -> None:
    whole = random_codes(50, 70, format, group)
    tensors = (whole.codes, whole.scales, whole.zeros)
    parts = [
        Codes(*(tensor if tensor is None else tensor[a:b] for tensor in tensors))
        for a, b in itertools.pairwise([0, 10, 11, 50])
    ]
    x = random(3, 70)
    packed = ops.pack_quantized(50, 70, format, group, iter(parts))
    assert torch.equal(ops.linear(x, packed), ops.linear(x, pack(50, 70, format, group)))


@formats
def test_the_plan_s_size_is_close(format: QuantFormat, group: int) -> None:
    packed = pack(64, 1024, format, group)
    assert packed.nbytes <= 1.1 * quantized_nbytes(64, 1024, format, group)


# ---- int8 ----


@dtypes
@pytest.mark.parametrize("k", [1, 70, 1500])
def test_activations_in_int8_are_the_reference_s(k: int, dtype: torch.dtype) -> None:
    x = strided(random(5, k, dtype=dtype))
    x[1], x[2] = 0, 1e-38
    q, scales = quantized.to_int8(x)
    want, want_scales = to_bytes(x.float())
    assert torch.equal(q.float(), want)
    assert torch.equal(scales, want_scales[:, 0])


def test_halves_are_rounded_to_even() -> None:
    q, _ = quantized.to_int8(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]]))
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, 126]]


def test_longest_sum() -> None:
    """The largest sums that 32 bits must hold: they are exact."""
    k = 2**17
    codes = Codes(torch.full((2, k), 0, dtype=torch.uint8), torch.ones(2, 1))
    weight = ops.pack_quantized(2, k, "int8", 0, [codes])
    assert (ops.linear(torch.full((1, k), 127.0), weight) == -127 * 128 * k).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("format", "group"), [("int8", 0), ("int4_zeros", 32), ("fp8", 0)])
def test_what_is_not_finite_shows_and_stays_in_its_row(
    format: QuantFormat, group: int, bad: float
) -> None:
    packed = pack(70, 100, format, group)
    x = random(4, 100)
    good = ops.linear(x, packed)
    x[2, 40] = bad
    y = ops.linear(x, packed)
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3]], good[[0, 1, 3]])


# ---- quantizing ----


@pytest.mark.parametrize(("format", "group"), [("int8", 0), ("int4_levels", 32), ("fp8", 0)])
def test_quantize_weight(format: QuantFormat, group: int) -> None:
    parts = [random(30, 100, dtype=torch.bfloat16), random(21, 100, seed=1)]
    packed, truth = (table.quantize_weight(parts, format, group) for table in (ops, reference))
    x = random(3, 100, seed=2)
    assert_product(ops.linear(x, packed), x, truth, 0.0)
