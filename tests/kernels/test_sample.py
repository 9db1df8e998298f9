"""Choice of tokens: the native code against the ranking of the whole vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given as for_all
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels import native
from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.kernels.reference import ReferenceOps
from tests.torch_ops import native_ops


class Ranking(ReferenceOps):
    """Reference with the native exponential, so that weights agree to the last bit."""

    def exp(self, x: Tensor) -> Tensor:
        return native_ops().exp(x)


def params(rows: int, **given: float) -> NDArray[np.void]:
    result = np.zeros(rows, SAMPLING_ROW)
    for name, value in {"temperature": 1.0, "top_p": 1.0, **given}.items():
        result[name] = value
    result["seed"] = np.arange(rows) * 2**58 + 5
    result["position"] = np.arange(rows) % 3
    return result


def row_strategy(vocab_size: int) -> st.SearchStrategy[list[float]]:
    few_values = st.sampled_from([-math.inf, -3.0, -0.0, 0.0, 1.0, 1.25])  # ties and masked tokens
    floats = st.floats(-60, 60, width=32)
    return st.lists(few_values | floats, min_size=vocab_size, max_size=vocab_size)


@for_all(data=st.data())
def test_same_tokens_as_the_reference(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 7, 33, 100]))
    rows = data.draw(st.integers(1, 4))
    x = torch.tensor([data.draw(row_strategy(vocab_size)) for _ in range(rows)])

    def column(values: st.SearchStrategy[float]) -> list[float]:
        return [data.draw(values) for _ in range(rows)]

    chosen = np.empty(rows, SAMPLING_ROW)
    chosen["temperature"] = column(st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]))
    chosen["top_k"] = column(st.sampled_from([0, 1, 2, 5, 40, 1000]))
    chosen["top_p"] = column(st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]))
    chosen["min_p"] = column(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    chosen["seed"] = column(st.integers(0, 2**64 - 1))
    for name in ("position", "stream"):
        chosen[name] = column(st.integers(0, 2**32 - 1))
    before = native.isa()
    try:
        for isa in native.available_isas():
            native.set_isa(isa)
            assert torch.equal(native_ops().sample(x, chosen), Ranking().sample(x, chosen)), isa
    finally:
        native.set_isa(before)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 50},
        {"top_p": 0.95},
        {"top_k": 3000, "top_p": 0.5, "min_p": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 1e30, "top_p": 0.99},
    ],
    ids=str,
)
def test_a_whole_vocabulary(isa: str, given: dict[str, float]) -> None:
    x = torch.randn(6, 50_257, generator=torch.Generator().manual_seed(0)) * 4
    assert torch.equal(
        native_ops().sample(x, params(6, **given)), Ranking().sample(x, params(6, **given))
    )


def test_rows_without_a_finite_maximum(isa: str) -> None:
    x = torch.randn(4, 100)
    x[0, 99] = math.nan
    x[1, 50] = math.inf
    x[2] = -math.inf
    for given in ({"temperature": 0.0}, {}, {"top_p": 0.5}):
        assert native_ops().sample(x, params(4, **given)).tolist()[:3] == [-1, -1, -1]
    largest = native_ops().row_max(x)
    assert largest[0].isnan()
    assert largest[1:].tolist() == [math.inf, -math.inf, x[3].max().item()]


def test_threads_change_nothing(one_and_two_threads: tuple[int, int]) -> None:
    x = torch.randn(64, 1000)
    tokens = []
    for threads in one_and_two_threads:
        native.set_num_threads(threads)
        tokens.append(native_ops().sample(x, params(64, top_p=0.9)))
    assert torch.equal(*tokens)
