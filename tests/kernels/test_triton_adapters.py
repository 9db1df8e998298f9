"""Triton's kernels of adapters of embeddings, experts and whole layers, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from octavo.kernels.lora import ExpertPart, LoraTable
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.triton.ops import TritonOps
from tests.kernels import test_expert_lora as mixtures
from tests.kernels.test_lora import adapter, replaced_by, table_of
from tests.kernels.test_state import random, strided
from tests.kernels.test_triton_lora import TOLERANCE
from tests.torch_ops import Named, reference_ops

triton, reference = TritonOps(upcast=True), reference_ops()
ops = Named(triton)
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """Fill memory that no kernel has written yet with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def distance(x: Tensor, y: Tensor) -> float:
    error = (x.double() - y.double()).abs().max()
    return (error / y.double().abs().max().clamp(min=1e-3)).item()


def slots_of(rows: int, slots: int) -> Tensor:
    """Return slots of rows in an irregular order; some rows have none."""
    return (torch.arange(rows) * 7 // 3 % (slots + 1) - 1).int()


def test_slots_of_rows() -> None:
    """The rows of a step that sample, as the LM head needs them."""
    slots = torch.tensor([3, -1, 0, 2], dtype=torch.int32).view(-1, 1)
    rows = torch.tensor([3, 0, 1])
    for operations in (ops, reference):
        assert operations.embedding(slots, rows).view(-1).tolist() == [2, 3, -1]


@dtypes
@pytest.mark.parametrize(("size", "ranks"), [(5, [1]), (130, [4, 33, 16]), (70, [8, 100])])
def test_add_lora_embedding(size: int, ranks: list[int], dtype: torch.dtype) -> None:
    vocab = 37
    adapters = [adapter([size], vocab, rank, 0) for rank in ranks]
    ids = torch.tensor([0, 36, 5, 5, 17, 36, -1, 37, 12, 3, 36, 1, 0, 8, 9, 10, 11, 36, 2**40])
    slots = slots_of(len(ids), len(ranks))
    base = random(len(ids), size, dtype=dtype, seed=5)
    kept = (slots < 0) | (ids < 0) | (ids >= vocab)
    base[kept] = -0.0  # a sum with 0 would change its bits
    results = []
    for operations in (ops, reference):
        table = table_of(operations, adapters, vocab, dtype, max(ranks))
        out = strided(base.clone())
        operations.add_lora_embedding(out, ids, slots, table)
        results.append(out)
    assert distance(*results) < TOLERANCE[dtype]
    assert torch.signbit(results[0][kept]).all()
    assert not torch.equal(results[0][~kept], base[~kept])
    table = table_of(ops, adapters, vocab, dtype, max(ranks))
    for row in range(0, len(ids), 3):
        one = slice(row, row + 1)
        alone = base[one].clone()
        ops.add_lora_embedding(alone, ids[one].clone(), slots[one].clone(), table)
        assert torch.equal(alone, results[0][one])


def layers_of(table: Any, *args: Any, **options: Any) -> Any:
    """Return `replaced_by`, on the device."""
    made = replaced_by(table, *args, **options)
    table.put_adapter_tables([made])
    return made


@dtypes
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 5, 3), (9, 70, 100), (35, 130, 130)])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
def test_replace_linear(rows: int, n: int, k: int, has_bias: bool, dtype: torch.dtype) -> None:
    x = strided(random(rows, k, dtype=dtype, seed=7))
    slots = (torch.arange(rows) // 3 % 5 - 1).int().flip(0)
    for out_dtype in {dtype, torch.float32}:
        base, results = random(rows, n, dtype=out_dtype, seed=5), []
        for operations in (ops, reference):
            table = layers_of(operations, (n, k), [0, 2], dtype, has_bias=has_bias)
            out = strided(base.clone())
            operations.replace_linear(out, x, slots, table)
            results.append(out)
        assert distance(*results) < TOLERANCE[out_dtype]
        others = (slots != 0) & (slots != 2)
        assert torch.equal(results[0][others], base[others])
        table = layers_of(ops, (n, k), [0, 2], dtype, has_bias=has_bias)
        for row in range(min(rows, 4)):
            one = slice(row, row + 1)
            alone = base[one].clone()
            ops.replace_linear(alone, x[one], slots[one].clone(), table)
            assert torch.equal(alone, results[0][one])


@dtypes
def test_replace_embedding(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 10, 5, 5, -1, 11, 3, 10, 2**40])
    slots = torch.tensor([0, 1, 2, -1, 0, 0, 0, 3, 2], dtype=torch.int32)
    base = random(len(ids), 37, dtype=dtype, seed=5)
    expected = base.clone()
    for row in (0, 2, 6):
        weight = random(11, 37, seed=int(slots[row])).to(dtype)
        expected[row] = weight[ids[row]]
    table = layers_of(ops, (11, 37), [0, 2], dtype, embedding=True)
    out = strided(base.clone())
    ops.replace_embedding(out, ids, slots, table)
    assert torch.equal(out, expected)
    table.set(0, None)
    ops.put_adapter_tables([table])
    out = base.clone()
    ops.replace_embedding(out, ids, slots, table)
    assert torch.equal(out[:1], base[:1])
    assert torch.equal(out[2:3], expected[2:3])


def test_tables_of_all_kinds_change_at_once() -> None:
    """Tables of layers and of whole layers share the copy."""
    plain = LoraTable(4, [48], 32, 8)
    whole = replaced_by(ops, (48, 32), [1], torch.float32)
    own, whole.weights[1] = whole.weights[1], None
    whole.set(1, None)
    ops.put_adapter_tables([plain, whole])
    places = [it.on_device.slices.data_ptr() for it in (plain, whole)]
    x, slots = random(3, 32), torch.tensor([1, -1, 0], dtype=torch.int32)

    def result() -> Tensor:
        out = torch.zeros(3, 48)
        ops.replace_linear(out, x, slots, whole)
        return out

    whole.set(1, own)
    assert not result().any(), "not put yet"
    ops.put_adapter_tables([plain, whole])
    assert result()[0].any()
    assert not result()[1:].any()
    assert places == [it.on_device.slices.data_ptr() for it in (plain, whole)]


@dtypes
@pytest.mark.parametrize(
    "activation", [mixtures.SILU, mixtures.CLAMPED, mixtures.RELU2, None], ids=str
)
def test_add_expert_lora(activation: Any, dtype: torch.dtype) -> None:
    """Like the reference, also with factors of the inputs; each token as alone."""
    outputs = [32, 32] if activation and activation.gated else [64]
    name, top_k, hidden = str(dtype)[6:], mixtures.TOP_K, mixtures.HIDDEN
    tables = [mixtures.table_of(it, outputs, hidden, name) for it in (triton, ReferenceOps())]
    triton.put_adapter_tables([tables[0]])
    for tokens in (1, 9, 40):
        x, ids, places, slots = mixtures.inputs(tokens, dtype)
        factors = None if tokens == 9 else torch.rand(tokens, top_k)
        if activation is None:
            x, factors = random(tokens * top_k, hidden, dtype=dtype, seed=7), None
        base = random(tokens * top_k, 64, dtype=dtype, seed=8)
        if activation is None:
            base[places[slots < 0].flatten().long()] = -0.0
        found, expected = (
            it.add_expert_lora(base.clone(), x, ids, places, slots, table, activation, factors)
            for it, table in zip((triton, ReferenceOps()), tables, strict=True)
        )
        assert distance(found, expected) < 2 * TOLERANCE[dtype]
        if activation is None:
            assert torch.signbit(found[places[slots < 0].flatten().long()]).all()
        for token in range(min(tokens, 6)):
            rows, one = places[token].long(), slice(token, token + 1)
            order = rows.argsort()
            alone = triton.add_expert_lora(
                base[rows[order]].clone(),
                x[one].clone() if activation else x[rows[order]].clone(),
                ids[one].clone(),
                order.argsort().int().view(1, top_k),
                slots[one].clone(),
                tables[0],
                activation,
                None if factors is None else factors[one].clone(),
            )
            assert torch.equal(alone, found[rows[order]])


def test_pairs_in_large_tiles() -> None:
    """Many rows of one expert have the same bits as alone, from a kernel with other tiles."""
    k, tokens = 600, 300
    table = LoraTable(2, [65], k, 40, experts=2)
    for slot in range(2):
        for expert in range(2):
            made = adapter([65], k, (3, 40)[expert], 10 * slot + expert)
            one = table_of(ops, [made], k, torch.float16, 40).weights[0]
            ExpertPart(table, expert).set(slot, one)
    ops.put_adapter_tables([table])
    x = random(tokens, k, dtype=torch.float16)
    ids = (torch.arange(tokens) % 3 == 0).int().view(-1, 1)
    slots = slots_of(tokens, 2)
    places = torch.arange(tokens, dtype=torch.int32).flip(0).view(-1, 1).contiguous()
    out = torch.zeros(tokens, 65, dtype=torch.float16)
    triton.add_expert_lora(out, x, ids, places, slots, table)
    for token in (0, 1, 2, 3, 298):
        alone, row = torch.zeros(1, 65, dtype=torch.float16), int(places[token])
        one, zero = slice(token, token + 1), torch.zeros(1, 1, dtype=torch.int32)
        own = x[row : row + 1].clone()
        triton.add_expert_lora(alone, own, ids[one].clone(), zero, slots[one].clone(), table)
        assert torch.equal(alone, out[row : row + 1])
        assert alone.any() == (slots[token] >= 0)


def test_no_rows() -> None:
    table = table_of(ops, [adapter([8], 4, 2, 0)], 4, torch.float32, 2)
    none, ids = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    ops.add_lora_embedding(torch.empty(0, 8), ids, none, table)
    pairs = none.view(0, 2)
    ops.add_expert_lora(torch.empty(0, 8), torch.empty(0, 4), pairs, pairs, none, table)
    layers = layers_of(ops, (4, 8), [1], torch.float32, embedding=True)
    ops.replace_embedding(torch.empty(0, 8), ids, none, layers)
    ops.replace_linear(torch.empty(0, 4), torch.empty(0, 8), none, layers)
