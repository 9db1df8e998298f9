import itertools

import msgspec
import pytest

import octavo
from octavo.kv_cache.groups import KVCacheGroup
from octavo.kv_connector.layout import SUM_NBYTES, KVLayout
from octavo.models.cache import AttentionCache
from tests.fakes import pages
from tests.kv_connector.test_pages import TWO_SIZES, make_layout

CACHES = [AttentionCache(2, 4)] * 3


@pytest.fixture
def base():
    return make_layout(CACHES)


def test_identity_differs_where_bytes_might(base):
    groups = base.groups
    others = [
        KVLayout("model, quantized", 16, "bfloat16", groups),
        KVLayout("model", 32, "bfloat16", groups),
        *(KVLayout("model", 16, dtype, groups) for dtype in ("float32", "int8", "fp8_e4m3")),
        *(
            KVLayout("model", 16, "bfloat16", groups, world_size=n, sums_in_parts=True)
            for n in (1, 2, 4)
        ),
    ]
    found = [layout.identity for layout in (base, *others)]
    assert all(len(identity) == 32 for identity in found)
    assert len(set(found)) == len(found)


def test_identity_is_the_same_on_all_ranks(base):
    for rank, world_size in ((0, 2), (1, 2), (3, 4)):
        other = make_layout(
            [AttentionCache(2, 4, first_kv_head=rank)] * 3,
            rank=rank,
            world_size=world_size,
            first_layer=rank,
        )
        assert other.identity == base.identity


def test_identity_differs_between_versions(base, monkeypatch):
    before = base.identity
    monkeypatch.setattr(octavo, "__version__", "0.0.0")
    assert make_layout(CACHES).identity != before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("caches", [CACHES, pages(None, 9, None, 9), pages(11), TWO_SIZES], ids=str)
def test_copies_have_room_for_all_pages_and_sums(caches, dtype):
    layout = make_layout(caches, dtype)
    assert layout.copy_nbytes % 64 == 0
    of_groups = zip(layout.num_pages, layout.page_nbytes, layout.num_chunks, strict=True)
    for num_pages, nbytes, chunks in of_groups:
        assert num_pages * nbytes <= layout.sums_offset
        assert layout.sums_offset + num_pages * chunks * SUM_NBYTES <= layout.copy_nbytes
        assert nbytes % chunks == 0


def test_parts_of_ranks_do_not_overlap():
    def part(rank, heads):
        group = KVCacheGroup((0, 1), AttentionCache(heads, 4, first_kv_head=2 * rank))
        return KVLayout("m", 16, "float32", (group,), first_layer=2).part

    parts = [part(rank, 2) for rank in range(3)]
    assert [it.layers for it in parts] == [[[2, 3]]] * 3
    heads = [set(range(it.first_heads[0], it.first_heads[0] + it.num_heads[0])) for it in parts]
    assert all(not a & b for a, b in itertools.combinations(heads, 2))
    assert set.union(*heads) == set(range(6))


def test_parts_in_files_keep_their_names():
    part = msgspec.to_builtins(make_layout(CACHES).part)
    names = ["layers", "first_heads", "num_heads", "chunk_nbytes", "sums_offset", "copy_nbytes"]
    assert list(part) == names  # a change needs another _VERSION
