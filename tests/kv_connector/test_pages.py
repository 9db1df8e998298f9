"""Copies of blocks of a KV cache in plain arrays."""

from dataclasses import replace

import numpy as np
import pytest

from octavo import _native
from octavo.kv_cache.groups import KVCacheGroup, make_kv_cache_groups
from octavo.kv_cache.states import id_of_state
from octavo.kv_connector.layout import KVLayout
from octavo.kv_connector.pages import BlockCopy, KVCaches
from octavo.models.cache import AttentionCache
from octavo.models.state_cache import StateCache
from tests.fakes import pages

BLOCKS = 7
TWO_SIZES = [AttentionCache(2, 4, 9), AttentionCache(1, 20)] * 2
"""Layers with blocks of two sizes."""


def make_layout(caches, dtype="bfloat16", **more):
    return KVLayout("model", 16, dtype, tuple(make_kv_cache_groups(caches)), **more)


def make_cache(layout, seed=0):
    rng = np.random.default_rng(seed)
    tensors = [rng.integers(0, 256, (BLOCKS, size), np.uint8) for size in layout.row_nbytes]
    caches = KVCaches(layout, [t.ctypes.data for t in tensors], BLOCKS)
    caches.owner = tensors  # it has addresses only
    return tensors, caches


def copy_of(layout, buffer, index, group_id=0, block_id=3, block_hash=b"h" * 32):
    at = buffer.ctypes.data + index * layout.copy_nbytes
    return BlockCopy(group_id, block_id, at, block_hash)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8_e4m3"])
def test_there_and_back(dtype):
    cache = AttentionCache(3, 20)
    layout = make_layout([cache] * 5, dtype)
    assert layout.page_nbytes == [cache.block_nbytes(16, dtype) // 2]
    tensors, caches = make_cache(layout)
    others, other_caches = make_cache(layout, 1)
    before = [tensor.copy() for tensor in others]
    buffer = np.zeros(2 * layout.copy_nbytes, np.uint8)
    caches.save([copy_of(layout, buffer, 0, block_id=3), copy_of(layout, buffer, 1, block_id=5)])
    back = [copy_of(layout, buffer, 0, block_id=6), copy_of(layout, buffer, 1, block_id=0)]
    assert other_caches.load(back) == set()
    for tensor, other, old in zip(tensors, others, before, strict=True):
        assert (other[6] == tensor[3]).all()
        assert (other[0] == tensor[5]).all()
        assert (other[1:6] == old[1:6]).all()


def test_layers_are_saved_one_by_one():
    layout = make_layout(pages(None, 9, None, 9), "float32")
    _tensors, caches = make_cache(layout)
    buffer = np.zeros(2 * layout.copy_nbytes, np.uint8)
    copies = [copy_of(layout, buffer, i, i, block_id=2 + i) for i in (0, 1)]
    caches.save(copies)
    whole = buffer.copy()
    buffer[:] = 0
    saving = caches.saving(copies)
    before = 0
    for layer in range(4):
        saving.save_layer(layer)
        there = np.flatnonzero(buffer)
        assert len(there) > before
        assert (buffer[there] == whole[there]).all()
        before = len(there)
    assert (buffer == whole).all()
    caches.saving([]).save_layer(0)  # nothing


def test_every_bit_counts():
    layout = make_layout([AttentionCache(2, 4)] * 2)
    _tensors, caches = make_cache(layout)
    buffer = np.zeros(layout.copy_nbytes, np.uint8)
    copy = copy_of(layout, buffer, 0)
    caches.save([copy])
    used = layout.sums_offset + 8 * layout.num_pages[0] * layout.num_chunks[0]
    for at in range(used):
        for bit in (1, 128):
            buffer[at] ^= bit
            assert caches.load([copy]) == {3}, at
            buffer[at] ^= bit
    assert caches.load([copy]) == set()


def test_nothing_else_is_taken_for_it():
    layout = make_layout([AttentionCache(2, 4)] * 2)
    _tensors, caches = make_cache(layout)
    buffer = np.zeros(2 * layout.copy_nbytes, np.uint8)
    copy = copy_of(layout, buffer, 0)
    assert caches.load([copy._replace(block_id=5)]) == {5}  # all zeros
    caches.save([copy])
    assert caches.load([copy._replace(block_hash=b"i" * 32, block_id=5)]) == {5}
    # Chunks that exchange their places.
    size = layout.page_nbytes[0] // 2
    first, second = buffer[:size].copy(), buffer[size : 2 * size].copy()
    buffer[:size], buffer[size : 2 * size] = second, first
    assert caches.load([copy]) == {3}


@pytest.mark.parametrize("nbytes", [0, 8, 120, 128, 136, 4096, 100_000])
def test_sums_depend_on_every_word_and_the_seed(nbytes):
    rng = np.random.default_rng(0)
    data = rng.integers(0, 2**63, nbytes // 8 + 1, np.uint64)
    nbytes -= nbytes % 8
    start = data.ctypes.data
    found = {_native.chunk_sum(start, nbytes, seed) for seed in range(100)}
    assert len(found) == 100
    assert 0 not in found
    sums = {_native.chunk_sum(start, nbytes, 5)}
    words = range(nbytes // 8) if nbytes < 10_000 else range(0, nbytes // 8, 97)
    for i in words:
        data[i] ^= np.uint64(1 << (i % 64))
        sums.add(_native.chunk_sum(start, nbytes, 5))
        data[i] ^= np.uint64(1 << (i % 64))
    assert len(sums) == 1 + len(words)


def test_groups_have_pages_of_their_own():
    layout = make_layout(pages(None, 9, None, 9), "float32")
    assert layout.num_pages == [4, 4]
    tensors, caches = make_cache(layout)
    buffer = np.zeros(2 * layout.copy_nbytes, np.uint8)
    copies = [copy_of(layout, buffer, i, i, block_id=2 + i) for i in (0, 1)]
    caches.save(copies)
    want = [tensor.copy() for tensor in tensors]
    for tensor in tensors:
        tensor[:] = 0
    assert caches.load(copies) == set()
    for tensor, old in zip(tensors, want, strict=True):
        assert (tensor[2:4] == old[2:4]).all()
        assert not tensor[4:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_groups_with_pages_of_two_sizes(dtype):
    """Two ranks divide the heads of a group; both have the one head of the other."""

    def rank(first, heads):
        local = AttentionCache(heads, 4, 9, first_kv_head=first)
        return make_layout([local, AttentionCache(1, 20)] * 2, dtype)

    whole = rank(0, 2)
    tensors, caches = make_cache(whole)
    used = [group.cache.block_nbytes(16, dtype) for group in whole.groups]
    assert len(set(used)) == 2
    assert all(nbytes >= max(used) for nbytes in whole.row_nbytes)
    buffer = np.zeros(2 * whole.copy_nbytes, np.uint8)
    copies = [copy_of(whole, buffer, i, i, block_id=2 + i) for i in (0, 1)]
    caches.save(copies)
    others, other_caches = make_cache(whole, 1)
    before = [tensor.copy() for tensor in others]
    assert other_caches.load(copies) == set()
    for tensor, other, old in zip(tensors, others, before, strict=True):
        for i, nbytes in enumerate(used):
            assert (other[2 + i, :nbytes] == tensor[2 + i, :nbytes]).all()
            assert (other[2 + i, nbytes:] == old[2 + i, nbytes:]).all()
        rest = np.delete(other, [2, 3], 0)
        assert (rest == np.delete(old, [2, 3], 0)).all()
    half = rank(1, 1)
    halves, half_caches = make_cache(half)
    assert half_caches.load(copies, whole.part) == set()
    for tensor, other in zip(tensors, halves, strict=True):
        keys_values = tensor[2, : used[0]].reshape(2, 2, -1)[:, 1].reshape(-1)
        assert (other[2, : len(keys_values)] == keys_values).all()
        assert (other[3, : used[1]] == tensor[3, : used[1]]).all()


def heads_of(layout):
    first = layout.part.first_heads[0]
    return slice(first, first + layout.num_chunks[0])


def test_other_ranks_copies_are_put_together():
    """Two ranks have 1 + 3 of four heads, two others 3 + 1; stages divide the layers."""
    size = 16 * 4 * 4  # a head's chunk

    def rank(first_head, heads, first_layer, layers):
        cache = AttentionCache(heads, 4, first_kv_head=first_head)
        group = KVCacheGroup(tuple(range(layers)), cache)
        return KVLayout("model", 16, "float32", (group,), first_layer=first_layer)

    sources = [rank(0, 1, 0, 3), rank(1, 3, 0, 3)]
    whole = np.random.default_rng(0).integers(0, 256, (3, 2, 4, size), np.uint8)
    buffers = []
    for layout in sources:
        tensors, caches = make_cache(layout)
        heads = heads_of(layout)
        for layer, tensor in enumerate(tensors):
            tensor[3] = whole[layer, :, heads].reshape(-1)
        buffers.append(np.zeros(layout.copy_nbytes, np.uint8))
        caches.save([copy_of(layout, buffers[-1], 0)])
    for target in [rank(0, 3, 0, 2), rank(3, 1, 2, 1), rank(0, 4, 1, 2)]:
        tensors, caches = make_cache(target)
        for layout, buffer in zip(sources, buffers, strict=True):
            copy = copy_of(layout, buffer, 0, block_id=1)
            assert caches.load([copy], layout.part) == set()
        heads = heads_of(target)
        for layer, tensor in enumerate(tensors):
            want = whole[target.first_layer + layer, :, heads].reshape(-1)
            assert (tensor[1] == want).all()


STATES = [StateCache(((5, 7), (3,))), StateCache(((300,),)), StateCache(((5, 7), (3,)))]
"""States of 256 and 1216 bytes."""


def make_state_layout(*layers, **more):
    groups = make_kv_cache_groups([*layers, *STATES])
    paged = tuple(group for group in groups if not group.has_states)
    return KVLayout("model", 16, "float32", paged, tuple(groups[len(paged) :]), **more)


@pytest.mark.parametrize("layers", [(), pages(None), pages(None, 9), pages(None) * 9], ids=len)
def test_pieces_contain_each_byte_of_a_state_once(layers):
    layout = make_state_layout(*layers)
    seen = {}
    for piece in layout.pieces:
        assert 0 < len(piece) <= layout.num_sums
        end = 0
        for part in piece:
            assert (part.offset, part.begin % 64) == (end, 0)
            end += part.nbytes
            places = seen.setdefault((part.layer, part.tensor, part.row_nbytes), [])
            places += range(part.begin, part.begin + part.nbytes)
        assert end <= layout.sums_offset
        assert layout.sums_offset + 8 * len(piece) <= layout.copy_nbytes
    first, tensor = len(layers), max(map(len, (g.layer_indices for g in layout.groups)), default=0)
    assert {key: sorted(places) for key, places in seen.items()} == {
        (first, tensor, 256): list(range(256)),
        (first + 1, tensor + 2, 1216): list(range(1216)),
        (first + 2, tensor + 1, 256): list(range(256)),
    }


class StateMemory:
    """States of a layout's layers, and their copies."""

    def __init__(self, layout, seed=0):
        rng = np.random.default_rng(seed)
        self.layout = layout
        self.blocks, _ = make_cache(layout) if layout.groups else ([], None)
        sizes = (256, 256, 1216)
        self.states = [rng.random((4, size // 4), np.float32).view(np.uint8) for size in sizes]
        addresses = [tensor.ctypes.data for tensor in [*self.blocks, *self.states]]
        self.caches = KVCaches(layout, addresses, BLOCKS)

    def copies(self, buffer, slot, block_hash=b"h" * 32):
        return [
            copy_of(self.layout, buffer, i, group_id, id_of_state(slot), block_hash)
            for i, (group_id, _) in enumerate(self.layout.state_keys(block_hash))
        ]


@pytest.mark.parametrize("layers", [(), pages(None), pages(None, 9)], ids=len)
def test_states_there_and_back(layers):
    layout = make_state_layout(*layers)
    first, second = StateMemory(layout), StateMemory(layout, 1)
    before = [tensor.copy() for tensor in second.states]
    buffer = np.zeros(len(layout.pieces) * layout.copy_nbytes, np.uint8)
    saving = first.caches.saving(first.copies(buffer, 1))
    assert saving.num_layers == len(layers) + 3
    for layer in range(saving.num_layers):
        saving.save_layer(layer)
    assert second.caches.load(second.copies(buffer, 2)) == set()
    for tensor, other, old in zip(first.states, second.states, before, strict=True):
        assert (other[2] == tensor[1]).all()
        assert (other[[0, 1, 3]] == old[[0, 1, 3]]).all()


def test_damaged_states():
    layout = make_state_layout(*pages(None))
    memory = StateMemory(layout)
    size = layout.copy_nbytes
    buffer = np.zeros(2 * len(layout.pieces) * size, np.uint8)
    later = buffer[len(layout.pieces) * size :]
    memory.caches.save([*memory.copies(buffer, 1), *memory.copies(later, 3, b"i" * 32)])
    other = memory.copies(later, 0, b"i" * 32)
    for piece in range(len(layout.pieces)):
        for at in (0, layout.sums_offset):
            buffer[piece * size + at] ^= 1
            assert memory.caches.load([*memory.copies(buffer, 2), *other]) == {id_of_state(2)}
            buffer[piece * size + at] ^= 1
    assert memory.caches.load(memory.copies(buffer, 2, b"i" * 32)) == {id_of_state(2)}
    pieces = buffer[: len(layout.pieces) * size].reshape(-1, size)
    for first in (0, 1):  # pieces that exchange their places, of one layer and of two
        pieces[[first, first + 1]] = pieces[[first + 1, first]]
        assert memory.caches.load(memory.copies(buffer, 2)) == {id_of_state(2)}
        pieces[[first, first + 1]] = pieces[[first + 1, first]]
    assert memory.caches.load(memory.copies(buffer, 2)) == set()


@pytest.mark.parametrize("tensor", range(3))
def test_a_state_with_nan_is_not_copied(tensor):
    layout = make_state_layout(*pages(None))
    memory = StateMemory(layout)
    buffer = np.zeros(2 * len(layout.pieces) * layout.copy_nbytes, np.uint8)
    first, second = np.split(buffer, 2)
    memory.states[tensor].view(np.float32)[1, 47] = np.nan
    good, bad = memory.copies(first, 2, b"i" * 32), memory.copies(second, 1)
    memory.caches.save([*good, *bad])
    assert not np.isnan(buffer.view(np.float32)).any()
    assert memory.caches.load([*good, *bad]) == {id_of_state(1)}
    memory.states[tensor].view(np.float32)[1, 47] = np.inf
    memory.caches.save(bad)
    assert memory.caches.load([*good, *bad]) == set()


def test_a_stage_with_a_smaller_state():
    """It has the same keys as the others, and the last pieces are empty."""
    layout = make_state_layout(*pages(None), most_pieces=20, largest_copy_nbytes=10**6)
    assert len(layout.pieces) == layout.num_pieces == len(list(layout.state_keys(b"h"))) == 20
    assert layout.pieces[-1] == []
    assert layout.slot_nbytes == 10**6
    memory, other = StateMemory(layout), StateMemory(layout, 1)
    buffer = np.zeros(20 * layout.copy_nbytes, np.uint8)
    memory.caches.save(memory.copies(buffer, 1))
    assert other.caches.load(other.copies(buffer, 2)) == set()
    assert all((a[1] == b[2]).all() for a, b in zip(memory.states, other.states, strict=True))


def test_a_stage_without_attention():
    """Its copies of blocks are empty, and its states have pieces nevertheless."""
    (group,) = make_kv_cache_groups(pages(None))
    groups = make_kv_cache_groups(STATES)
    layout = KVLayout(
        "model", 16, "float32", (replace(group, layer_indices=()),), tuple(groups), first_layer=1
    )
    memory, other = StateMemory(layout), StateMemory(layout, 1)
    buffer = np.zeros(4 * layout.copy_nbytes, np.uint8)
    block = copy_of(layout, buffer, 3)
    copies = [block, *memory.copies(buffer, 1)]
    memory.caches.save(copies)
    assert other.caches.load([block, *other.copies(buffer, 2)]) == set()
    assert all((a[1] == b[2]).all() for a, b in zip(memory.states, other.states, strict=True))


def test_memory_of_states_is_not_touched():
    memory = StateMemory(make_state_layout(*pages(None)))
    assert len(list(memory.caches.touch(BLOCKS))) == len(memory.blocks) == 1


def test_identity():
    base = make_layout([AttentionCache(2, 4)])
    assert base.identity == make_layout([AttentionCache(2, 4)], rank=1, world_size=2).identity
    others = [
        KVLayout("other", 16, "bfloat16", base.groups),
        KVLayout("model", 8, "bfloat16", base.groups),
        KVLayout("model", 16, "float32", base.groups),
        KVLayout("model", 16, "bfloat16", base.groups, world_size=2, sums_in_parts=True),
    ]
    assert len({layout.identity for layout in [base, *others]}) == 5
