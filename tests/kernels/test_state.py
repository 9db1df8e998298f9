"""Operations with recurrent states: against the reference, and bitwise in steps of other sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import native
from octavo.kernels.ops_states import StateRates
from octavo.models.state_cache import StateMetadata
from tests.torch_ops import native_ops, reference_ops

ops, reference = native_ops(), reference_ops()
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
pytestmark = pytest.mark.usefixtures("isa")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: Tensor) -> Tensor:
    """Return the same numbers with rows further apart."""
    return torch.cat([x, x.new_full((len(x), 3), 7.0)], 1)[:, :-3]


def slots_of(
    counts: list[int],
    sources: list[int],
    targets: list[int],
    snapshots: dict[int, int] | None = None,
) -> StateMetadata:
    """Return the slots of a step.

    Args:
        counts: number of tokens of each request.
        sources: slot of the state before each request's first token; -1: zeros.
        targets: slot that receives the state after each request's last token.
        snapshots: token of the step -> a slot that receives the state after it.
    """
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    slots = torch.full((sum(counts),), -1, dtype=torch.int32)
    slots[starts[1:].long() - 1] = torch.tensor(targets, dtype=torch.int32)
    kept = torch.full_like(slots, -1)
    for token, slot in (snapshots or {}).items():
        kept[token] = slot
    return StateMetadata(starts, torch.tensor(sources, dtype=torch.int32), slots, kept)


# Requests of 1, 7 and 3 tokens. The second one starts with a state, which it replaces; slot 4
# keeps its state after 4 tokens.
STEP = slots_of([1, 7, 3], [-1, 2, 5], [0, 2, 1], {4: 4})
TOKENS, SLOTS = 11, 6

Operation = Callable[[Any, slice, Tensor, StateMetadata], Tensor]
"""Function (operations, tokens, state, slots) -> result for these tokens."""


def check_step(run: Operation, state: Tensor, dtype: torch.dtype, tested: Any = ops) -> None:
    """Compare results and states with those of the reference."""
    results = []
    for table in (tested, reference):
        own = strided(state)
        results.append((run(table, slice(TOKENS), own, STEP), own))
    (got, got_state), (want, want_state) = results
    tolerance = TOLERANCE[dtype]
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got_state, want_state, atol=2e-5, rtol=2e-5)
    assert torch.equal(got_state[3], state[3]), "no request has this slot"


def check_bits(run: Operation, state_size: int, tokens: int, tested: Any = ops) -> None:
    """Compare one step with steps of other sizes, and with two threads."""
    found = []
    for size, threads in ((tokens, 1), (tokens, 2), (1, 2), (4, 2)):
        native.set_num_threads(threads)
        state, parts = torch.full((2, state_size), torch.nan), []
        for begin in range(0, tokens, size):
            end = min(begin + size, tokens)
            slots = slots_of([end - begin], [1 if begin else -1], [1])
            parts.append(run(tested, slice(begin, end), state, slots))
        found.append((torch.cat(parts), state[1]))
    native.set_num_threads(0)
    for result, state in found[1:]:
        assert torch.equal(result, found[0][0])
        assert torch.equal(state, found[0][1])


def conv(channels: int, taps: int, dtype: torch.dtype, tokens: int = TOKENS) -> Operation:
    x = random(tokens, channels, dtype=dtype)
    weight = random(channels, taps, dtype=dtype, seed=1)
    bias = random(channels, dtype=dtype, seed=2) if taps == 4 else None
    activation = "silu" if taps == 4 else "none"

    def run(table: Any, at: slice, state: Tensor, slots: StateMetadata) -> Tensor:
        out = strided(torch.empty_like(x[at]))
        return table.causal_conv(strided(x[at]), weight, bias, state, slots, activation, out)

    return run


@dtypes
@pytest.mark.parametrize(("channels", "taps"), [(5, 4), (128, 3), (300, 4), (33, 2), (7, 8)])
def test_causal_conv(channels: int, taps: int, dtype: torch.dtype) -> None:
    state = random(SLOTS, (taps - 1) * channels, seed=3)
    check_step(conv(channels, taps, dtype), state, dtype)


@pytest.mark.parametrize("taps", [3, 4])
def test_causal_conv_in_steps_of_any_size(taps: int) -> None:
    check_bits(conv(150, taps, torch.bfloat16, 13), (taps - 1) * 150, 13)


def test_causal_conv_in_place() -> None:
    x, weight, state = random(TOKENS, 40), random(40, 4, seed=1), random(SLOTS, 120, seed=3)
    want = ops.causal_conv(x, weight, None, state.clone(), STEP, "silu")
    assert torch.equal(ops.causal_conv(x, weight, None, state, STEP, "silu", x), want)


def ssd(
    heads: int,
    groups: int,
    head_size: int,
    state_size: int,
    dtype: torch.dtype,
    tokens: int = TOKENS,
    dt_max: float = float("inf"),
) -> Operation:
    x, numbers = random(tokens, heads * head_size, dtype=dtype), groups * state_size
    dt = random(tokens, heads, dtype=dtype, seed=1) * 4
    b, c = (random(tokens, numbers, dtype=dtype, seed=i) for i in (2, 3))
    rates = StateRates(*(random(heads, seed=4 + i) for i in range(3)), dt_min=0.02, dt_max=dt_max)

    def run(table: Any, at: slice, state: Tensor, slots: StateMetadata) -> Tensor:
        out = strided(torch.empty_like(x[at]))
        shaped = [
            strided(z[at]).unflatten(1, (n, -1)) for z, n in ((x, heads), (b, groups), (c, groups))
        ]
        given = out.unflatten(1, (heads, -1))
        table.ssd(shaped[0], strided(dt[at]), *shaped[1:], rates, state, slots, given)
        return out

    return run


@dtypes
@pytest.mark.parametrize(
    ("heads", "groups", "head_size", "state_size"),
    [(4, 2, 64, 16), (3, 1, 5, 13), (2, 2, 20, 8), (2, 1, 33, 9), (1, 1, 100, 40)],
)
def test_ssd(heads: int, groups: int, head_size: int, state_size: int, dtype: torch.dtype) -> None:
    state = random(SLOTS, heads * state_size * head_size, seed=9)
    run = ssd(heads, groups, head_size, state_size, dtype, dt_max=3.0)
    check_step(run, state, dtype)


@pytest.mark.parametrize(("head_size", "state_size"), [(64, 16), (21, 11)])
def test_ssd_in_steps_of_any_size(head_size: int, state_size: int) -> None:
    run = ssd(4, 2, head_size, state_size, torch.bfloat16, 70)
    check_bits(run, 4 * head_size * state_size, 70)


def selective(
    channels: int, state_size: int, dtype: torch.dtype, tokens: int = TOKENS
) -> Operation:
    x, dt, gate = (random(tokens, channels, dtype=dtype, seed=i) for i in range(3))
    b, c = (random(tokens, state_size, dtype=dtype, seed=i) for i in (3, 4))
    numbers = [
        random(*shape, channels, seed=5 + i) for i, shape in enumerate([(state_size,), (), ()])
    ]

    def run(table: Any, at: slice, state: Tensor, slots: StateMetadata) -> Tensor:
        out = strided(torch.empty_like(x[at]))
        inputs = [strided(z[at]) for z in (x, dt * 4, b, c, gate)]
        return table.selective_scan(*inputs, StateRates(*numbers), state, slots, out)

    return run


@dtypes
@pytest.mark.parametrize(("channels", "state_size"), [(300, 16), (7, 3), (128, 1), (33, 21)])
def test_selective_scan(channels: int, state_size: int, dtype: torch.dtype) -> None:
    state = random(SLOTS, state_size * channels, seed=9)
    check_step(selective(channels, state_size, dtype), state, dtype)


def test_selective_scan_in_steps_of_any_size() -> None:
    check_bits(selective(150, 11, torch.bfloat16, 70), 11 * 150, 70)


def test_small_and_large_steps_of_time() -> None:
    """Softplus keeps its relative precision."""
    dt = torch.linspace(-60, 30, 181)[:, None]
    one = torch.ones(181, 1, 1)
    rates = StateRates(torch.full((1,), -200.0), torch.zeros(1), torch.zeros(1))
    slots = slots_of([1] * 181, [-1] * 181, [0] * 181)
    got = ops.ssd(one, dt, one, one, rates, torch.zeros(1, 1), slots)
    want = torch.nn.functional.softplus(dt.double())
    torch.testing.assert_close(got[..., 0].double(), want, rtol=1e-6, atol=0)
