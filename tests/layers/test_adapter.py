"""Linear layers with adapters: every way to call a layer adds the changes before the activation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.layers.adapter import Adapters
from octavo.layers.linear import Linear, StackedLinear
from octavo.system.tensor import HostTensor, from_numpy

ops = NativeOps()
INPUTS, OUTPUTS, ROWS = 48, 128, 5


def random(*shape: int, seed: int) -> HostTensor:
    return from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


x, weight, bias = (
    random(ROWS, INPUTS, seed=0),
    random(OUTPUTS, INPUTS, seed=1),
    random(OUTPUTS, seed=2),
)
a, b = random(4, INPUTS, seed=3), random(OUTPUTS, 4, seed=4)
slots = from_numpy(np.array([0, -1, 0, 0, -1], np.int32))


def make(adapters: Adapters | None, stacked: bool) -> Linear:
    """Return a layer of two modules, whose weights are one or two."""
    adapted = adapters.layer("layers.0.up.", [64, 64], INPUTS) if adapters else None
    if stacked:
        halves = ops.pack_weight(weight[:64]), ops.pack_weight(weight[64:])
        return StackedLinear(ops, halves[0], bias, None, adapted, halves)
    return Linear(ops, ops.pack_weight(weight), bias, None, adapted)


CALLS: dict[str, Callable[[Linear], HostTensor]] = {
    "call": lambda layer: layer(x),
    "act_and_mul": lambda layer: layer.act_and_mul(x, "silu"),
    "act": lambda layer: layer.act(x, "gelu"),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_adds_the_changes(name: str, stacked: bool) -> None:
    adapters = Adapters(ops, 1, 4)
    layer, plain = make(adapters, stacked), make(None, stacked)
    changes = [ops.pack_lora(a, b[:64], 0.5, "float32"), ops.pack_lora(a, b[64:], 0.5, "float32")]
    adapters.set(0, {"layers.0.up.": changes}, {})
    run = CALLS[name]
    base = run(plain).numpy()
    assert (run(layer).numpy() == base).all(), "a step without adapters"
    adapters.slots = slots
    merged = Linear(
        ops, ops.pack_weight(from_numpy(weight.numpy() + 0.5 * b.numpy() @ a.numpy())), bias
    )
    expected = run(merged).numpy()
    found, rows = run(layer).numpy(), slots.numpy() >= 0
    assert (found[~rows] == base[~rows]).all()
    np.testing.assert_allclose(found[rows], expected[rows], rtol=2e-4, atol=2e-4)
    assert abs(expected - base)[rows].max() > 0.1
