"""Mapped memory, and the arena of recorded steps."""

import random

import pytest

from octavo.kernels.memory import Arena, map_memory
from octavo.system import device
from octavo.system.tensor import HostTensor


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 3 * 2**20 + 5])
def test_mapped_memory_is_zeroed_and_aligned(nbytes: int) -> None:
    memory = map_memory(nbytes)
    assert memory.shape == (nbytes,)
    assert memory.numpy().sum() == 0
    assert nbytes == 0 or memory.data_ptr() % 4096 == 0
    memory.numpy()[...] = 7
    assert memory.numpy().sum() == 7 * nbytes


@pytest.mark.skipif(device.resident_memory() is None, reason="the system does not tell the size")
def test_no_more_is_taken_than_asked() -> None:
    nbytes = 4 * 2**20 + 12_000  # in huge pages only, half as much again would be used
    before = device.resident_memory()
    memories = [map_memory(nbytes) for _ in range(20)]
    assert device.resident_memory() - before < 2**20
    for memory in memories:
        memory.numpy()[...] = 1
    assert abs(device.resident_memory() - before - 20 * nbytes) < 4 * 2**20


def test_places_are_used_again_when_no_view_is_left() -> None:
    arena = Arena(1024)
    a = arena.empty(4, 16, dtype="float32")
    view = a.view(64)[32:]
    address = a.data_ptr()
    del a
    b = arena.empty(64, dtype="float32")
    assert b.data_ptr() >= address + 256
    del view
    c = arena.empty(2, 8, dtype="bfloat16")
    assert c.data_ptr() == address
    assert arena.peak == 512


def test_more_than_there_is() -> None:
    arena = Arena(256)
    kept = arena.empty(32, dtype="float32")
    with pytest.raises(AssertionError, match="activations exceed"):
        arena.empty(40, dtype="float32")
    assert kept.shape == (32,)


def test_live_buffers_never_overlap() -> None:
    arena, rng = Arena(1 << 16), random.Random(0)
    live: list[HostTensor] = []
    for step in range(500):
        if live and rng.random() < 0.5:
            live.pop(rng.randrange(len(live)))
        else:
            size = rng.randrange(1, 700)
            tensor = arena.empty(size, dtype="int64")
            tensor.numpy()[...] = step
            live.append(tensor)
        if len(live) > 8:
            live.clear()
        assert all((t.numpy() == t.numpy()[0]).all() for t in live)
    live.clear()
    del tensor
    assert arena.empty((1 << 16) // 8, dtype="int64").numel() == 8192, "all is one place again"
