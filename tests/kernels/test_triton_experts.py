"""Triton's mixtures of experts, in the interpreter, against the torch reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels.base import Ops
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.routing import ExpertActivation, Routing
from octavo.kernels.weights import Codes, QuantFormat
from octavo.system.tensor import HostTensor
from tests.kernels.test_experts import CLAMPED, PLAIN, ROUTINGS, SILU, Mixture, router_results
from tests.kernels.test_triton_quantized import random_codes

pytest.importorskip("triton", reason="the package triton is not installed")

from octavo.kernels.triton import experts as under_test
from octavo.kernels.triton.ops import TritonOps

ops, reference = TritonOps(upcast=True), ReferenceOps()
CLOSE = {
    "float32": {"rtol": 1e-4, "atol": 1e-4},
    "float16": {"rtol": 0.01, "atol": 0.02},
    "bfloat16": {"rtol": 0.04, "atol": 0.15},
}
FORMS: list[tuple[QuantFormat, int, bool]] = [
    ("int8", 0, False),
    ("int4_levels", 32, False),
    ("int4_zeros", 32, False),
    ("int8_groups", 32, False),
    ("nf4", 64, False),
    ("fp8", 0, False),
    ("int4", 32, True),
]
Form = Callable[[HostTensor], Any]


def mix(
    table: Any, mixture: Mixture, form: Form | None, x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    pack = table.pack_weight if form is None else form
    up, down = mixture.stacked(table, pack, lambda t: t, range(len(mixture.up)))
    rows, places = table.experts(x, ids, up, down, mixture.activation)
    result: Tensor = table.sum_experts(rows, places, weights)
    return result


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN):RuntimeWarning")
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_route(routing: Routing) -> None:
    """Ties, NaN in some and in all scores, and large numbers are in the first rows."""
    logits, bias, factors = (torch.tensor(x) for x in router_results())
    logits = logits[:12]
    for terms in (None, bias):
        got, truth = (table.route(logits, routing, terms, factors) for table in (ops, reference))
        assert torch.equal(got[0], truth[0])
        torch.testing.assert_close(got[1], truth[1], rtol=1e-5, atol=1e-7, equal_nan=True)
    alone = ops.route(logits[7:8], routing, bias)
    together = ops.route(logits, routing, bias)
    assert all(torch.equal(one[0], all[7]) for one, all in zip(alone, together, strict=True))
    assert ops.route(logits[:0], routing)[0].shape == (0, routing.top_k)


@pytest.mark.parametrize(
    ("activation", "dtype", "sizes", "top_k"),
    [
        (SILU, "float32", (5, 40, 24), 2),
        (CLAMPED, "bfloat16", (3, 130, 70), 1),
        (PLAIN, "float16", (7, 33, 65), 3),
        (ExpertActivation("gelu", gated=False), "float32", (4, 24, 40), 2),
    ],
    ids=["silu", "clamped", "relu2", "gelu"],
)
def test_experts(
    activation: ExpertActivation, dtype: str, sizes: tuple[int, int, int], top_k: int
) -> None:
    """The last expert has no row. A token has the bits that it has alone."""
    mixture = Mixture(*sizes, activation, dtype)
    given = mixture.rows(17, top_k)
    whole = mix(ops, mixture, None, *given)
    torch.testing.assert_close(whole, mix(reference, mixture, None, *given), **CLOSE[dtype])
    for some in (slice(3), slice(1), slice(16, 17)):
        assert torch.equal(mix(ops, mixture, None, *(x[some] for x in given)), whole[some])


def test_many_rows_of_one_expert() -> None:
    """More than one tile of rows, also of larger tiles; places of others change nothing."""
    mixture = Mixture(2, 16, 8, SILU, "float32")
    x, _, weights = mixture.rows(70, 1)
    ids = torch.ones(70, 1, dtype=torch.int32)
    whole = mix(ops, mixture, None, x, ids, weights)
    expected = mix(reference, mixture, None, x, ids, weights)
    torch.testing.assert_close(whole, expected, **CLOSE["float32"])
    assert torch.equal(mix(ops, mixture, None, x[69:], ids[69:], weights[69:]), whole[69:])
    some = torch.where(torch.arange(70)[:, None] % 3 == 0, 0, ids)
    mixed = mix(ops, mixture, None, x, some, weights)
    same = some[:, 0] == 1
    assert torch.equal(mixed[same], whole[same])


def packer(table: Any, format: QuantFormat, group: int, ordered: bool) -> Form:
    """Return a form with random codes, which depend on the weight that they replace."""

    def pack(weight: HostTensor) -> Any:
        (n, k), seed = weight.shape, int(weight.numpy().view(np.uint8).sum()) % 999
        part = random_codes(n, k, format, group)
        codes = part.codes.roll(seed, 1)
        order = np.random.RandomState(seed).permutation(k).astype(np.int32) if ordered else None
        part = Codes(codes, part.scales / 8, part.zeros)
        return table.pack_quantized(n, k, format, group, [part], order=order)

    return pack


@pytest.mark.parametrize(("format", "group", "ordered"), FORMS, ids=str)
def test_forms(format: QuantFormat, group: int, ordered: bool) -> None:
    """Each pair has the bits of two products and an activation."""
    mixture = Mixture(3, 96, 64, SILU, "float32")
    mixture.up_bias, mixture.down_bias = mixture.up_bias / 9, mixture.down_bias / 9
    up, down = mixture.stacked(ops, packer(ops, format, group, ordered), lambda t: t, range(3))
    x, ids, _ = mixture.rows(5, 2)
    rows, places = ops.experts(x, ids, up, down, SILU)
    assert sorted(places.flatten().tolist()) == list(range(10))
    for token in range(5):
        for choice in range(2):
            expert, place = int(ids[token, choice]), int(places[token, choice])
            both = ops.linear(x[token : token + 1], up.weights[expert], mixture.up_bias[expert])
            inner = ops.act_and_mul(both, "silu")
            out = ops.linear(inner, down.weights[expert], mixture.down_bias[expert])
            assert torch.equal(out[0], rows[place])


def test_parts_of_the_work_and_factors_of_inputs() -> None:
    mixture = Mixture(3, 32, 16, SILU, "float32")
    x, ids, weights = mixture.rows(5, 2)
    up, down = mixture.stacked(ops, ops.pack_weight, lambda t: t, range(3))
    rows, places = ops.experts(x, ids, up, down, SILU, weights)
    inner, _ = ops.experts(x, ids, up, None, SILU, weights)
    out = torch.empty_like(rows)
    assert ops.experts(x, ids, None, down, SILU, inner=inner, out=out)[0] is out
    assert torch.equal(out, rows)
    table: Ops = reference  # type: ignore[assignment]
    stacked = mixture.stacked(table, reference.pack_weight, lambda t: t, range(3))
    expected, same = reference.experts(x, ids, *stacked, SILU, weights)
    assert torch.equal(places, same)
    torch.testing.assert_close(rows, expected, **CLOSE["float32"])
    summed = ops.sum_experts(rows, places, None)
    torch.testing.assert_close(summed, reference.sum_experts(rows, places, None))


def test_no_tokens_and_broken_ones() -> None:
    mixture = Mixture(3, 32, 16, SILU, "float32")
    x, ids, weights = mixture.rows(4, 2)
    assert mix(ops, mixture, None, x[:0], ids[:0], weights[:0]).shape == (0, 32)
    good = mix(ops, mixture, None, x, ids, weights)
    x[2] = torch.nan
    got = mix(ops, mixture, None, x, ids, weights)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3]], good[[0, 1, 3]])


def test_the_tiles_of_all_rows_exist() -> None:
    """The grid has room for every division of the rows among experts."""
    numbers = np.random.RandomState(0)
    for tokens, experts in ((1, 8), (3, 2), (40, 5), (64, 3)):
        for _ in range(5):
            ids = torch.tensor(numbers.randint(0, experts, (tokens, 2)) ** 2 // experts).int()
            pairs = under_test.Pairs.of(ids, experts)
            for rows in (1, 16, 64):
                assert pairs.tile_ends(rows)[-1] <= pairs.most_tiles(rows)
