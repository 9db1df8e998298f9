"""Triton's kernels of LoRA adapters, in the interpreter, against the definition; bitwise alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from octavo.kernels.lora import LoraTable
from octavo.kernels.sizes import lora_nbytes
from octavo.kernels.triton import lora
from octavo.kernels.triton.ops import TritonOps
from tests.kernels.test_lora import adapter, pack, table_of, truth
from tests.kernels.test_state import random, strided
from tests.torch_ops import Named

ops = Named(TritonOps(upcast=True))
# The interpreter truncates float32 to bfloat16 instead of rounding: one unit in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-10}
SHAPES = [
    # rows, outputs, inputs, ranks
    (1, [5], 3, [1]),
    (7, [64, 16, 16], 40, [4, 16, 8]),
    (9, [130], 1100, [8, 33]),
    (35, [70, 3], 513, [16, 2, 64]),
    (18, [40, 24], 96, [8, 100]),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "outputs", "k", "ranks"), SHAPES)
def test_add_lora(
    rows: int, outputs: list[int], k: int, ranks: list[int], dtype: torch.dtype
) -> None:
    """Numbers that no adapter changes are not written; the first rows alone have the same bits."""
    adapters = [adapter(outputs, k, rank, 10 * i) for i, rank in enumerate(ranks)]
    if len(outputs) > 1:
        adapters.append(adapter(outputs, k, 3, 99, skipped=1))
    x = strided(random(rows, k, dtype=dtype))
    slots = ((1 + torch.arange(rows) * 7 // 3) % (len(adapters) + 1) - 1).int()
    table = table_of(ops, adapters, k, dtype, max(ranks))
    for out_dtype in {dtype, torch.float32}:
        base = random(rows, sum(outputs), dtype=out_dtype, seed=5)
        wide = torch.full((rows, sum(outputs) + 5), -0.0, dtype=out_dtype)
        kept = torch.zeros(rows, sum(outputs), dtype=torch.bool)
        kept[slots < 0] = True
        if len(outputs) > 1:  # the last adapter
            kept[slots == len(adapters) - 1, outputs[0] : sum(outputs[:2])] = True
        base[kept] = -0.0  # a sum with 0 would change its bits
        expected = truth(base, x, slots, adapters, dtype)
        out = wide[:, :-5]
        out.copy_(base)
        ops.add_lora(out, x, slots, table)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[out_dtype]
        assert torch.equal(out[kept], base[kept])
        assert torch.signbit(out[kept]).all()
        assert torch.signbit(wide[:, -5:]).all()
        for row in range(min(rows, 3)):
            alone = base[row : row + 1].clone()
            ops.add_lora(alone, x[row : row + 1], slots[row : row + 1].clone(), table)
            assert torch.equal(alone, out[row : row + 1])


@pytest.mark.parametrize("few", [0, 256], ids=["one program", "apart"])
def test_a_row_has_the_same_bits_in_any_batch(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows a program for each split, with many one for all."""
    k, outputs, dtype = 1400, [65, 16], torch.float16
    adapters = [adapter(outputs, k, rank, 10 * i) for i, rank in enumerate((1, 8, 40))]
    table = table_of(ops, adapters, k, dtype, 40)
    x, base = random(4, k, dtype=dtype), random(4, 81, dtype=dtype, seed=1)
    single = [(number, slot) for number in range(4) for slot in range(-1, 3)]
    numbers, slots = zip(*single, *reversed(single), strict=True)
    order = torch.tensor(numbers)
    alone = base[order]
    for i, slot in enumerate(slots):
        at = slice(i, i + 1)
        ops.add_lora(alone[at], x[order[at]], torch.tensor([slot], dtype=torch.int32), table)
    monkeypatch.setattr(lora, "_FEW_ROWS", few)
    out = base[order]
    ops.add_lora(out, x[order], torch.tensor(slots, dtype=torch.int32), table)
    assert torch.equal(out, alone)


def test_tables_of_all_layers_change_at_once() -> None:
    """The kernels see a change after `put_adapter_tables`, at the same addresses."""
    first, second = (adapter([48], 32, 8, seed) for seed in (0, 50))
    tables = [LoraTable(2, [48], 32, 8) for _ in range(2)]
    ops.put_adapter_tables(tables)
    places = [table.on_device.slices.data_ptr() for table in tables]
    x, slots = random(3, 32), torch.tensor([1, -1, 1], dtype=torch.int32)

    def results() -> list[torch.Tensor]:
        found = [torch.zeros(3, 48) for _ in tables]
        for out, table in zip(found, tables, strict=True):
            ops.add_lora(out, x, slots, table)
        return found

    assert not any(out.any() for out in results()), "no adapter"
    base, both = torch.zeros(3, 48), (first, second)
    expected = [truth(base, x, slots, [[None], it], torch.float32) for it in both]
    for table, modules in zip(tables, both, strict=True):
        table.set(1, [pack(ops, m, torch.float32) for m in modules if m])
    assert not any(out.any() for out in results()), "not put yet"
    ops.put_adapter_tables(tables)
    for out, want in zip(results(), expected, strict=True):
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    assert places == [table.on_device.slices.data_ptr() for table in tables]
    tables[0].clear(1)
    ops.put_adapter_tables(tables)
    assert [bool(out.any()) for out in results()] == [False, True]


def test_a_weight_in_given_memory() -> None:
    """No byte beyond `lora_nbytes` is written, and the padding is 0."""
    nbytes = lora_nbytes(5, 70, 30, "bfloat16")
    memory = torch.full((nbytes + 64,), 7, dtype=torch.uint8)
    a, b = random(5, 30, dtype=torch.bfloat16), random(70, 5, dtype=torch.bfloat16, seed=1)
    packed = lora.pack(a, b, 2.0, torch.bfloat16, memory[:nbytes], None, torch.device("cpu"))
    assert (packed.rank, packed.n, packed.k, packed.scale) == (5, 70, 30, 2.0)
    assert torch.equal(packed.a.view(torch.bfloat16)[: 5 * 30].view(5, 30), a)
    transposed = packed.b.view(torch.bfloat16).view(5, 128)
    assert torch.equal(transposed[:, :70].T, b)
    assert not transposed[:, 70:].any()
    assert (memory[nbytes:] == 7).all()


def test_no_rows() -> None:
    table = table_of(ops, [adapter([8], 4, 2, 0)], 4, torch.float32, 2)
    ops.add_lora(torch.empty(0, 8), torch.empty(0, 4), torch.empty(0, dtype=torch.int32), table)
