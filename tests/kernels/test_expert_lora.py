"""Changes of adapters to experts: against the reference, and bitwise alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels import native
from octavo.kernels.lora import ExpertPart, LoraTable
from octavo.kernels.native import NativeOps
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.routing import ExpertActivation
from octavo.kernels.torch_tensors import as_torch, from_torch
from tests.kernels.test_state import random

pytestmark = pytest.mark.usefixtures("isa")
EXPERTS, SLOTS, HIDDEN, TOP_K = 5, 3, 70, 2
SILU = ExpertActivation("silu")
CLAMPED = ExpertActivation("swigluoai", limit=0.7)
RELU2 = ExpertActivation("relu2", gated=False)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def table_of(ops: Any, outputs: list[int], k: int, dtype: str) -> LoraTable:
    """Return a table in which slot 1 leaves out an expert, and slot 2 one module of each."""
    table = LoraTable(SLOTS, outputs, k, 16, experts=EXPERTS)
    for slot in range(SLOTS):
        for expert in range(EXPERTS):
            seed, rank = 20 * slot + expert, 3 + slot
            made = [
                ops.pack_lora(
                    from_torch(random(rank, k, seed=seed) / k**0.5),
                    from_torch(random(n, rank, seed=seed + i)),
                    0.5,
                    dtype,
                )
                for i, n in enumerate(outputs)
            ]
            if slot == 2 and len(outputs) > 1:
                made[0] = None
            if (slot, expert) != (1, 2):
                ExpertPart(table, expert).set(slot, made)
    return table


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    numbers = np.random.RandomState(tokens)
    ids = np.argsort(numbers.rand(tokens, EXPERTS), 1)[:, :TOP_K].astype(np.int32)
    order = np.argsort(ids.ravel(), kind="stable")
    places = np.empty(tokens * TOP_K, np.int32)
    places[order] = np.arange(tokens * TOP_K)
    slots = torch.from_numpy(numbers.randint(-1, SLOTS, tokens).astype(np.int32))
    x = random(tokens, HIDDEN, dtype=dtype, seed=tokens)
    return x, torch.from_numpy(ids), torch.from_numpy(places).view(tokens, TOP_K), slots


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("activation", [SILU, CLAMPED, RELU2, None], ids=str)
def test_like_the_reference(activation: ExpertActivation | None, dtype: torch.dtype) -> None:
    """Also with factors of the inputs, and each token as alone."""
    outputs, name = [32, 32] if activation and activation.gated else [64], str(dtype)[6:]
    ops, reference = NativeOps(), ReferenceOps()
    tables = [table_of(it, outputs, HIDDEN, name) for it in (ops, reference)]
    for tokens in (1, 9, 40):
        x, ids, places, slots = inputs(tokens, dtype)
        factors = None if tokens == 9 else random(tokens, TOP_K, seed=3)
        if activation is None:
            x, factors = random(tokens * TOP_K, HIDDEN, dtype=dtype, seed=7), None
        base = random(tokens * TOP_K, 64, dtype=dtype, seed=8)

        def run(operations: Any, table: LoraTable, wrap: Any, out: Tensor, *given: Any) -> Tensor:
            x, ids, places, slots, factors = (None if it is None else wrap(it) for it in given)
            result = operations.add_expert_lora(
                wrap(out), x, ids, places, slots, table, activation, factors
            )
            return as_torch(result) if wrap is from_torch else result

        found = run(ops, tables[0], from_torch, base.clone(), x, ids, places, slots, factors)
        expected = run(
            reference, tables[1], lambda it: it, base.clone(), x, ids, places, slots, factors
        )
        error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
        assert error < TOLERANCE[dtype]
        for token in range(tokens):
            rows = places[token].long()
            order = rows.argsort()
            alone = run(
                ops,
                tables[0],
                from_torch,
                base[rows[order]].clone(),
                x[token : token + 1].clone() if activation else x[rows[order]].clone(),
                ids[token : token + 1].clone(),
                order.argsort().int().view(1, TOP_K),
                slots[token : token + 1].clone(),
                None if factors is None else factors[token : token + 1].clone(),
            )
            assert torch.equal(alone, found[rows[order]])
        if activation is None:
            unchanged = places[slots < 0].flatten().long()
            assert torch.equal(found[unchanged], base[unchanged])
            assert tokens == 1 or not torch.equal(found, base)


@pytest.mark.parametrize("activation", [SILU, None], ids=str)
def test_any_number_of_threads_and_no_byte_beside_the_rows(
    activation: ExpertActivation | None, one_and_two_threads: list[int]
) -> None:
    ops, tokens, results = NativeOps(), 90, []
    table = table_of(ops, [32, 32], HIDDEN, "bfloat16")
    x, ids, places, slots = inputs(tokens, torch.bfloat16)
    pairs = tokens * TOP_K
    if activation is None:
        x = random(pairs, HIDDEN, dtype=torch.bfloat16, seed=7)
    for threads in one_and_two_threads:
        native.set_num_threads(threads)
        memory = random(pairs + 2, 64, dtype=torch.bfloat16, seed=8)
        inner = random(pairs + 2, 34, dtype=torch.bfloat16, seed=9)
        before = memory.clone(), inner.clone()
        ops.add_expert_lora(
            from_torch(memory[1:-1]),
            *map(from_torch, (x, ids, places, slots)),
            table,
            activation,
            inner=None if activation is None else from_torch(inner[1:-1, 1:-1]),
        )
        changed = memory[1:-1] if activation is None else inner[1:-1, 1:-1]
        results.append(changed.clone())
        assert not torch.equal(memory, before[0])
        assert torch.equal(inner, before[1]) == (activation is None)
        memory[1:-1], inner[1:-1, 1:-1] = before[0][1:-1], before[1][1:-1, 1:-1]
        assert torch.equal(memory, before[0])
        assert torch.equal(inner, before[1])
    assert torch.equal(*results)


@pytest.mark.parametrize("share", [None, [1, 0, 1, 1, 0]], ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_rows_of_several_processes(
    tokens: int, share: list[int] | None, one_and_two_threads: list[int]
) -> None:
    """This process has some tokens in the middle of all."""
    own, some = slice(tokens, 2 * tokens), None
    if share is not None:
        some = torch.tensor(share, dtype=torch.int32)
    _, all_ids, all_places, _ = inputs(3 * tokens, torch.float32)
    ids, places = all_ids[own].clone(), all_places[own].clone()
    rows = random(3 * tokens * TOP_K, 9, seed=1)
    wanted = torch.ones_like(ids, dtype=torch.bool) if some is None else some[ids.long()] != 0
    for operations, wrap in ((ReferenceOps(), lambda it: it), (NativeOps(), from_torch)):
        for threads in one_and_two_threads:
            native.set_num_threads(threads)
            given: list[Any] = [wrap(it) for it in (ids, places)]
            of_experts = None if some is None else wrap(some)
            memory = random(len(rows), 12, seed=2)
            memory[:, 1:10] = rows
            args: list[Any] = [*given, EXPERTS, of_experts]
            taken, order = (
                it if isinstance(it, Tensor) else as_torch(it)
                for it in operations.take_expert_rows(wrap(memory[:, 1:10]), *args)
            )
            assert sorted(order.flatten().tolist()) == list(range(tokens * TOP_K))
            assert (ids.flatten()[order.flatten().argsort()].diff() >= 0).all()
            assert torch.equal(taken[order[wanted].long()], rows[places[wanted].long()])
            before, changed = memory.clone(), random(tokens * TOP_K, 9, seed=3)
            operations.put_expert_rows(
                wrap(memory[:, 1:10]), wrap(changed), *given, wrap(order), of_experts
            )
            before[places[wanted].long(), 1:10] = changed[order[wanted].long()]
            assert torch.equal(memory, before)
