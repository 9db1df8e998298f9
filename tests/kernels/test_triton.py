"""Triton kernels, in the interpreter, against the plain torch reference."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.kernels.reference import ReferenceOps

pytest.importorskip("triton", reason="the package triton is not installed")

from octavo.kernels.triton import fp8, gemm, kv_write
from octavo.kernels.triton.ops import TritonOps
from tests.torch_ops import Named, reference_ops

ops, reference = Named(TritonOps(upcast=True)), reference_ops()
# The interpreter truncates float32 to bfloat16 instead of rounding: one unit in the last place.
ERROR = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6}
dtypes = pytest.mark.parametrize("dtype", list(ERROR), ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, truth: Tensor) -> None:
    assert got.dtype == truth.dtype
    error = ERROR[got.dtype]
    torch.testing.assert_close(got, truth, rtol=error, atol=error)


def strided(x: Tensor) -> Tensor:
    """Return the same numbers with rows further apart, and other numbers between."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), 7.0, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


# ---- norms and activations ----


@dtypes
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dim", [1, 16, 57, 576])
def test_rms_norm(dim: int, offset: float, dtype: torch.dtype) -> None:
    x, weight = strided(random(5, dim, dtype=dtype)), random(dim, dtype=dtype, seed=1)
    assert_near(ops.rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset))
    residual = random(5, dim, dtype=dtype, seed=2)
    for got, truth in zip(
        ops.fused_add_rms_norm(x, residual, weight, 1e-5, offset),
        reference.fused_add_rms_norm(x, residual, weight, 1e-5, offset),
        strict=True,
    ):
        assert_near(got, truth)


def test_rms_norm_of_heads_in_place() -> None:
    qkv, weight = random(3, 6, 24), random(24, seed=1)
    heads = qkv[:, 1:4]
    truth = reference.rms_norm(heads.clone(), weight, 1e-6)
    rest = qkv[:, 4:].clone()
    assert ops.rms_norm(heads, weight, 1e-6, out=heads) is heads
    assert_near(heads, truth)
    assert torch.equal(qkv[:, 4:], rest)


@dtypes
@pytest.mark.parametrize("columns", [3, 1500])
def test_activations(columns: int, dtype: torch.dtype) -> None:
    x = 4 * random(3, 2 * columns, dtype=dtype)
    for gate in ("silu", "gelu", "gelu_tanh", "sigmoid", "relu2"):
        assert_near(ops.act_and_mul(x, gate), reference.act_and_mul(x, gate))
    for approximate in ("none", "tanh"):
        assert_near(ops.gelu(x, approximate), reference.gelu(x, approximate))
    assert_near(ops.silu(x), reference.silu(x))


def test_no_tokens() -> None:
    x = torch.empty(0, 8)
    assert ops.rms_norm(x, torch.ones(8), 1e-5).shape == (0, 8)
    assert ops.fused_add_rms_norm(x, x, torch.ones(8), 1e-5)[0].shape == (0, 8)
    assert ops.act_and_mul(x, "silu").shape == (0, 4)
    assert ops.gelu(x, "none").shape == (0, 8)


# ---- linear ----


@dtypes
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 1, 1), (3, 130, 70), (65, 40, 129), (130, 257, 64)]
)
def test_linear_of_one_tile_size(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, bias = strided(random(rows, k, dtype=dtype)), random(n, dtype=dtype, seed=2)
    weight = random(n, k, dtype=dtype, seed=1)
    for b in (None, bias):
        got = gemm.linear(x, weight, b, torch.float32, upcast=True)
        truth = x.double() @ weight.double().T + (0 if b is None else b.double())
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-4)
        assert_near(gemm.linear(x, weight, b, dtype, upcast=True), got.to(dtype))


def test_batch_invariant_linear() -> None:
    invariant = Named(TritonOps(batch_invariant=True, upcast=True))
    x, weight = random(70, 40), invariant.pack_weight(random(50, 40, seed=1))
    whole = invariant.linear(x, weight)
    for rows in (1, 3, 64):
        assert torch.equal(invariant.linear(x[:rows], weight), whole[:rows])
    assert torch.equal(invariant.linear(x.flip(0), weight), whole.flip(0))


def test_splits_of_linear_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows a program for each split, with many one for all."""
    monkeypatch.setattr(gemm, "_LONGEST_SPLIT", 128)
    x, weight, bias = random(260, 1000).half(), random(70, 1000, seed=1).half(), random(70).half()
    whole = gemm.linear(x, weight, bias, torch.float32, upcast=True)
    truth = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), truth, rtol=1e-5, atol=1e-4)
    for rows in (1, 17):
        assert torch.equal(
            gemm.linear(x[:rows], weight, bias, torch.float32, upcast=True), whole[:rows]
        )


@pytest.mark.parametrize(
    ("n", "k", "splits"), [(4096, 4096, 1), (4096, 14336, 4), (2048, 5632, 2), (28672, 8192, 1)]
)
def test_splits_are_those_of_the_weight_s_shape(n: int, k: int, splits: int) -> None:
    assert gemm.count_splits(n, k, 4096) == splits


@dtypes
@pytest.mark.parametrize(("heads", "n", "k"), [(1, 5, 3), (3, 70, 33)])
def test_head_linear(heads: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Strides of tokens and heads differ; a row has the bits that it has alone."""
    x = random(17, heads + 1, k + 2, dtype=dtype)[:, :heads, :k]
    weight = ops.pack_weight(random(heads * n, k, dtype=dtype, seed=1))
    out = torch.full((17, heads, n + 3), 7.0, dtype=dtype)
    whole = ops.head_linear(x, weight, heads, out[..., :n])
    assert_near(whole, reference.head_linear(x, weight, heads))
    assert (out[..., n:] == 7).all()
    for rows in (slice(0), slice(1), slice(14, 17)):
        assert torch.equal(ops.head_linear(x[rows], weight, heads), whole[rows])


ROWS_IN_OTHER_PLACES = """
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.triton import prepare_interpreter

def dot(a):
    operands = (TensorHandle(x, tl.float32) for x in (a, b, np.zeros((len(a), 64), np.float32)))
    return InterpreterBuilder().create_dot(*operands, None, None).data

rng = np.random.default_rng(0)
a, b = (rng.standard_normal((64, 64), np.float32) for _ in range(2))
prepare_interpreter()
whole = dot(a)
assert np.array_equal(whole[::-1], dot(a[::-1].copy()))
assert all(np.array_equal(whole[:rows], dot(a[:rows])) for rows in (1, 3, 16, 63))
np.testing.assert_allclose(whole, a.astype(float) @ b, rtol=1e-4, atol=1e-4)
"""


def test_the_interpreter_adds_every_row_in_one_order() -> None:
    """The numpy kernels are OpenBLAS's for AVX2, on any processor."""
    done = subprocess.run(
        [sys.executable, "-c", ROWS_IN_OTHER_PLACES],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OPENBLAS_CORETYPE": "Haswell"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


# ---- keys and values ----


@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_is_torch_s(format: torch.dtype) -> None:
    """Every number of the format, every midpoint between two, too large ones, NaN."""
    code = {torch.float8_e4m3fn: fp8.E4M3, torch.float8_e5m2: fp8.E5M2}[format]
    largest = torch.finfo(format).max
    exact = torch.arange(256, dtype=torch.uint8).view(format).float()
    exact = exact[exact.isfinite()].sort().values
    x = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, 1.7 * exact, random(3000) * 100])
    x = torch.cat([x, x * 2.0**-8, torch.tensor([math.inf, -math.inf, 1e30, math.nan])])
    x = torch.cat([x, torch.zeros(-len(x) % 128)]).view(-1, 1, 128)
    cache = torch.zeros(-(-len(x) // 4), 2, 4, 1, 128, dtype=torch.uint8)
    kv_write.write_kv(x, x, cache, torch.arange(len(x)), format=code)
    got = cache.view(format)[:, 0].reshape(-1, 1, 128)[: len(x)].float()
    truth = x.clamp(-largest, largest).to(format).float()
    torch.testing.assert_close(got, truth, rtol=0, atol=0, equal_nan=True)


@dtypes
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(16, 16), (24, 8), (64, 64)])
def test_rotary_and_write(
    head_size: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype
) -> None:
    qkv = random(5, 3 + 2 + 2, head_size, dtype=dtype)
    query, key, value = qkv.split_with_sizes([3, 2, 2], dim=1)
    cos_sin = random(50, rotary_dim, seed=3)
    positions = torch.tensor([0, 7, 49, 3, 3])
    slots = torch.tensor([9, -1, 0, 4, 11])
    cache = torch.full((3, 2, 4, 2, head_size), 5.0, dtype=dtype)
    true_query, true_key = query.clone(), key.clone()
    reference.rotary_embedding(positions, true_query, true_key, cos_sin, is_neox)
    kv_write.write_kv(
        key,
        value,
        cache,
        slots,
        format=0,
        query=query,
        positions=positions,
        cos_sin_cache=cos_sin,
        is_neox=is_neox,
    )
    assert_near(query, true_query)
    cells = cache.transpose(1, 2).reshape(12, 2, 2, head_size)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_near(cells[slot, 0], true_key[token])
            assert torch.equal(cells[slot, 1], value[token])
            cells[slot] = 5.0
    assert (cells == 5.0).all(), "what no slot names is left alone"


# ---- sampling ----


class Ranking(ReferenceOps):
    """Reference with the interpreter's exponential, so that weights agree to the last bit."""

    def exp(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.exp(x.numpy()))


def params(rows: int, **given: float) -> NDArray[np.void]:
    result = np.zeros(rows, SAMPLING_ROW)
    for name, value in {"temperature": 1.0, "top_p": 1.0, **given}.items():
        result[name] = value
    result["seed"] = np.arange(rows) * 2**58 + 5
    result["position"], result["stream"] = np.arange(rows) % 3, 2
    return result


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.01},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 5000},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"top_p": 1e-9},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.8, "min_p": 0.01, "temperature": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [1, 5000])
def test_same_tokens_as_the_reference(vocab_size: int, given: dict[str, float]) -> None:
    x = 3 * random(5, vocab_size)
    x[4] = x[4].round()  # ties
    x[3, ::2] = -math.inf
    chosen = params(5, **given)
    assert torch.equal(ops.sample(x, chosen), Ranking().sample(x, chosen))


def test_every_row_has_its_own_parameters() -> None:
    rows = [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {}]
    chosen = np.concatenate([params(1, **given) for given in rows])
    chosen["seed"] = 9
    x = random(5, 200)
    assert torch.equal(ops.sample(x, chosen), Ranking().sample(x, chosen))


def test_rows_without_a_finite_maximum() -> None:
    x = random(4, 100)
    x[0, 99] = math.nan
    x[1, 50] = math.inf
    x[2] = -math.inf
    for given in ({"temperature": 0.0}, {}, {"top_p": 0.5}):
        assert ops.sample(x, params(4, **given)).tolist()[:3] == [-1, -1, -1]
