"""Mixtures of experts: the choice, the products and the sum."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels import native
from octavo.kernels.base import Ops
from octavo.kernels.native import NativeOps
from octavo.kernels.ops_experts import PlacedExperts
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.routing import ExpertActivation, Routing
from octavo.kernels.torch_tensors import as_torch, from_torch
from octavo.kernels.weights import StackedWeight
from octavo.system.tensor import HostTensor, from_numpy

ROUTINGS = [
    Routing(1, "softmax"),
    Routing(2, "softmax", renormalize=True),
    Routing(4, "none", softmax_chosen=True),
    Routing(8, "sigmoid", renormalize=True, epsilon=1e-20, scale=2.5),
    Routing(4, "sigmoid", groups=5, top_groups=2, group_best=2, renormalize=True),
    Routing(3, "softmax", groups=5, top_groups=1, scale=16.0),
    Routing(3, "sqrt_softplus", renormalize=True, least=1.5),
    Routing(40, "softmax"),
    Routing(2, "none", tolerance=0.4),
]
SILU, CLAMPED = ExpertActivation("silu"), ExpertActivation("swigluoai", limit=0.7)
PLAIN = ExpertActivation("relu2", gated=False)
GELU = ExpertActivation("gelu", gated=False)
Form = Callable[[HostTensor], Any]


def router_results() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits of 40 experts with ties, NaN and large numbers, biases and factors."""
    numbers = np.random.RandomState(0)
    logits = numbers.randn(50, 40).astype(np.float32)
    logits[1] = 2.0  # ties: the first experts
    logits[2, ::3] = logits[2, 1]
    logits[3, 5] = np.nan
    logits[4] = np.nan
    logits[5] = np.round(logits[5])
    logits[6] *= 50
    bias, factors = (numbers.rand(40).astype(np.float32) for _ in range(2))
    bias[:20] = 0.25
    return logits, bias, factors


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_route(isa: str, routing: Routing) -> None:
    logits, bias, factors = router_results()
    for terms in (None, bias):
        given = [None if terms is None else from_numpy(terms), from_numpy(factors)]
        ids, weights = NativeOps().route(from_numpy(logits), routing, *given)
        given = [None if terms is None else torch.tensor(terms), torch.tensor(factors)]
        expected = ReferenceOps().route(torch.tensor(logits), routing, *given)
        assert torch.equal(as_torch(ids), expected[0])
        torch.testing.assert_close(
            as_torch(weights), expected[1], rtol=1e-5, atol=1e-7, equal_nan=True
        )
        assert all(len(set(row)) == routing.top_k for row in ids.numpy().tolist())
        if terms is None and routing.groups == 1:
            assert ids.numpy()[1].tolist() == list(range(routing.top_k))
        assert np.isfinite(np.delete(weights.numpy(), [3, 4], 0)).all()
    alone, _ = NativeOps().route(from_numpy(logits[7:8].copy()), routing)
    together, _ = NativeOps().route(from_numpy(logits), routing)
    assert np.array_equal(alone.numpy()[0], together.numpy()[7])


class Mixture:
    """Experts of random weights in a form, and rows for them."""

    def __init__(
        self, experts: int, hidden: int, inner: int, activation: ExpertActivation, dtype: str
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.activation, self.dtype = activation, getattr(torch, dtype)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) / 6).to(self.dtype)

        outputs = inner * (2 if activation.gated else 1)
        self.up = [random(outputs, hidden) for _ in range(experts)]
        self.down = [random(hidden, inner) for _ in range(experts)]
        self.up_bias, self.down_bias = random(experts, outputs), random(experts, hidden)
        self.random, self.hidden = random, hidden

    def rows(self, tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers, experts = np.random.RandomState(tokens), len(self.up)
        # Some experts have many rows, one has none.
        scores = numbers.rand(tokens, experts) ** (1 + np.arange(experts))
        ids = np.argsort(scores[:, :-1], 1)[:, ::-1][:, :top_k].astype(np.int32)
        weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(2))
        return self.random(tokens, self.hidden) * 6, torch.tensor(ids.copy()), weights

    def stacked(self, ops: Ops, form: Form, host: Any, own: range) -> list[StackedWeight]:
        return [
            ops.stack(
                [form(from_torch(w)) if i in own else None for i, w in enumerate(stack)], host(bias)
            )
            for stack, bias in ((self.up, self.up_bias), (self.down, self.down_bias))
        ]


def mix(
    mixture: Mixture, form: Form, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    ops, everyone = NativeOps(), range(len(mixture.up))
    up, down = mixture.stacked(ops, form, from_torch, everyone)
    rows, places = ops.experts(from_torch(x), from_torch(ids), up, down, mixture.activation)
    return as_torch(ops.sum_experts(rows, places, from_torch(weights)))


@pytest.mark.parametrize(
    "activation", [SILU, CLAMPED, PLAIN, GELU], ids=["silu", "clamped", "relu2", "gelu"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(5, 96, 40), (4, 64, 128)], ids=str)
def test_experts(isa: str, sizes: tuple[int, ...], dtype: str, activation: Any) -> None:
    """The bits are those of each token alone; parts of the work can be done one by one."""
    mixture, ops, plain = Mixture(*sizes, activation, dtype), NativeOps(), ReferenceOps()
    x, ids, weights = mixture.rows(60, 3)
    result = mix(mixture, ops.pack_weight, x, ids, weights)
    everyone = range(len(mixture.up))
    up, down = mixture.stacked(plain, plain.pack_weight, lambda t: t, everyone)
    rows, places = plain.experts(x, ids, up, down, activation)
    expected = plain.sum_experts(rows, places, weights)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.04, "atol": 0.1}
    torch.testing.assert_close(result, expected, **close)
    for some in (slice(0, 1), slice(20, 33)):
        part = mix(mixture, ops.pack_weight, x[some], ids[some], weights[some])
        assert torch.equal(part, result[some])
    # The first product, then the second; and half of the experts, then the others
    up, down = mixture.stacked(ops, ops.pack_weight, from_torch, everyone)
    given = from_torch(x), from_torch(ids)
    inner, _ = ops.experts(*given, up, None, activation)
    out, places = ops.experts(*given, None, down, activation, inner=inner)
    assert torch.equal(as_torch(ops.sum_experts(out, places, from_torch(weights))), result)
    out = from_torch(torch.full((180, sizes[1]), torch.nan, dtype=mixture.dtype))
    for own in (range(2), range(2, sizes[0])):
        up, down = mixture.stacked(ops, ops.pack_weight, from_torch, own)
        _, places = ops.experts(*given, up, down, activation, out=out)
    assert torch.equal(as_torch(ops.sum_experts(out, places, from_torch(weights))), result)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_copies_of_an_expert_divide_its_rows(isa: str, parts: int) -> None:
    """Every row is computed once, by one of the processes that have the expert."""
    mixture, ops = Mixture(5, 64, 64, SILU, "bfloat16"), NativeOps()
    up, down = mixture.stacked(ops, ops.pack_weight, from_torch, range(5))
    for tokens in (1, 2, 60, 900):
        x, ids, _ = mixture.rows(tokens, 3)
        whole, places = ops.experts(from_torch(x), from_torch(ids), up, down, SILU)
        found = torch.full_like(as_torch(whole), torch.nan)
        counts = np.bincount(ids.numpy().ravel(), minlength=5)
        loads, computed = np.zeros(5, np.int64), np.zeros((parts, 5), np.int64)
        for part in range(parts):
            shares = from_numpy(np.full((5, 2), (part, parts), np.int32))
            out = from_torch(torch.full_like(found, torch.nan))
            placed = PlacedExperts(from_numpy(loads), shares)
            _, same = ops.experts(
                from_torch(x), from_torch(ids), up, down, SILU, out=out, placed=placed
            )
            assert (same.numpy() == places.numpy()).all()
            own = ~as_torch(out).isnan().any(1)
            assert as_torch(out)[~own].isnan().all()
            assert found[own].isnan().all(), "no row is computed twice"
            found[own] = as_torch(out)[own]
            chosen = np.empty(tokens * 3, np.int64)
            chosen[places.numpy().ravel()] = ids.numpy().ravel()
            computed[part] = np.bincount(chosen[own.numpy()], minlength=5)
        assert torch.equal(found, as_torch(whole))
        assert (loads == parts * counts).all()
        assert (computed.max(0) - computed.min(0) <= 1).all(), "the parts are even"


def forms(ops: NativeOps) -> dict[str, Form]:
    def blocks(kind: str, nbytes: int) -> Form:
        def pack(weight: HostTensor) -> Any:
            n, k = weight.shape
            numbers = np.random.RandomState(int(weight.numpy().view(np.uint8).sum()) % 999)
            data = numbers.randint(0, 256, (n, k // 256, nbytes), np.uint8)
            data[:, :, 0], data[:, :, 1] = 9, 20  # factors of the scales: small numbers
            data[:, :, 2], data[:, :, 3] = 7, 20
            return ops.pack_blocks([from_numpy(data.reshape(n, -1))], kind, k)  # type: ignore[arg-type]

        return pack

    return {
        "int8": lambda w: ops.quantize_weight([w], "int8", 0),
        "int4": lambda w: ops.quantize_weight([w], "int4_levels", 32),
        "fp8": lambda w: ops.quantize_weight([w], "fp8", 0),
        "q4_k": blocks("q4_k", 144),
    }


@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "q4_k"])
def test_forms(isa: str, form: str, one_and_two_threads: tuple[int, int]) -> None:
    """Each pair has the bits of two products and an activation."""
    ops = NativeOps()
    mixture, pack = Mixture(4, 256, 256, SILU, "bfloat16"), forms(ops)[form]
    up, down = mixture.stacked(ops, pack, from_torch, range(4))
    for tokens in (1, 3, 40, 500):
        x, ids, _ = mixture.rows(tokens, 2)
        for threads in one_and_two_threads:
            native.set_num_threads(threads)
            rows, places = ops.experts(from_torch(x), from_torch(ids), up, down, SILU)
            for token in {0, tokens // 2, tokens - 1}:
                expert, place = int(ids[token, 1]), int(places.numpy()[token, 1])
                one = from_torch(x[token : token + 1].clone())
                biases = [
                    from_torch(b[expert].clone()) for b in (mixture.up_bias, mixture.down_bias)
                ]
                inner = ops.linear_act_and_mul(one, up.weights[expert], biases[0], "silu")
                out = ops.linear(inner, down.weights[expert], biases[1])
                assert torch.equal(as_torch(out)[0], as_torch(rows)[place])


def test_factors_of_inputs(isa: str) -> None:
    mixture = Mixture(3, 64, 64, SILU, "bfloat16")
    x, ids, weights = mixture.rows(20, 1)
    ops = NativeOps()
    up, down = mixture.stacked(ops, ops.pack_weight, from_torch, range(3))
    given = from_torch(ids), up, down, SILU
    rows, places = ops.experts(from_torch(x), *given, from_torch(weights))
    scaled = (x.float() * weights).to(x.dtype)
    expected, _ = ops.experts(from_torch(scaled), *given)
    assert torch.equal(as_torch(rows), as_torch(expected))
    assert not torch.equal(as_torch(rows), as_torch(ops.experts(from_torch(x), *given)[0]))
    assert sorted(places.numpy().ravel().tolist()) == list(range(20))


def test_nan_stays_in_its_rows(isa: str) -> None:
    """A token whose router makes NaN harms no other."""
    mixture, ops = Mixture(4, 64, 64, SILU, "float32"), NativeOps()
    x, _, _ = mixture.rows(9, 2)
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    good = ops.route(from_torch(logits), replace(ROUTINGS[1]))
    expected = mix(mixture, ops.pack_weight, x, *map(as_torch, good))
    x[4], logits[4] = torch.nan, torch.nan
    found = mix(
        mixture, ops.pack_weight, x, *map(as_torch, ops.route(from_torch(logits), ROUTINGS[1]))
    )
    assert found[4].isnan().all()
    others = [i for i in range(9) if i != 4]
    assert torch.equal(found[others], expected[others])
