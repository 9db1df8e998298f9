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
from octavo.kernels.replaced import ReplacedTable
from octavo.kernels.sizes import lora_nbytes, lora_scratch_nbytes
from octavo.kernels.torch_tensors import from_torch
from tests.kernels.test_state import random, strided
from tests.torch_ops import Named, native_ops, reference_ops

ops, reference = native_ops(), reference_ops()
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
pytestmark = pytest.mark.usefixtures("isa")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Module = tuple[Tensor, Tensor, float, Tensor | None]
Adapter = list[Module | None]
"""A, B, scale, and gains and offsets of each module of a layer."""


def adapter(outputs: list[int], k: int, rank: int, seed: int, skipped: int = -1) -> Adapter:
    """Return an adapter of a layer that does not change the module `skipped`.

    Some of the others have gains and offsets.
    """
    return [
        None
        if i == skipped
        else (
            random(rank, k, seed=seed + 2 * i) / k**0.5,
            random(n, rank, seed=seed + 2 * i + 1) / rank**0.5,
            0.5 + seed % 7,
            random(2, n, seed=seed + 2 * i + 1) if (seed // 10 + i) % 3 == 1 else None,
        )
        for i, n in enumerate(outputs)
    ]


def sizes(adapters: list[Adapter]) -> list[int]:
    """Return the number of outputs of each module."""
    return [next(len(m[1]) for m in modules if m) for modules in zip(*adapters, strict=True)]


def pack(table: Any, module: Module, dtype: torch.dtype) -> Any:
    a, b, scale, affine = module
    if isinstance(table, Named):
        more = None if affine is None else from_torch(affine)
        return table.pack_lora(from_torch(a), from_torch(b), scale, dtype, None, more)
    return table.pack_lora(a, b, scale, dtype, None, affine)


def table_of(
    table: Any, adapters: list[Adapter], k: int, dtype: torch.dtype, rank: int
) -> LoraTable:
    """Return the table of adapters for some operations."""
    result = LoraTable(len(adapters), sizes(adapters), k, rank)
    for slot, modules in enumerate(adapters):
        result.set(slot, [None if m is None else pack(table, m, dtype) for m in modules])
    table.put_adapter_tables([result])
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
                changed = out[row, begin : begin + n]
                changed += module[2] * (x[row].double() @ a.T) @ b.T
                if module[3] is not None:
                    changed *= module[3][0]
                    changed += module[3][1]
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


@dtypes
@pytest.mark.parametrize(
    ("size", "ranks"), [(5, [1]), (200, [4, 33, 16]), (64, [8, 64]), (70, [65, 200, 512])]
)
def test_add_lora_embedding(size: int, ranks: list[int], dtype: torch.dtype) -> None:
    vocab = 37
    adapters = [adapter([size], vocab, rank, 10 * i) for i, rank in enumerate(ranks)]
    ids = torch.tensor([0, 36, 5, 5, 17, 36, -1, 37, 12, 3, 36, 1, 0])
    slots = (torch.arange(len(ids)) * 7 // 3 % (len(ranks) + 1) - 1).int()
    base = random(len(ids), size, dtype=dtype, seed=5)
    expected = base.double()
    for row, (slot, token) in enumerate(zip(slots.tolist(), ids.tolist(), strict=True)):
        if slot >= 0 and 0 <= token < vocab:
            (module,) = adapters[slot]
            assert module is not None
            a, b = (matrix.to(dtype).double() for matrix in module[:2])
            expected[row] += module[2] * a[:, token] @ b.T
    for operations in (ops, reference):
        table = table_of(operations, adapters, vocab, dtype, max(ranks))
        out = strided(base.clone())
        operations.add_lora_embedding(out, ids, slots, table)
        assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()
        assert torch.equal(out[slots < 0], base[slots < 0])
    table = table_of(ops, adapters, vocab, dtype, max(ranks))
    for row in range(len(ids)):  # as alone
        alone, one = base[row : row + 1].clone(), slice(row, row + 1)
        ops.add_lora_embedding(alone, ids[one].clone(), slots[one].clone(), table)
        whole = base.clone()
        ops.add_lora_embedding(whole, ids, slots, table)
        assert torch.equal(alone, whole[one])


def replaced_by(
    table: Any,
    shape: tuple[int, int],
    owners: list[int],
    dtype: torch.dtype,
    *,
    embedding: bool = False,
    has_bias: bool = True,
) -> ReplacedTable:
    """Return the layers of some of four slots."""
    has_bias = has_bias and not embedding
    result = ReplacedTable(4, shape, has_bias=has_bias, is_embedding=embedding)
    for slot in owners:
        bias = random(shape[0], seed=slot + 50) if has_bias else None
        weight = random(*shape, seed=slot)
        if isinstance(table, Named):
            own = None if bias is None else from_torch(bias)
            packed = table.pack_replaced(from_torch(weight), own, dtype, result)
        else:
            packed = table.pack_replaced(weight, bias, dtype, result)
        result.set(slot, packed)
    return result


@dtypes
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 5, 3), (9, 130, 100), (70, 64, 513)])
@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
def test_replace_linear(
    rows: int, n: int, k: int, dtype: torch.dtype, wide: bool, has_bias: bool
) -> None:
    x = strided(random(rows, k, dtype=dtype, seed=7))
    slots = (torch.arange(rows) // 3 % 5 - 1).int()
    out_dtype = torch.float32 if wide else dtype
    base = random(rows, n, dtype=out_dtype, seed=5)
    expected = base.double()
    for slot in (0, 2):
        weight, bias = random(n, k, seed=slot), random(n, seed=slot + 50)
        own = slots == slot
        y = x[own].double() @ weight.to(dtype).double().T
        expected[own] = y + bias.to(dtype).double() if has_bias else y
    results = []
    for operations in (ops, reference):
        table = replaced_by(operations, (n, k), [0, 2], dtype, has_bias=has_bias)
        out = strided(base.clone())
        operations.replace_linear(out, x, slots, table)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error < (TOLERANCE[torch.float32] if wide else TOLERANCE[dtype])
        results.append(out)
    others = (slots != 0) & (slots != 2)
    assert torch.equal(results[0][others], base[others])
    table = replaced_by(ops, (n, k), [0, 2], dtype, has_bias=has_bias)
    for row in range(rows):  # as alone
        alone, one = base[row : row + 1].clone(), slice(row, row + 1)
        ops.replace_linear(alone, x[one], slots[one].clone(), table)
        assert torch.equal(alone, results[0][one])


@dtypes
def test_replace_embedding(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 10, 5, 5, -1, 11, 3, 10])
    slots = torch.tensor([0, 1, 2, -1, 0, 0, 0, 3], dtype=torch.int32)
    base = random(len(ids), 37, dtype=dtype, seed=5)
    expected = base.clone()
    for row in (0, 2, 6):
        weight = random(11, 37, seed=int(slots[row])).to(dtype)
        expected[row] = weight[ids[row]]
    for operations in (ops, reference):
        table = replaced_by(operations, (11, 37), [0, 2], dtype, embedding=True)
        out = strided(base.clone())
        operations.replace_embedding(out, ids, slots, table)
        assert torch.equal(out, expected)
        table.set(0, None)
        out = base.clone()
        operations.replace_embedding(out, ids, slots, table)
        assert torch.equal(out[:1], base[:1])


@pytest.mark.parametrize("rows", [8, 200])
def test_any_number_of_threads_and_no_byte_beside_the_rows(
    rows: int, one_and_two_threads: list[int]
) -> None:
    """For the operations with embeddings and whole layers."""
    dtype, n, k = torch.bfloat16, 130, 300
    x, ids = random(rows, k, dtype=dtype), torch.arange(rows) * 7 % 37
    slots = (torch.arange(rows) * 7 // 3 % 5 - 1).int()
    adapters = [adapter([n], 37, rank, 10 * i) for i, rank in enumerate((4, 33, 16, 65))]
    of_tokens = table_of(ops, adapters, 37, dtype, 65)
    layers = replaced_by(ops, (n, k), [0, 2], dtype)
    tables = replaced_by(ops, (37, n), [1, 3], dtype, embedding=True)
    calls: list[Any] = [
        lambda out: ops.add_lora_embedding(out, ids, slots, of_tokens),
        lambda out: ops.replace_linear(out, x, slots, layers),
        lambda out: ops.replace_embedding(out, ids, slots, tables),
    ]
    for call in calls:
        results = []
        for threads in one_and_two_threads:
            native.set_num_threads(threads)
            memory = random(rows + 2, n + 2, dtype=dtype, seed=3)
            before = memory.clone()
            call(memory[1:-1, 1:-1])
            assert not torch.equal(memory, before)
            results.append(memory[1:-1, 1:-1].clone())
            memory[1:-1, 1:-1] = before[1:-1, 1:-1]
            assert torch.equal(memory, before)
        assert torch.equal(*results)


def test_sizes() -> None:
    assert lora_nbytes(8, 100, 30, "bfloat16") == 2 * (16 * 30 + 128 * 8)
    assert lora_nbytes(17, 64, 30, "float32") == 4 * (32 * 30 + 64 * 17)
    assert lora_scratch_nbytes(16, 3, 1024, 2) == 32 * 3 * 16 * 4 * (2 + 2)
    assert lora_nbytes(8, 100, 30, "bfloat16", affine=True) == 2 * (16 * 30 + 128 * 8) + 8 * 128
    weight = pack(ops, (random(8, 30), random(100, 8), 1.0, random(2, 100)), torch.float32)
    nbytes = sum(it.nbytes for it in (weight.a, weight.b, weight.affine))
    assert nbytes == lora_nbytes(8, 100, 30, "float32", affine=True)
    table = ReplacedTable(1, (100, 30), has_bias=True, is_embedding=False)
    assert table.nbytes("bfloat16") == 2 * 128 * 30 + 256
    table = ReplacedTable(1, (100, 30), has_bias=False, is_embedding=True)
    assert table.nbytes("bfloat16") == 6016


@dtypes
def test_norms_of_changed_rows(dtype: torch.dtype) -> None:
    """A row's norm has the same bits alone, and in rows of any stride."""
    w, a, b = random(23, 75, dtype=dtype), random(5, 75, seed=1), random(23, 5, seed=2)
    expected = torch.linalg.norm(w.double() + b.double() @ a.double(), dim=1)
    native_only: Any = ops
    found = torch.empty(23)
    native_only.lora_norms(strided(w), a, b, found)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    for row in range(23):
        alone = torch.empty(1)
        native_only.lora_norms(w[row : row + 1], a, b[row : row + 1], alone)
        assert torch.equal(alone, found[row : row + 1])
