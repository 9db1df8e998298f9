"""RWKV 7: against the reference and the paper's equations, and bitwise in steps of other sizes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.ops_states import Wkv7Inputs, Wkv7Parameters
from octavo.models.state_cache import StateMetadata
from tests.kernels.test_delta_rule import apart
from tests.kernels.test_state import (
    SLOTS,
    TOKENS,
    Operation,
    check_bits,
    check_step,
    dtypes,
    random,
    slots_of,
    strided,
)
from tests.torch_ops import native_ops, reference_ops

pytestmark = pytest.mark.usefixtures("isa")
EPS = 6e-4
SHAPES = [(2, 64), (3, 16), (1, 37), (2, 7), (1, 100)]
"""Heads, and their size."""


def shift(channels: int, mixes: int, dtype: torch.dtype, tokens: int = TOKENS) -> Operation:
    x, mix = random(tokens, channels, dtype=dtype), random(mixes, channels, seed=1)

    def run(table: Any, at: slice, state: Tensor, slots: StateMetadata) -> Tensor:
        return table.token_shift(strided(x[at]), mix, state, slots)

    return run


@dtypes
@pytest.mark.parametrize(("channels", "mixes"), [(5, 1), (128, 6), (301, 2)])
def test_token_shift(channels: int, mixes: int, dtype: torch.dtype) -> None:
    check_step(shift(channels, mixes, dtype), random(SLOTS, channels, seed=3), dtype)


def test_token_shift_in_steps_of_any_size() -> None:
    check_bits(shift(150, 6, torch.bfloat16, 13), 150, 13)


def test_token_shift_without_a_past() -> None:
    x, mix = random(4, 3), random(2, 3, seed=1)
    got = native_ops().token_shift(x, mix, torch.zeros(1, 3), slots_of([4], [-1], [0]))
    before = torch.cat([torch.zeros(1, 3), x[:-1]])
    torch.testing.assert_close(got, torch.lerp(x[:, None], before[:, None], mix))


def inputs(heads: int, size: int, dtype: torch.dtype, tokens: int) -> list[Tensor]:
    rows = [random(tokens, heads, size, dtype=dtype, seed=i) for i in range(8)]
    return rows + [random(heads * size, seed=8 + i) for i in range(5)]


def wkv7(
    heads: int, size: int, dtype: torch.dtype, tokens: int = TOKENS, *, first: bool = True
) -> Operation:
    given = inputs(heads, size, dtype, tokens)
    parameters = Wkv7Parameters(*given[8:], eps=EPS)

    def run(table: Any, at: slice, state: Tensor, slots: StateMetadata) -> Tensor:
        rows = [apart(x[at]) for x in given[:8]]
        both = (rows[6], rows[7]) if first else None
        out = apart(torch.empty_like(rows[0]))
        return table.wkv7(Wkv7Inputs(*rows[:6], both), parameters, state, slots, out)

    return run


@dtypes
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("heads", "size"), SHAPES)
def test_wkv7(heads: int, size: int, first: bool, dtype: torch.dtype) -> None:
    state = random(SLOTS, heads * size**2, seed=20)
    check_step(wkv7(heads, size, dtype, first=first), state, dtype)


@pytest.mark.parametrize(("heads", "size"), [(2, 64), (1, 41)])
def test_wkv7_in_steps_of_any_size(heads: int, size: int) -> None:
    check_bits(wkv7(heads, size, torch.bfloat16, 70), heads * size**2, 70)


def test_the_reference_computes_the_equations_of_the_paper() -> None:
    """arXiv 2503.14456, equation 17 on; its matrix has a row for each value channel."""
    heads, size, tokens = 2, 6, 9
    given = inputs(heads, size, torch.float32, tokens)
    r, w, k, v, a, g, first, share = given[:8]
    xi, alpha, rho, weight, bias = (x.view(heads, size) for x in given[8:])
    state = torch.zeros(1, heads * size**2)
    got = reference_ops().wkv7(
        Wkv7Inputs(r, w, k, v, a, g, (first, share)),
        Wkv7Parameters(*given[8:], eps=EPS),
        state,
        slots_of([tokens], [-1], [0]),
    )
    w, a = torch.exp(-math.exp(-0.5) * w.sigmoid()), a.sigmoid()
    v = torch.lerp(v, first, share.sigmoid())
    kappa, k = F.normalize(k * xi, dim=-1), k * torch.lerp(torch.ones_like(a), a, alpha)
    s, read = torch.zeros(heads, size, size), torch.empty_like(v)
    for t in range(tokens):
        change = torch.diag_embed(w[t]) - kappa[t][..., None] * (a[t] * kappa[t])[:, None]
        s = s @ change + v[t][..., None] * k[t][:, None]
        read[t] = (s @ r[t][..., None])[..., 0]
    want = F.layer_norm(read, (size,), eps=EPS) * weight + bias
    want = g * (want + (r * rho * k).sum(-1, keepdim=True) * v)
    torch.testing.assert_close(got, want, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(state.view(s.shape), s.mT, atol=2e-6, rtol=2e-6)


def test_a_key_of_zeros_removes_nothing() -> None:
    rows, one = [torch.zeros(3, 1, 8) for _ in range(6)], torch.ones(8)
    rows[3] += 1.0
    before, slots = random(1, 64), slots_of([3], [0], [0])
    for table in (native_ops(), reference_ops()):
        state = before.clone()
        table.wkv7(Wkv7Inputs(*rows, None), Wkv7Parameters(*[one] * 5, EPS), state, slots)
        decay = math.exp(-1.5 * math.exp(-0.5))  # of three tokens
        torch.testing.assert_close(state, before * decay)
