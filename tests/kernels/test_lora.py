"""Changes of LoRA adapters: against the reference and the definition, and bitwise alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import native
from octavo.kernels.lora import LoraTable
from octavo.kernels.sizes import lora_nbytes, lora_scratch_nbytes
from octavo.kernels.torch_tensors import from_torch
from tests.kernels.test_state import random, strided
from tests.torch_ops import Named, native_ops, reference_ops

ops, reference = native_ops(), reference_ops()
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
pytestmark = pytest.mark.usefixtures("isa")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Adapter = list[tuple[Tensor, Tensor, float] | None]
"""A, B and scale of each module of a layer."""


def adapter(outputs: list[int], k: int, rank: int, seed: int, skipped: int = -1) -> Adapter:
    """Return an adapter of a layer that does not change the module `skipped`."""
    return [
        None
        if i == skipped
        else (
            random(rank, k, seed=seed + 2 * i) / k**0.5,
            random(n, rank, seed=seed + 2 * i + 1) / rank**0.5,
            0.5 + seed % 7,
        )
        for i, n in enumerate(outputs)
    ]


def sizes(adapters: list[Adapter]) -> list[int]:
    """Return the number of outputs of each module."""
    return [next(len(m[1]) for m in modules if m) for modules in zip(*adapters, strict=True)]


def pack(table: Any, module: tuple[Tensor, Tensor, float], dtype: torch.dtype) -> Any:
    a, b, scale = module
    if isinstance(table, Named):
        return table.pack_lora(from_torch(a), from_torch(b), scale, dtype)
    return table.pack_lora(a, b, scale, dtype)


def table_of(
    table: Any, adapters: list[Adapter], k: int, dtype: torch.dtype, rank: int
) -> LoraTable:
    """Return the table of adapters for some operations."""
    result = LoraTable(len(adapters), sizes(adapters), k, rank)
    for slot, modules in enumerate(adapters):
        result.set(slot, [None if m is None else pack(table, m, dtype) for m in modules])
    table.put_lora_tables([result])
    return result


def truth(
    base: Tensor, x: Tensor, slots: Tensor, adapters: list[Adapter], dtype: torch.dtype
) -> Tensor:
    out = base.double()
    for row, slot in enumerate(slots.tolist()):
        begin = 0
        for i, n in enumerate(sizes(adapters)):
            module = adapters[slot][i] if slot >= 0 else None
            if module is not None:
                a, b = (matrix.to(dtype).double() for matrix in module[:2])
                out[row, begin : begin + n] += module[2] * (x[row].double() @ a.T) @ b.T
            begin += n
    return out


SHAPES = [
    # rows, outputs, inputs, ranks
    (1, [5], 3, [1]),
    (7, [64, 16, 16], 40, [4, 16, 8]),
    (9, [130], 1100, [8, 33]),
    (33, [70, 3], 513, [16, 2, 64]),
    (150, [40, 24], 96, [8, 16]),
]


@dtypes
@pytest.mark.parametrize(("rows", "outputs", "k", "ranks"), SHAPES)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32"])
def test_add_lora(
    rows: int, outputs: list[int], k: int, ranks: list[int], dtype: torch.dtype, wide: bool
) -> None:
    adapters = [adapter(outputs, k, rank, 10 * i) for i, rank in enumerate(ranks)]
    if len(outputs) > 1:
        adapters.append(adapter(outputs, k, 3, 99, skipped=1))
    x = strided(random(rows, k, dtype=dtype))
    slots = (torch.arange(rows) * 7 // 3 % (len(adapters) + 1) - 1).int()
    out_dtype = torch.float32 if wide else dtype
    base = random(rows, sum(outputs), dtype=out_dtype, seed=5)
    expected = truth(base, x, slots, adapters, dtype)
    results = []
    for operations in (ops, reference):
        table = table_of(operations, adapters, k, dtype, 64)
        out = strided(base.clone())
        operations.add_lora(out, x, slots, table)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error < (TOLERANCE[torch.float32] if wide else TOLERANCE[dtype])
        results.append(out)
    assert torch.equal(results[0][slots < 0], base[slots < 0])
    table = table_of(ops, adapters, k, dtype, 64)
    for row in range(rows):  # as alone
        alone = base[row : row + 1].clone()
        ops.add_lora(alone, x[row : row + 1], slots[row : row + 1].clone(), table)
        assert torch.equal(alone, results[0][row : row + 1])


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=80), st.randoms())
@settings(max_examples=40, deadline=None)
def test_a_row_has_the_same_bits_in_any_batch(slots: list[int], draw: Any) -> None:
    k, outputs, dtype = 530, [65, 16], torch.bfloat16
    adapters = [adapter(outputs, k, rank, 10 * i) for i, rank in enumerate((1, 8, 16, 40))]
    table = table_of(ops, adapters, k, dtype, 40)
    x, base = random(4, k, dtype=dtype), random(4, 81, dtype=dtype, seed=1)
    alone = {}
    for number in range(4):
        for slot in range(-1, 4):
            out = base[number : number + 1].clone()
            ops.add_lora(
                out, x[number : number + 1], torch.tensor([slot], dtype=torch.int32), table
            )
            alone[number, slot] = out
    numbers = [draw.randrange(4) for _ in slots]
    out = base[numbers].clone()
    ops.add_lora(out, x[numbers], torch.tensor(slots, dtype=torch.int32), table)
    for row, (number, slot) in enumerate(zip(numbers, slots, strict=True)):
        assert torch.equal(out[row : row + 1], alone[number, slot])


@pytest.mark.parametrize("rows", [8, 200])
def test_any_number_of_threads(rows: int, one_and_two_threads: list[int]) -> None:
    adapters = [adapter([600, 200], 2000, 16, 10 * i) for i in range(4)]
    table = table_of(ops, adapters, 2000, torch.bfloat16, 16)
    x, slots = random(rows, 2000, dtype=torch.bfloat16), (torch.arange(rows) % 4).int()
    results = []
    for threads in one_and_two_threads:
        native.set_num_threads(threads)
        out = random(rows, 800, dtype=torch.bfloat16, seed=3)
        ops.add_lora(out, x, slots, table)
        results.append(out)
    assert torch.equal(*results)


def test_adapters_change_between_two_calls() -> None:
    first, second = (adapter([48], 32, 8, seed) for seed in (0, 50))
    table = table_of(ops, [first], 32, torch.float32, 8)
    x, slots = random(3, 32), torch.tensor([0, -1, 0], dtype=torch.int32)
    for modules in (first, second, None):
        if modules is None:
            table.clear(0)
        else:
            table.set(0, [pack(ops, m, torch.float32) for m in modules if m])
        out = torch.zeros(3, 48)
        ops.add_lora(out, x, slots, table)
        expected = (
            torch.zeros(3, 48)
            if modules is None
            else truth(out * 0, x, slots, [modules], torch.float32)
        )
        torch.testing.assert_close(out.double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_sizes() -> None:
    assert lora_nbytes(8, 100, 30, "bfloat16") == 2 * (16 * 30 + 128 * 8)
    assert lora_nbytes(17, 64, 30, "float32") == 4 * (32 * 30 + 64 * 17)
    assert lora_scratch_nbytes(16, 3, 1024, 2) == 32 * 3 * 16 * 4 * (2 + 2)
    weight = pack(ops, (random(8, 30), random(100, 8), 1.0), torch.float32)
    assert weight.a.numel() + weight.b.numel() == lora_nbytes(8, 100, 30, "float32")
