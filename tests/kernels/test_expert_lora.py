"""Changes of adapters to experts: against the reference, and bitwise alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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
        factors = None if tokens == 9 else torch.rand(tokens, TOP_K)
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
