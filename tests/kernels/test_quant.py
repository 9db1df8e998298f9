"""Quantized linear layers against plain torch, bit for bit for pure integer arithmetic, on
every instruction set, and bitwise against themselves among other rows."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import native
from octavo.kernels.reference import LEVELS
from octavo.kernels.sizes import quantized_nbytes
from octavo.kernels.weights import Codes, QuantFormat, QuantizedWeight
from tests.torch_ops import native_ops, reference_ops, with_outliers

ops, reference = native_ops(), reference_ops()
pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

FORMATS: list[tuple[QuantFormat, int]] = [
    ("int8", 0),
    ("int4_levels", 32),
    ("int4_levels", 64),
    ("int4", 32),
    ("int4", 128),
    ("int4_zeros", 32),
    ("int4_zeros", 64),
    ("int4_zeros", 128),
    ("nf4", 64),
    ("nf4", 128),
    ("int8_groups", 32),
    ("int8_groups", 128),
]
formats = pytest.mark.parametrize(
    ("format", "group"), FORMATS, ids=[f"{format}-{group}" for format, group in FORMATS]
)
# Forms to which checkpoints are quantized at load
load_formats = pytest.mark.parametrize(
    ("format", "group"), [("int8", 0), ("int4_levels", 32), ("int4_levels", 128)]
)
SHAPES = [
    (0, 8, 8),
    (1, 1, 1),
    (1, 64, 32),
    (2, 63, 3),
    (3, 65, 172),
    (5, 130, 64),
    (6, 96, 129),
    (7, 16, 1023),
    (8, 128, 256),
    (97, 70, 515),
    (13, 40, 4133),
]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_codes(n: int, k: int, format: QuantFormat, group: int) -> Codes:
    generator = torch.Generator().manual_seed(n + k)
    most = 256 if format.startswith("int8") else 16
    codes = torch.randint(most, (n, k), generator=generator, dtype=torch.uint8)
    groups = -(-k // (group or k))
    scales = torch.rand(n, groups, generator=generator) - 0.5
    if format == "nf4":
        scales /= 2**15
    elif format.startswith("int4"):
        scales = scales.half().float()
    zeros = None
    if format in ("int4_zeros", "int8_groups"):
        zeros = torch.randint(most, (n, groups), generator=generator, dtype=torch.uint8)
    return Codes(codes, scales, zeros)


def pack(n: int, k: int, format: QuantFormat, group: int) -> QuantizedWeight:
    return ops.pack_quantized(n, k, format, group, [random_codes(n, k, format, group)])


def both(n: int, k: int, format: QuantFormat, group: int) -> list[QuantizedWeight]:
    parts = [random_codes(n, k, format, group)]
    return [table.pack_quantized(n, k, format, group, parts) for table in (ops, reference)]


def strided(x: Tensor) -> Tensor:
    """Return the same numbers with rows further apart, and NaN between: a wrong read shows."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), math.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def dequantize(table: Any, weight: QuantizedWeight) -> Tensor:
    """Return [N, K]: the product with the unit matrix, whose quantization is exact."""
    identity: Tensor = table.linear(torch.eye(weight.k), weight).T
    return identity


# ---- products ----


@functools.lru_cache(1)  # for all instruction sets
def expected(m: int, n: int, k: int, dtype: torch.dtype, format: QuantFormat, group: int) -> Any:
    """Return x, a bias, the reference's products by bias and dtype, and the size of their terms."""
    x, bias = strided(with_outliers(random(m, k, dtype=dtype))), random(n, dtype=dtype, seed=1)
    truth = reference.pack_quantized(n, k, format, group, [random_codes(n, k, format, group)])
    wanted = [
        (b, out_dtype, reference.linear(x, truth, b, out_dtype))
        for b in (None, bias)
        for out_dtype in {dtype, torch.float32}
    ]
    weight = truth.data[..., :-1].abs().mul(truth.data[..., -1:].abs()).flatten(1)[:, :k]
    return x, wanted, x.float().abs() @ weight.T


@formats
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear(m: int, n: int, k: int, format: QuantFormat, group: int):
    """The types take turns, so that each occurs with each shape and each format."""
    dtype = DTYPES[(SHAPES.index((m, n, k)) + FORMATS.index((format, group))) % 3]
    packed = pack(n, k, format, group)
    x, wanted, size = expected(m, n, k, dtype, format, group)
    for b, out_dtype, want in wanted:
        got = ops.linear(x, packed, b, out_dtype)
        assert got.dtype == out_dtype
        if k <= (group or k):  # one group: only integers and one rounding after another
            assert torch.equal(got, want)
        else:
            rounding = 2.0**-20 if out_dtype == torch.float32 else 2.0**-7
            assert ((got.float() - want.float()).abs() <= rounding * want.abs() + 2e-6 * size).all()


@pytest.mark.parametrize(("format", "group"), [("int4", 32), ("int4_zeros", 64)])
def test_second_terms_reduce_the_error(format: QuantFormat, group: int):
    """Most of the rounding error is that of the groups with the largest numbers."""
    n, k = 64, 1024
    packed, plain = both(n, k, format, group)
    x = random(8, k)
    x[:, ::500] *= 50
    exact = x.double() @ dequantize(reference, plain).double().T
    scales = x.view(8, -1, group).abs().amax(-1, keepdim=True) / 127
    once = ((x.view(8, -1, group) / scales).round() * scales).view(8, k)
    error = (once.double() @ dequantize(reference, plain).double().T - exact).square().mean()
    assert (ops.linear(x, packed).double() - exact).square().mean() < error / 5


def test_levels():
    """The kernel's table equals the reference's."""
    codes = Codes(torch.arange(16, dtype=torch.uint8)[:, None], torch.ones(16, 1))
    weight = ops.pack_quantized(16, 1, "int4_levels", 32, [codes])
    assert torch.equal(dequantize(ops, weight)[:, 0], LEVELS / 16)


@pytest.mark.parametrize("sign", [1, -1])
def test_longest_sum(sign: int):
    """The largest sums that 32 bits must hold."""
    k = 2**17
    codes = Codes(torch.full((3, k), 255, dtype=torch.uint8), torch.ones(3, 1))
    weight = ops.pack_quantized(3, k, "int8", 0, [codes])
    y = ops.linear(torch.full((2, k), float(sign)), weight)
    assert torch.allclose(y, torch.tensor(sign * 127.0 * k), rtol=1e-6)


@formats
@pytest.mark.parametrize("rows", [1, 7])
def test_largest_products(format: QuantFormat, group: int, rows: int):
    """The largest sums of products that some instruction sets make in 16 bits."""
    n, k = 16, 256
    part = random_codes(n, k, format, group)
    part.codes[::2] = 0
    part.codes[1::2] = 255 if format.startswith("int8") else 15
    tables = (ops, reference)
    weight, expected = (t.pack_quantized(n, k, format, group, [part]) for t in tables)
    for x in (torch.ones(rows, k), -torch.ones(rows, k)):
        y = reference.linear(x, expected)
        torch.testing.assert_close(ops.linear(x, weight), y, rtol=1e-5, atol=1e-3)


@formats
def test_rows_of_zeros_and_of_next_to_nothing(format: QuantFormat, group: int):
    packed = pack(70, 100, format, group)
    x = random(4, 100)
    x[1] = 0
    x[2] = 1e-38
    y = ops.linear(x, packed)
    assert (y[1:3] == 0).all()
    assert torch.equal(y[[0, 3]], ops.linear(x[[0, 3]], packed))


@formats
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_and_stays_in_its_row(format: QuantFormat, group: int, bad: float):
    packed = pack(70, 100, format, group)
    x = random(8, 100)
    good = ops.linear(x, packed)
    x[3, 40] = bad
    y = ops.linear(x, packed)
    assert not y[3].isfinite().any()
    rest = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(y[rest], good[rest])


@formats
@pytest.mark.parametrize(("n", "k"), [(64, 64), (130, 1537)])
def test_linear_is_batch_invariant(n: int, k: int, format: QuantFormat, group: int):
    dtype = DTYPES[(n + FORMATS.index((format, group))) % 3]
    x, bias = with_outliers(random(100, k, dtype=dtype)), random(n, dtype=dtype, seed=2)
    packed = pack(n, k, format, group)
    alone = torch.cat([ops.linear(x[i : i + 1], packed, bias) for i in range(100)])
    for m in (2, 3, 4, 5, 6, 7, 64, 100):
        for start in {0, (100 - m) // 2, 100 - m}:
            rows = slice(start, start + m)
            assert torch.equal(ops.linear(x[rows], packed, bias), alone[rows])


@formats
def test_linear_of_more_rows_than_are_quantized_together(format: QuantFormat, group: int):
    x, packed = random(400, 40), pack(65, 40, format, group)
    y = ops.linear(x, packed)
    assert torch.equal(y[390:], ops.linear(x[390:], packed))
    assert torch.equal(y[:10], ops.linear(x[:10], packed))


@formats
def test_linear_does_not_depend_on_threads(
    format: QuantFormat, group: int, one_and_two_threads: tuple[int, int]
):
    x, weight = random(70, 500, dtype=torch.bfloat16), [random(300, 500, seed=1)]
    results = []
    for threads in one_and_two_threads:
        native.set_num_threads(threads)
        packed = pack(300, 500, format, group)
        results.append(ops.linear(x, packed))
        if format in ("int8", "int4_levels"):
            results.append(ops.linear(x, ops.quantize_weight(weight, format, group)))
    half = len(results) // 2
    for a, b in zip(results[:half], results[half:], strict=True):
        assert torch.equal(a, b)


@formats
@dtypes
def test_order_of_inputs(dtype: torch.dtype, format: QuantFormat, group: int):
    """A product with an order has the bits of the product with gathered columns."""
    n, k = 70, 300
    part, order = random_codes(n, k, format, group), torch.randperm(k, dtype=torch.int32)
    for table in (ops, reference):
        packed = table.pack_quantized(n, k, format, group, [part])
        ordered = table.pack_quantized(n, k, format, group, [part], order=order.numpy())
        for m in (1, 40):
            x = strided(random(m, k, dtype=dtype))
            want = table.linear(x[:, order].contiguous(), packed)
            assert torch.equal(table.linear(x, ordered), want)
    assert ops.pack_quantized(
        n, k, format, group, [part], order=order.numpy()
    ).nbytes == quantized_nbytes(n, k, format, group, ordered=True)


def test_linear_refuses_foreign_weights():
    with pytest.raises(AssertionError):
        ops.linear(random(1, 8), both(8, 8, "int8", 0)[1])


# ---- packing ----


@formats
def test_pack_in_parts(format: QuantFormat, group: int):
    n, k = 203, 77
    whole = random_codes(n, k, format, group)
    cuts = [0, 100, 101, 128, n]
    parts = [
        Codes(
            whole.codes[a:b].clone(),
            whole.scales[a:b].clone(),
            None if whole.zeros is None else whole.zeros[a:b].clone(),
        )
        for a, b in itertools.pairwise(cuts)
    ]
    x = random(3, k)
    assert torch.equal(
        ops.linear(x, ops.pack_quantized(n, k, format, group, iter(parts))),
        ops.linear(x, ops.pack_quantized(n, k, format, group, [whole])),
    )


@formats
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 64), (65, 63), (1000, 576)])
def test_nbytes(n: int, k: int, format: QuantFormat, group: int):
    packed = pack(n, k, format, group)
    assert packed.nbytes == quantized_nbytes(n, k, format, group)


def test_nbytes_wastes_little():
    assert quantized_nbytes(5632, 2048, "int8", 0) == 5632 * 2048 + 4 * 5632
    assert quantized_nbytes(5632, 2048, "int4_levels", 32) == 5632 * 2048 * 9 // 16


# ---- quantizing ----


@load_formats
@dtypes
@pytest.mark.parametrize(("n", "k"), [(1, 1), (70, 172), (33, 515)])
def test_quantize_weight(n: int, k: int, dtype: torch.dtype, format: Any, group: int):
    weight = random(n, k, dtype=dtype)
    got = dequantize(ops, ops.quantize_weight([strided(weight)], format, group))
    want = dequantize(reference, reference.quantize_weight([weight], format, group))
    # Another order of sums may rarely lead to another scale, with nearly the same error.
    close = torch.isclose(got, want, rtol=1e-5, atol=1e-7)
    assert close.all() if format == "int8" else close.double().mean() > 0.97
    errors = [(q - weight.float()).square().sum() for q in (got, want)]
    assert errors[0] <= 1.002 * errors[1] + 1e-9


@load_formats
def test_quantize_weight_is_the_same_on_every_instruction_set(format: Any, group: int, isa: str):
    weight = [random(70, 172, dtype=torch.bfloat16)]
    got = dequantize(ops, ops.quantize_weight(weight, format, group))
    native.set_isa("neon" if "neon" in native.available_isas() else "portable")
    assert torch.equal(got, dequantize(ops, ops.quantize_weight(weight, format, group)))


def test_int8_is_off_by_half_a_step_at_most():
    weight = random(40, 333)
    got = dequantize(ops, ops.quantize_weight([weight], "int8", 0))
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((got - weight).abs() <= 0.5001 * step).all()


def test_levels_beat_even_steps():
    """The error is 5 % below the best of 16 even steps."""
    weight = random(64, 1024)
    grouped = weight.view(64, -1, 32)
    even = torch.full((), math.inf)
    most = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    for top in torch.linspace(6, 10, 17):
        scale = most / -top
        q = (grouped / scale).round().clamp(-8, 7)
        scale = (grouped * q).sum(-1, keepdim=True) / (q * q).sum(-1, keepdim=True)
        even = torch.minimum(even, (q * scale - grouped).square().sum(-1))
    got = dequantize(ops, ops.quantize_weight([weight], "int4_levels", 32))
    assert (got - weight).square().sum() < 0.95**2 * even.sum()


@load_formats
def test_quantize_in_parts(format: Any, group: int):
    weight = random(203, 77, dtype=torch.bfloat16)
    parts = [weight[:100], weight[100:101].float(), weight[101:128], weight[128:]]
    assert torch.equal(
        dequantize(ops, ops.quantize_weight(parts, format, group)),
        dequantize(ops, ops.quantize_weight([weight], format, group)),
    )


@load_formats
def test_quantize_zeros_and_tiny_numbers(format: Any, group: int):
    weight = torch.zeros(5, 256)
    weight[2, :128] = 1e-38
    weight[3, 128:] = 1.0
    got = dequantize(ops, ops.quantize_weight([weight], format, group))
    assert (got[[0, 1, 2, 4]] == 0).all()
    assert torch.allclose(got[3], weight[3], atol=1e-3)


@load_formats
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantize_shows_what_is_not_finite(format: Any, group: int, bad: float):
    weight = random(70, 256)
    weight[3, 200] = bad
    y = ops.linear(random(2, 256), ops.quantize_weight([weight], format, group))
    assert not y[:, 3].isfinite().any()
    assert y[:, [*range(3), *range(4, 70)]].isfinite().all()
