"""Operations that numpy computes, compared with torch's: on any numbers and any rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels.native import NativeOps
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.torch_tensors import as_torch
from octavo.system.tensor import HostTensor, dense, empty, from_numpy

NATIVE, REFERENCE = NativeOps(), ReferenceOps()
RNG = np.random.default_rng(0)


def _special() -> Any:
    x = np.round(RNG.normal(size=(6, 200)) * 3).astype(np.float32)  # with many equal numbers
    x[1, ::7] = -0.0
    x[2, :150] = -np.inf
    x[3, 5] = np.inf
    x[4, ::3] = np.nan
    x[5] = np.nan
    return x


LOGITS = {
    "distinct": RNG.normal(size=(4, 300)).astype(np.float32),
    "special": _special(),
    "one token": np.array([[1.0], [np.nan], [-np.inf]], np.float32),
    "no rows": np.empty((0, 70), np.float32),
}


@pytest.fixture(params=LOGITS)
def x(request: pytest.FixtureRequest) -> Any:
    """Logits [M, V]."""
    return LOGITS[request.param]


def strided(x: Any) -> HostTensor:
    """Return a copy whose rows are parts of longer rows."""
    rows, size = x.shape
    part: HostTensor = empty(rows, size + 3, dtype="float32")[:, :size]
    part.numpy()[...] = x
    return part


def check(x: Any, run: Callable[[Any, Any], Any]) -> None:
    """Check that `run(ops, x)` returns the same, and leaves the same numbers, with each table."""
    seen = []
    for ops, convert in ((NATIVE, lambda tensor: tensor), (REFERENCE, as_torch)):
        copy = strided(x)
        result = run(ops, convert(copy))
        parts = result if isinstance(result, tuple) else [] if result is None else [result]
        arrays = [part if isinstance(part, np.ndarray) else ops.to_host(part) for part in parts]
        seen.append([*arrays, copy.numpy()])
    for got, expected in zip(*seen, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def some_ids(x: Any, count: int) -> Any:
    return RNG.integers(0, x.shape[1], (len(x), count))


def some_places(x: Any) -> tuple[Any, Any]:
    """Return rows and columns of a third of the elements."""
    places: tuple[Any, Any] = np.nonzero(RNG.random(x.shape) < 0.3)
    return places


@pytest.mark.parametrize("k", [0, 1, 64, 65, None])
def test_top_k(x: Any, k: int | None) -> None:
    vocab_size = x.shape[1]
    check(x, lambda ops, x: ops.top_k(x, vocab_size if k is None else min(k, vocab_size)))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_gather(x: Any, count: int) -> None:
    ids = some_ids(x, count)
    check(x, lambda ops, x: ops.gather(x, ids))


def test_ranks(x: Any) -> None:
    ids = some_ids(x, 1)[:, 0]
    check(x, lambda ops, x: ops.ranks(x, ids))


def test_rank_of_the_best_is_one() -> None:
    x = strided(LOGITS["special"][:4])
    best = NATIVE.to_host(NATIVE.argmax(x))
    assert NATIVE.ranks(x, best).tolist() == [1] * 4


def test_set_at(x: Any) -> None:
    rows, columns = some_places(x)
    check(x, lambda ops, x: ops.set_at_(x, rows, columns, -np.inf))
    check(x, lambda ops, x: ops.set_at_(x, np.arange(len(x))[::2], None, np.nan))
    check(x, lambda ops, x: ops.set_at_(x, rows[:0], columns[:0], 1.0))


def test_add_at(x: Any) -> None:
    rows, columns = some_places(x)
    values = RNG.normal(size=len(rows)).astype(np.float32)
    values[::5], values[1::5] = -np.inf, np.inf
    check(x, lambda ops, x: ops.add_at_(x, rows, columns, values))


def test_penalize(x: Any) -> None:
    rows, columns = some_places(x)
    counts, repetition, frequency, presence = (
        RNG.choice(values, len(rows)).astype(np.float32)
        for values in ((0, 1, 3), (1, 1.3, 1e-30), (0, 0.7, -0.1), (0, -0.4))
    )
    penalties = repetition, frequency, presence
    check(x, lambda ops, x: ops.penalize_(x, rows, columns, counts, penalties))


def test_change_rows() -> None:
    """A plug-in computes with torch's tensors, and with the operations that it is given."""
    rows = np.array([4, 0, 1])

    def change(ops: Any, logits: Any) -> None:
        assert logits.shape == (3, 200)
        logits[logits > 1] *= 2
        logits += ops.embedding(logits, ops.argmax(logits) * 0)

    check(LOGITS["special"], lambda ops, x: ops.change_rows(x, rows, change))


def test_a_plug_in_computes_on_one_thread_and_without_gradients() -> None:
    before, weight, seen = torch.get_num_threads(), torch.nn.Parameter(torch.ones(300)), []

    def change(ops: Any, logits: Any) -> None:
        seen.append(torch.get_num_threads())
        logits += weight
        assert ops.argmax(logits).numpy() == logits.numpy().argmax()

    torch.set_num_threads(2)
    NATIVE.change_rows(strided(LOGITS["distinct"]), np.arange(1), change)
    torch.set_num_threads(before)
    assert seen == [1]


def test_a_plug_in_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "octavo.kernels.torch_tensors")
    with pytest.raises(ModuleNotFoundError, match="torch"):
        NATIVE.change_rows(strided(LOGITS["distinct"]), np.arange(1), lambda ops, x: None)


@pytest.mark.parametrize("from_type", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("to_type", ["float32", "float16", "bfloat16"])
def test_copy_rounds_like_torch(from_type: str, to_type: str) -> None:
    numbers = RNG.normal(size=(5, 33)) * 10.0 ** RNG.integers(-9, 5, (5, 1))
    numbers[0, :8] = np.inf, -np.inf, np.nan, -0.0, 1e-41, 6e-8, 1e300, -3.4e38
    x = dense(from_numpy(numbers), from_type)
    seen = []
    for ops in (NATIVE, REFERENCE):
        out = empty(6, 40, dtype=to_type)
        out.view("uint8").numpy()[...] = 1
        part = ops.to_device(out)[1:, 2:35]
        ops.copy_(part, ops.to_device(x))
        assert ops.to_host(part).tobytes() == out[1:, 2:35].numpy().tobytes()
        seen.append(out.numpy().astype(np.float32))
    np.testing.assert_array_equal(*seen)


def test_read_only_numbers_are_read_where_they_are() -> None:
    """Messages hold such: bitmasks and prompt embeddings, at any address."""
    numbers = RNG.normal(size=(3, 5)).astype(np.float32)
    message = b"x" + numbers.tobytes()
    bytes_ = from_numpy(np.frombuffer(message, np.uint8)[1:])
    x = NATIVE.to_device(bytes_.view("float32").view(3, 5))
    assert NATIVE.to_host(x).tolist() == numbers.tolist()
    assert not NATIVE.to_host(x).flags.writeable
    out = empty(3, 5, dtype="float32")
    NATIVE.copy_(out, x)
    assert out.numpy().tolist() == numbers.tolist()
    logits = strided(numbers)
    words = NATIVE.to_device(np.frombuffer(np.array([[0b101]], np.int32).tobytes(), np.int32)[None])
    NATIVE.apply_bitmask_(logits, words, from_numpy(np.array([1])))
    expected = numbers.copy()
    expected[1, [1, 3, 4]] = -np.inf
    assert logits.numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("pairs", [[], [(1, 2)], [(0, 3), (3, 0), (0, 5)]])
def test_copied_blocks_are_read_before_any_is_written(pairs: list[tuple[int, int]]) -> None:
    caches = [RNG.integers(0, 256, (6, size), np.uint8) for size in (16, 40)]
    expected = [cache.copy() for cache in caches]
    for array, cache in zip(expected, caches, strict=True):
        for source, to in pairs:
            array[to] = cache[source]
    for ops in (NATIVE, REFERENCE):
        copies = [from_numpy(cache.copy()) for cache in caches]
        ops.copy_blocks([ops.to_device(copy) for copy in copies], pairs)
        assert [copy.numpy().tolist() for copy in copies] == [e.tolist() for e in expected]


def test_numbers_of_the_host_have_arrived() -> None:
    for ops in (NATIVE, REFERENCE):
        copy = ops.copy_to_host(ops.to_device(np.arange(3)))
        assert copy.ready()
        assert copy.numpy().tolist() == [0, 1, 2]
