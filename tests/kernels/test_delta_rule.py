"""Gated delta rule: against the reference and transformers, and bitwise in steps of other sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from octavo.models.state_cache import StateMetadata
from tests.kernels.test_state import (
    SLOTS,
    TOKENS,
    Operation,
    check_bits,
    check_step,
    dtypes,
    random,
    slots_of,
)
from tests.torch_ops import reference_ops

pytestmark = pytest.mark.usefixtures("isa")
Shape = tuple[int, int, int, int]
"""Heads of keys, heads, size of a key, size of a value."""


def inputs(shape: Shape, by_channel: bool, dtype: torch.dtype, tokens: int) -> list[Tensor]:
    key_heads, heads, key_size, value_size = shape
    decays = heads * (key_size if by_channel else 1)
    sizes = [(key_heads, key_size), (key_heads, key_size), (heads, value_size), (decays,), (heads,)]
    return [random(tokens, *size, dtype=dtype, seed=i) for i, size in enumerate(sizes)] + [
        random(heads, seed=7),
        random(decays, seed=8),
    ]


def apart(x: Tensor) -> Tensor:
    """Return the same numbers with rows further apart."""
    rows = x.flatten(1)
    return torch.cat([rows, rows], 1)[:, : rows.shape[1]].view(x.shape)


def rule(
    shape: Shape, by_channel: bool, dtype: torch.dtype, tokens: int = TOKENS, scale: float = 1.0
) -> Operation:
    given = inputs(shape, by_channel, dtype, tokens)

    def run(table: Any, at: slice, state: Tensor, slots: StateMetadata) -> Tensor:
        rows = [apart(x[at]) for x in given[:5]]
        out = apart(torch.empty_like(rows[2]))
        return table.gated_delta_rule(*rows, *given[5:], state, slots, scale, out)

    return run


def state_size(shape: Shape) -> int:
    _, heads, key_size, value_size = shape
    return heads * key_size * value_size


SHAPES = [(1, 1, 16, 32), (2, 4, 24, 40), (3, 3, 7, 5), (1, 3, 33, 70)]


@dtypes
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_delta_rule(shape: Shape, by_channel: bool, dtype: torch.dtype) -> None:
    state = random(SLOTS, state_size(shape), seed=9)
    check_step(rule(shape, by_channel, dtype, scale=2.0), state, dtype)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 24, 40), (1, 1, 16, 200)], ids=str)
def test_gated_delta_rule_in_steps_of_any_size(shape: Shape, by_channel: bool) -> None:
    check_bits(rule(shape, by_channel, torch.bfloat16, 70), state_size(shape), 70)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_reference_computes_what_transformers_does(by_channel: bool) -> None:
    shape = 2, 2 if by_channel else 4, 6, 10
    query, key, value, decay, beta, a_log, dt_bias = inputs(shape, by_channel, torch.float32, 9)
    state = torch.zeros(1, state_size(shape))
    slots = slots_of([9], [-1], [0])
    got = reference_ops().gated_delta_rule(
        query, key, value, decay, beta, a_log, dt_bias, state, slots
    )
    rate = torch.nn.functional.softplus(decay + dt_bias)
    g = -a_log.exp()[:, None] * rate.view(9, shape[1], -1)
    run: Any = (
        modeling_kimi_linear.recurrent_kimi_delta_attention
        if by_channel
        else modeling_qwen3_next.torch_recurrent_gated_delta_rule
    )
    want, last = run(
        query[None],
        key[None],
        value[None],
        g=(g if by_channel else g[..., 0])[None],
        beta=beta.sigmoid()[None],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(got, want[0], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(state.view_as(last), last, atol=2e-6, rtol=2e-6)
