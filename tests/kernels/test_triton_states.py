"""Triton's operations with states, in the interpreter, against the torch reference."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.kernels.ops_states import StateRates, Wkv7Inputs, Wkv7Parameters
from tests.kernels.test_delta_rule import rule, state_size
from tests.kernels.test_state import (
    SLOTS,
    TOKENS,
    Operation,
    check_bits,
    check_step,
    conv,
    random,
    selective,
    slots_of,
    ssd,
)
from tests.kernels.test_wkv7 import EPS, shift, wkv7

pytest.importorskip("triton", reason="the package triton is not installed")

from octavo.kernels.triton.ops import TritonOps
from tests.torch_ops import Named

ops = Named(TritonOps(upcast=True))
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16


def operations(dtype: torch.dtype, tokens: int) -> dict[str, tuple[Operation, int]]:
    """Return operations of odd sizes, some with more than one tile, and the sizes of states."""
    shape = (2, 4, 5, 37)
    return {
        "conv": (conv(300, 4, dtype, tokens), 900),
        "conv of two taps": (conv(7, 2, dtype, tokens), 7),
        "conv of eight taps": (conv(5, 8, dtype, tokens), 35),
        "delta rule": (rule(shape, False, dtype, tokens, 2.0), state_size(shape)),
        "delta rule by channel": (rule(shape, True, dtype, tokens), state_size(shape)),
        "ssd": (ssd(3, 1, 37, 6, dtype, tokens, dt_max=3.0), 3 * 37 * 6),
        "ssd of groups": (ssd(4, 2, 5, 9, dtype, tokens), 4 * 5 * 9),
        "selective scan": (selective(41, 3, dtype, tokens), 3 * 41),
        "token shift": (shift(301, 3, dtype, tokens), 301),
        "wkv7": (wkv7(2, 7, dtype, tokens), 2 * 49),
        "wkv7 of the first layer": (wkv7(1, 16, dtype, tokens, first=False), 256),
    }


names = pytest.mark.parametrize("name", list(operations(FLOAT, 1)))


@names
def test_a_step(name: str) -> None:
    """The types take turns."""
    dtype = [FLOAT, HALF, BFLOAT][len(name) % 3]
    run, size = operations(dtype, TOKENS)[name]
    check_step(run, random(SLOTS, size, seed=9), dtype, ops)


@names
def test_steps_of_any_size(name: str) -> None:
    run, size = operations(HALF, 9)[name]
    check_bits(run, size, 9, ops)


def test_several_slots_in_rotation() -> None:
    """A request replaces the state that it starts with before its last token."""
    run, size = operations(FLOAT, TOKENS)["conv of eight taps"]
    slots, late = (slots_of([TOKENS], [2], [1]) for _ in range(2))
    slots.slots[1], late.slots[1] = 2, 4  # the source itself, and another slot
    state, other = random(SLOTS, size), random(SLOTS, size)
    got = run(ops, slice(TOKENS), state, slots)
    assert torch.equal(run(ops, slice(TOKENS), other, late), got)
    assert torch.equal(state[1], other[1])
    assert torch.equal(state[2], other[4])


def test_rows_that_fill_a_captured_step_do_nothing() -> None:
    for run, size in operations(FLOAT, 3).values():
        state = random(2, size, seed=9)
        before, slots = state.clone(), slots_of([1, 1, 1], [1, -1, -1], [0, -1, -1])
        run(ops, slice(3), state, slots)
        assert torch.equal(state[1], before[1])
        assert not torch.equal(state[0], before[0])


def test_no_tokens() -> None:
    for run, size in operations(FLOAT, 3).values():
        assert len(run(ops, slice(0), random(2, size), slots_of([], [], []))) == 0


def test_small_and_large_steps_of_time() -> None:
    """Softplus keeps its relative precision."""
    dt = torch.linspace(-60, 30, 37)[:, None]
    one = torch.ones(37, 1, 1)
    rates = StateRates(torch.full((1,), -200.0), torch.zeros(1), torch.zeros(1))
    slots = slots_of([1] * 37, [-1] * 37, [0] * 37)
    got = ops.ssd(one, dt, one, one, rates, torch.zeros(1, 1), slots)
    want = torch.nn.functional.softplus(dt.double())
    torch.testing.assert_close(got[..., 0].double(), want, rtol=1e-6, atol=0)


def test_a_key_of_zeros_removes_nothing() -> None:
    rows, one = [torch.zeros(3, 1, 8) for _ in range(6)], torch.ones(8)
    rows[3] += 1.0
    before, slots = random(1, 64), slots_of([3], [0], [0])
    state = before.clone()
    ops.wkv7(Wkv7Inputs(*rows, None), Wkv7Parameters(*[one] * 5, EPS), state, slots)
    torch.testing.assert_close(state, before * math.exp(-1.5 * math.exp(-0.5)))
