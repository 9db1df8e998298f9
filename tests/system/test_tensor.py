"""Tensors of the host: views, numpy, DLPack, and what they refuse."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.torch_tensors import as_torch, from_torch
from octavo.system.tensor import (
    HostTensor,
    concatenate,
    dense,
    empty,
    from_dlpack,
    from_numpy,
    full,
    itemsize,
    numpy_dtype,
    round_to,
    zeros,
)

NUMPY = ["float32", "float16", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"]
NUMPY += ["uint16", "uint32", "uint64"]
OTHERS = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


def counted(*shape: int) -> HostTensor:
    return from_numpy(np.arange(np.prod(shape), dtype=np.int32).reshape(shape))


@pytest.mark.parametrize("dtype", NUMPY + OTHERS)
def test_types(dtype: str) -> None:
    x = zeros(3, 2, dtype=dtype)
    assert (x.dtype, x.shape, x.ndim, x.numel(), len(x)) == (dtype, (3, 2), 2, 6, 3)
    assert x.nbytes == 6 * x.itemsize == 6 * itemsize(dtype)
    assert x.data_ptr() % 64 == 0
    array = x.numpy()
    assert array.dtype == numpy_dtype(dtype)
    array[1, 1] = 1
    assert from_numpy(array).dtype == dtype
    assert from_numpy(array).data_ptr() == x.data_ptr()
    assert float(x[1, 1].numpy()) == 1
    assert str(x) == f"Tensor({dtype} [3, 2])"


@pytest.mark.parametrize("dtype", ["float32", *OTHERS])
def test_torch_shares_the_memory(dtype: str) -> None:
    x = zeros(4, 6, dtype=dtype)[1:, ::2]
    t = as_torch(x)
    assert (tuple(t.shape), t.stride()) == ((3, 3), (6, 2))
    assert str(t.dtype) == f"torch.{dtype}"
    t[2, 1] = 2
    assert float(x[2, 1].numpy()) == 2
    back = from_torch(t)
    assert (back.data_ptr(), back.dtype) == (x.data_ptr(), dtype)
    assert [back.stride(0), back.stride(1)] == [6, 2]


def test_dlpack_keeps_the_memory() -> None:
    t = torch.arange(6.0)
    x = from_dlpack(t)
    del t
    gc.collect()
    assert x.numpy().tolist() == [0, 1, 2, 3, 4, 5]
    t = torch.from_dlpack(from_numpy(np.arange(3)))
    gc.collect()
    assert t.tolist() == [0, 1, 2]
    unused = x.__dlpack__()
    del unused


def test_negative_strides_are_not_passed_on() -> None:
    with pytest.raises(BufferError, match="negative"):
        counted(3)[::-1].__dlpack__()


def test_empty_arrays_are_dense() -> None:
    assert from_numpy(np.zeros((4, 3))[[]]).stride(1) == 1


def test_views_keep_the_memory_and_the_last_one_frees_it() -> None:
    array = np.arange(10)
    gone = weakref.ref(array)
    x = from_numpy(array)
    part = x[2:].view(2, 4)[1]
    del array, x
    gc.collect()
    assert gone() is not None
    assert part.numpy().tolist() == [6, 7, 8, 9]
    del part
    gc.collect()
    assert gone() is None


INDICES = st.one_of(
    st.integers(-4, 3),
    st.slices(4),
    st.none(),
    st.just(Ellipsis),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(INDICES, max_size=5), st.permutations([0, 1, 2]))
def test_indices_are_numpys(index: list[object], order: list[int]) -> None:
    array = np.arange(4 * 5 * 4, dtype=np.int32).reshape(4, 5, 4).transpose(order)
    key = tuple(index)
    try:
        expected = array[key]
    except IndexError:
        with pytest.raises(IndexError):
            from_numpy(array)[key]
        return
    got = from_numpy(array)[key]
    assert got.shape == np.shape(expected)
    assert np.array_equal(got.numpy(), expected)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.integers(-1, 8), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_views_are_those_of_torch(shape: list[int], new: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    base = torch.arange(int(np.prod(shape)), dtype=torch.int32).view(shape).permute(order)
    x = from_torch(base)
    try:
        expected = base.view(new)
    except RuntimeError:
        with pytest.raises(ValueError, match=r"view|sizes"):
            x.view(*new)
        return
    got = x.view(new)
    assert got.shape == tuple(expected.shape)
    assert np.array_equal(got.numpy(), expected.numpy())
    assert got.numel() == 0 or got.data_ptr() == x.data_ptr()


def test_views_as_other_types() -> None:
    x = counted(4, 6)
    assert x.view("uint8").shape == (4, 24)
    assert x.view("int64").shape == (4, 3)
    assert (
        x[:, 2:4].view("int16").numpy().tolist() == x.numpy()[:, 2:4].copy().view(np.int16).tolist()
    )
    for wrong in (
        lambda: x[:, :3].view("int64"),
        lambda: x.T.view("int16"),
        lambda: x[1, 1].view("int8"),
    ):
        with pytest.raises(ValueError, match=r"whole number|dense|single"):
            wrong()
    with pytest.raises(ValueError, match="no tensor type int3"):
        x.view("int3")


def test_parts() -> None:
    x = counted(2, 5, 3)
    sizes = [part.shape for part in x.split_with_sizes([2, 0, 3], 1)]
    assert sizes == [(2, 2, 3), (2, 0, 3), (2, 3, 3)]
    assert [part.numpy().tolist() for part in x.unbind(-1)] == x.numpy().transpose(2, 0, 1).tolist()
    assert x.transpose(0, 2).shape == (3, 5, 2)
    for sizes_ in ([2, 2], [6], [-1, 6]):
        with pytest.raises(ValueError, match="sizes"):
            x.split_with_sizes(sizes_, 1)


@pytest.mark.parametrize(
    "index", [[0, 1], np.array([0]), True, 1.0, "a", (0, 0, 0), (slice(None), [1])]
)
def test_indices_that_copy_are_refused(index: object) -> None:
    with pytest.raises((TypeError, IndexError)):
        counted(3, 3)[index]


def test_no_arithmetic() -> None:
    x = counted(2)
    with pytest.raises(TypeError):
        x + 1
    with pytest.raises(TypeError):
        x[0] = 1


def test_read_only_memory_stays_read_only() -> None:
    x = from_numpy(np.frombuffer(bytes(8), np.int32))[1:]
    with pytest.raises(ValueError, match="read-only"):
        x.numpy()[0] = 1


def test_wrong_sizes() -> None:
    for wrong in (lambda: empty(-1, dtype="int8"), lambda: empty(*[1] * 9, dtype="int8")):
        with pytest.raises(ValueError, match=r"negative|dimensions"):
            wrong()
    with pytest.raises((MemoryError, ValueError)):
        empty(2**61, dtype="int64")
    with pytest.raises(ValueError, match="no tensor type"):
        from_numpy(np.zeros(2, np.complex64))
    with pytest.raises(ValueError, match="strides"):
        from_numpy(np.lib.stride_tricks.as_strided(np.zeros(4, np.int32), (2,), (6,)))


def test_helpers() -> None:
    assert round_to(0.1, "bfloat16") == 0.10009765625
    assert full((2,), 1.5, "bfloat16").numpy().tolist() == [1.5, 1.5]
    x = counted(2, 3)
    assert dense(x) is x
    assert dense(x.T).numpy().tolist() == x.numpy().T.tolist()
    assert dense(x, "float64").dtype == "float64"
    assert concatenate([x, x], 1).shape == (2, 6)


def test_references_do_not_leak() -> None:
    x = counted(3)
    array = x.numpy()
    before = sys.getrefcount(array), sys.getrefcount(x)
    for _ in range(100):
        from_numpy(array)[1:].numpy()
        x.view("uint8").__dlpack__()
    gc.collect()
    assert (sys.getrefcount(array), sys.getrefcount(x)) == before
