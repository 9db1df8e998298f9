"""Recording of every operation, with the bits of a direct call; others are rejected."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.base import Ops
from octavo.kernels.lora import LoraTable
from octavo.kernels.memory import Arena
from octavo.kernels.native import NativeOps
from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.kernels.ops_states import StateRates, Wkv7Inputs, Wkv7Parameters
from octavo.kernels.replaced import ReplacedTable
from octavo.kernels.routing import ExpertActivation, Routing
from octavo.models.state_cache import StateMetadata
from octavo.system.tensor import full
from tests.torch_ops import native_ops

ops = native_ops()
ROWS, DIM, IDS = 9, 64, 40


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


weight, bias = random(128, DIM, seed=1), random(128, seed=2)
halved = ops.pack_weight(weight[: DIM + 32])
heads = ops.pack_weight(weight[:, :16].contiguous())
packed, quantized = ops.pack_weight(weight), ops.quantize_weight([weight], "int8", 0)
cos_sin, positions = random(ROWS, 8, seed=3), torch.arange(ROWS)
residual, vector = random(ROWS, DIM, seed=4), bias[:DIM].contiguous()
bounds = torch.tensor([-0.3, 0.7])
half = bias[: DIM // 2].contiguous()
ids = torch.arange(ROWS) * 7 % IDS
bitmask = torch.arange(ROWS * 2, dtype=torch.int32).view(ROWS, 2) * 77_777_777
others = torch.arange(ROWS).flip(0).contiguous()
states = torch.zeros(1, 3 * DIM)
decays = residual[:3, : DIM // 2].contiguous()
rates, matrices = torch.full((4,), 0.5), torch.zeros(1, 4 * 16 * 12)
ups = ops.stack([ops.pack_weight(random(2 * 16, DIM, seed=i)) for i in range(3)])
downs = ops.stack([ops.pack_weight(random(DIM, 16, seed=i)) for i in range(3)])
params = np.zeros(ROWS, SAMPLING_ROW)
params["temperature"], params["top_p"] = np.arange(ROWS) % 3, 0.9
params["seed"] = np.arange(ROWS)


def rotated(x: Tensor) -> Tensor:
    ops.rotary_embedding(positions[: len(x)], x.view(-1, 4, 16), x.view(-1, 4, 16), cos_sin)
    return x


def changed(x: Tensor, change: Callable[[Tensor], None]) -> Tensor:
    change(x)
    return x


def masked(x: Tensor) -> Tensor:
    n = len(x)  # in a plan every row of a step has one of the bitmask
    ops.apply_bitmask_(x, bitmask[:n], positions[:n])
    return x


@cache  # a plan keeps their addresses
def slots(rows: int) -> StateMetadata:
    """One request, which starts without a state and writes slot 0."""
    bounds, sources = torch.tensor([[0, rows], [-1, -1]], dtype=torch.int32)
    return StateMetadata(bounds, sources[:1], zeros := torch.zeros(rows, dtype=torch.int32), zeros)


def convolved(x: Tensor) -> Tensor:
    weight = residual[:4].reshape(DIM, 4)
    return ops.causal_conv(x, weight, None, states, slots(len(x)), "silu")


def remembered(x: Tensor) -> Tensor:
    keys, values = x[:, :32].view(-1, 2, 16), x[:, :48].view(-1, 4, 12)
    return ops.gated_delta_rule(
        keys, keys, values, x[:, :4], x[:, 4:8], rates, rates, matrices, slots(len(x))
    ).flatten(1)


def scanned(x: Tensor) -> Tensor:
    rows = len(x)
    return ops.ssd(
        x.view(rows, 4, 16),
        x[:, :4],
        x[:, :3].view(rows, 1, 3),
        residual[:rows, None, :3],
        StateRates(bias[:4], bias[4:8], bias[8:12]),
        states,
        slots(rows),
    )


def shifted(x: Tensor) -> Tensor:
    return ops.token_shift(x, bias.view(2, DIM), states[:, :DIM], slots(len(x))).flatten(1)


def mixed(x: Tensor) -> Tensor:
    rows = [x[:, i : i + 32].view(-1, 2, 16) for i in range(8)]
    vectors = [bias[i : i + 32] for i in range(5)]
    inputs = Wkv7Inputs(*rows[:6], (rows[6], rows[7]))
    parameters = Wkv7Parameters(*vectors, eps=1e-3)
    return ops.wkv7(inputs, parameters, matrices[:, :512], slots(len(x))).flatten(1)


def selected(x: Tensor) -> Tensor:
    half = DIM // 2
    numbers = StateRates(decays, bias[:half], bias[half:DIM])
    few, state = x[:, :3], states[:, : 3 * half]
    ranges = x[:, :half], x[:, half:], few, few, x[:, half:]
    return ops.selective_scan(*ranges, numbers, state, slots(len(x)))


def routed(x: Tensor) -> tuple[Tensor, Tensor]:
    return ops.route(x[:, :3], Routing(2, "softmax"))


def expert_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, places = ops.experts(x, routed(x)[0], ups, downs, ExpertActivation("silu"))
    return rows.view(len(x), 2 * DIM), places


def summed(x: Tensor) -> Tensor:
    rows, places = expert_rows(x)
    return ops.sum_experts(rows.view(-1, DIM), places, routed(x)[1])


adapters = LoraTable(2, [DIM, 32], DIM, 8)
for slot in range(2):
    adapters.set(
        slot,
        [
            ops.pack_lora(random(8, DIM, seed=slot), random(n, 8, seed=9), 0.5, torch.float32)
            for n in (DIM, 32)
        ],
    )
adapter_slots = torch.arange(ROWS, dtype=torch.int32) % 3 - 1


def adapted(x: Tensor) -> Tensor:
    out = ops.linear(x, halved)
    ops.add_lora(out, x, adapter_slots[: len(x)], adapters)
    return out


embedding_adapters = LoraTable(2, [DIM], IDS, 8)
for slot in range(2):
    factors = random(8, IDS, seed=slot), random(DIM, 8, seed=9)
    embedding_adapters.set(slot, [ops.pack_lora(*factors, 0.5, torch.float32)])


replaced_linear = ReplacedTable(2, (DIM, DIM), has_bias=True, is_embedding=False)
replaced_linear.set(0, ops.pack_replaced(weight[:DIM], bias[:DIM], torch.float32, replaced_linear))
replaced_table = ReplacedTable(2, (ROWS, DIM), has_bias=False, is_embedding=True)
replaced_table.set(1, ops.pack_replaced(residual, None, torch.float32, replaced_table))


def replaced(x: Tensor) -> Tensor:
    n = len(x)
    out = ops.linear(x, halved)[:, :DIM]
    ops.replace_linear(out, x, adapter_slots[:n], replaced_linear)
    return out


def looked_up(x: Tensor) -> Tensor:
    n = len(x)
    ops.replace_embedding(x, positions[:n], adapter_slots[:n], replaced_table)
    return x


def embedded(x: Tensor) -> Tensor:
    n = len(x)
    ops.add_lora_embedding(x, ids[:n], adapter_slots[:n], embedding_adapters)
    return x


of_experts = LoraTable(2, [DIM], DIM, 8, experts=3)
for slot in range(6):
    of_experts.set(slot, adapters.weights[slot % 2][:1])


def adapted_experts(x: Tensor) -> Tensor:
    (rows, places), chosen = expert_rows(x), routed(x)[0]
    slots, act = adapter_slots[: len(x)], ExpertActivation("silu")
    inner = ops.add_expert_lora(rows.view(-1, DIM), x, chosen, places, slots, of_experts, act)
    return inner.view(len(x), DIM)


share = torch.tensor([1, 0, 1], dtype=torch.int32)


def rows_of_processes(x: Tensor) -> tuple[Tensor, ...]:
    """Two processes, of which the second one leaves out an expert."""
    (rows, places), chosen = expert_rows(x), routed(x)[0]
    rows = rows.view(-1, DIM)
    own, order = ops.take_expert_rows(rows, chosen, places, 3)
    changed = ops.scale(rows.view(len(x), 2 * DIM), 1.0).view(-1, DIM)
    other = ops.scale(own.view(len(x), 2 * DIM), 3.0).view(-1, DIM)
    ops.put_expert_rows(changed, other, chosen, places, order, share)
    return own.view(len(x), 2 * DIM), changed.view(len(x), 2 * DIM)


NOT_IN_STEPS = {
    "stack",
    "pack_lora",
    "pack_replaced",
    "pack_weight",
    "quantize_weight",
    "pack_blocks",
    "pack_quantized",
    "empty",
}
NOT_IN_STEPS |= {
    "to_device",
    "to_host",
    "copy_to_host",
    "copy_",
    "copy_blocks",
    "put_adapter_tables",
}
NOT_IN_STEPS |= {"gather", "ranks", "set_at_", "add_at_", "penalize_", "change_rows"}
"""Operations that a recorded step does not have."""

CASES: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "linear": lambda x: (ops.linear(x, packed, bias), ops.linear(x, quantized, bias)),
    "add_lora": adapted,
    "add_lora_embedding": embedded,
    "replace_linear": replaced,
    "replace_embedding": looked_up,
    "add_expert_lora": adapted_experts,
    "take_expert_rows": rows_of_processes,
    "put_expert_rows": rows_of_processes,
    "head_linear": lambda x: ops.head_linear(x.view(-1, 4, 16), heads, 4).flatten(1),
    "linear_act": lambda x: (
        ops.linear_act(x, packed, bias, "gelu"),
        ops.linear_act(x, quantized, bias, "relu"),
    ),
    "linear_act_and_mul": lambda x: ops.linear_act_and_mul(x, packed, bias, "silu"),
    "rms_norm": lambda x: ops.rms_norm(x, vector, 1e-5),
    "fused_add_rms_norm": lambda x: ops.fused_add_rms_norm(x, residual[: len(x)], vector, 1e-5),
    "layer_norm": lambda x: ops.layer_norm(x, vector, vector, 1e-5),
    "fused_add_layer_norm": lambda x: ops.fused_add_layer_norm(
        x, residual[: len(x)], vector, vector, 1e-5
    ),
    "rms": lambda x: ops.rms(x, 1e-5, inverse=True),
    "cutoff": lambda x: ops.cutoff(x, 0.5),
    "act_and_mul": lambda x: ops.act_and_mul(x, "gelu"),
    "gelu": lambda x: ops.gelu(x, "tanh"),
    "silu": ops.silu,
    "relu": ops.relu,
    "sigmoid": ops.sigmoid,
    "xielu": lambda x: ops.xielu(x, vector[:2]),
    "clip": lambda x: ops.clip(x, bounds),
    "multiply": lambda x: ops.multiply(x, residual[: len(x)], "sigmoid"),
    "add": lambda x: ops.add(x, residual[: len(x)]),
    "sum_parts": lambda x: ops.sum_parts(x, 2, half, torch.float32),
    "scale": lambda x: ops.scale(x, 3.0),
    "scale_": lambda x: changed(x, lambda x: ops.scale_(x, 3.0)),
    "clamp_": lambda x: changed(x, lambda x: ops.clamp_(x, 0.5)),
    "soft_cap_": lambda x: changed(x, lambda x: ops.soft_cap_(x, 0.5)),
    "call": lambda x: changed(
        x, lambda x: ops.call(lambda tokens, requests: x[:tokens].mul_(2), len(x), 0)
    ),
    "exp": ops.exp,
    "log": lambda x: ops.log(ops.exp(x)),
    "rotary_embedding": rotated,
    "causal_conv": convolved,
    "gated_delta_rule": remembered,
    "ssd": scanned,
    "token_shift": shifted,
    "wkv7": mixed,
    "selective_scan": selected,
    "route": routed,
    "experts": expert_rows,
    "sum_experts": summed,
    "softmax": ops.softmax,
    "log_softmax": ops.log_softmax,
    "argmax": ops.argmax,
    "row_max": ops.row_max,
    "sample": lambda x: ops.sample(x, params[: len(x)]),
    "apply_bitmask_": masked,
    "top_k": lambda x: ops.top_k(x, 5),
    "embedding": lambda x: (
        ops.embedding(residual, ids[: len(x)]),
        ops.embedding(packed, ids[: len(x)]),
    ),
}


def test_no_operation_is_forgotten() -> None:
    operations = {x for x in dir(Ops) if x[0] != "_" and callable(getattr(Ops, x))}
    assert operations - NOT_IN_STEPS == {*CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_operation_has_the_bits_of_a_direct_one(name: str) -> None:
    with torch.inference_mode():
        plan, arena, x = _native.Plan(), Arena(2**16), torch.full((ROWS, DIM), torch.nan)
        with ops.record(plan, arena):
            recorded = CASES[name](x)
        assert len(plan) > 0
        assert x.isnan().all(), "recording computes nothing"
        for seed, rows in enumerate((ROWS, 1, 4, 0, ROWS)):
            given = random(rows, DIM, seed=seed)
            x[:rows] = given
            plan.run(rows, 1, 0)
            direct = CASES[name](given)
            for got, want in zip(as_tuple(recorded), as_tuple(direct), strict=True):
                assert got.dtype == want.dtype
                assert got[:rows].numpy().tobytes() == want.numpy().tobytes()
        memory = arena._memory.ctypes.data
        for result in as_tuple(recorded):
            assert result is x or memory <= result.data_ptr() < memory + arena.peak


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def record(run: Callable[[Tensor], object]) -> int:
    """Return the number of recorded calls for a tensor with strided numbers."""
    plan, x = _native.Plan(), torch.ones(4, 8)[:, ::2]
    with ops.record(plan, Arena(2**12)):
        run(x)
    return len(plan)


def test_numbers_cannot_be_read_while_a_plan_records() -> None:
    x = full((2, 3), 1, "float32")
    inner = NativeOps()
    with inner.record(_native.Plan(), Arena(2**12)):
        for compute in (x.numpy, lambda: inner.copy_(x, x), lambda: inner.to_host(x)):
            with pytest.raises(RuntimeError, match="Reading a tensor cannot be recorded"):
                compute()
    assert x.numpy().sum() == 6


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("pack_weight", lambda x: ops.pack_weight(weight, out=packed.data)),
        ("quantize_weight", lambda x: ops.quantize_weight([weight], "int8", 0, quantized.data)),
        ("philox_uniforms", lambda x: _native.philox_uniforms(0, 0, 0, 0, 0)),
        ("another plan", lambda x: _native.Plan().begin()),
    ],
)
def test_native_code_that_no_step_repeats_is_refused(
    name: str, run: Callable[[Tensor], object]
) -> None:
    with pytest.raises(RuntimeError, match=f"{name} cannot be recorded"):
        record(run)


def test_a_bitmask_for_rows_that_are_not_there_changes_nothing() -> None:
    x = torch.zeros(3, 40)
    mask = torch.zeros(4, 2, dtype=torch.int32)
    ops.apply_bitmask_(x, mask, torch.tensor([-1, 3, 2**62, 1]))
    assert x.isinf().all(1).tolist() == [False, True, False]
    assert x[[0, 2]].count_nonzero() == 0
