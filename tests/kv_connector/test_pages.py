"""Copies of blocks of a KV cache in plain arrays."""

import numpy as np
import pytest

from octavo import _native
from octavo.kv_cache.groups import KVCacheGroup, make_kv_cache_groups
from octavo.kv_connector.layout import KVLayout
from octavo.kv_connector.pages import BlockCopy, KVCaches
from octavo.models.cache import AttentionCache
from tests.fakes import pages

BLOCKS = 7


def make_layout(caches, dtype="bfloat16", **more):
    return KVLayout("model", 16, dtype, tuple(make_kv_cache_groups(caches)), **more)


def make_cache(layout, seed=0):
    rng = np.random.default_rng(seed)
    size = 2 * layout.page_nbytes
    count = max(layout.num_pages) // 2
    tensors = [rng.integers(0, 256, (BLOCKS, size), np.uint8) for _ in range(count)]
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
    assert layout.page_nbytes * 2 == cache.block_nbytes(16, dtype)
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
    size = layout.page_nbytes // 2
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


def test_other_ranks_copies_are_put_together():
    """Two ranks have 1 + 3 of four heads, two others 3 + 1; stages divide the layers."""
    size = 16 * 4 * 4  # a head's chunk

    def rank(first_head, heads, first_layer, layers):
        cache = AttentionCache(heads, 4)
        group = KVCacheGroup(tuple(range(layers)), cache)
        return KVLayout(
            *("model", 16, "float32", (group,)), first_layer=first_layer, first_head=first_head
        )

    sources = [rank(0, 1, 0, 3), rank(1, 3, 0, 3)]
    whole = np.random.default_rng(0).integers(0, 256, (3, 2, 4, size), np.uint8)
    buffers = []
    for layout in sources:
        tensors, caches = make_cache(layout)
        heads = slice(layout.first_head, layout.first_head + layout.num_chunks[0])
        for layer, tensor in enumerate(tensors):
            tensor[3] = whole[layer, :, heads].reshape(-1)
        buffers.append(np.zeros(layout.copy_nbytes, np.uint8))
        caches.save([copy_of(layout, buffers[-1], 0)])
    for target in [rank(0, 3, 0, 2), rank(3, 1, 2, 1), rank(0, 4, 1, 2)]:
        tensors, caches = make_cache(target)
        for layout, buffer in zip(sources, buffers, strict=True):
            copy = copy_of(layout, buffer, 0, block_id=1)
            assert caches.load([copy], layout.part) == set()
        heads = slice(target.first_head, target.first_head + target.num_chunks[0])
        for layer, tensor in enumerate(tensors):
            want = whole[target.first_layer + layer, :, heads].reshape(-1)
            assert (tensor[1] == want).all()


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
