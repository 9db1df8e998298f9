import hashlib
import struct
from functools import partial

import pytest

from octavo.kv_cache.hashing import (
    MediaKeys,
    hash_block,
    input_keys,
    make_block_hasher,
    prompt_embeds_keys,
    root_hash,
)
from octavo.messages import AdapterRef, CoreSamplingParams, PromptEmbeds
from octavo.request import Request
from tests.fakes import picture
from tests.params import core_request


def make_request(tokens, hasher, salt=None):
    return Request(core_request("r", list(tokens), CoreSamplingParams(), cache_salt=salt), hasher)


def of_each_block(keys):
    """Return `keys(request, start, end)` as `ExtraKeys`."""
    return lambda request: partial(keys, request)


def test_a_hash_is_sha256_over_parent_tokens_and_keys():
    parent = root_hash(None)
    packed = struct.pack("<3q", 1, 2, 3)
    assert hash_block(parent, [1, 2, 3]) == hashlib.sha256(parent + packed).digest()
    keyed = parent + packed + struct.pack("<q", 2) + b"ab"
    assert hash_block(parent, [1, 2, 3], [b"ab"]) == hashlib.sha256(keyed).digest()


def test_only_full_blocks_are_hashed_each_once():
    calls = []

    def extra(request, start, end):
        calls.append((start, end))
        return ()

    request = make_request(range(10), make_block_hasher(4, of_each_block(extra)))
    assert calls == [(0, 4), (4, 8)]
    assert len(request.block_hashes) == 2
    request.append_output_token_ids([10])
    assert len(request.block_hashes) == 2
    request.append_output_token_ids([11, 12, 13, 14, 15])
    assert calls == [(0, 4), (4, 8), (8, 12), (12, 16)]
    whole = make_request(range(16), make_block_hasher(4))
    assert request.block_hashes == whole.block_hashes


def test_a_hash_depends_on_all_tokens_before():
    hasher = make_block_hasher(4)
    a = make_request([1, 2, 3, 4, 5, 6, 7, 8], hasher).block_hashes
    b = make_request([9, 2, 3, 4, 5, 6, 7, 8], hasher).block_hashes
    c = make_request([1, 2, 3, 4, 5, 6, 7, 9], hasher).block_hashes
    assert a[0] != b[0]
    assert a[1] != b[1]
    assert a[0] == c[0]
    assert a[1] != c[1]


def test_block_sizes_do_not_mix():
    small = make_request(range(8), make_block_hasher(4)).block_hashes
    large = make_request(range(8), make_block_hasher(8)).block_hashes
    assert not set(small) & set(large)


def test_salts_separate_all_blocks():
    hasher = make_block_hasher(4)
    hashes = [
        tuple(make_request(range(8), hasher, salt).block_hashes) for salt in (None, "", "a", "b")
    ]
    assert len({h for pair in hashes for h in pair}) == 8


@pytest.mark.parametrize("keys", [[b"a"], [b"a", b""], [b"", b"a"], [b"aa"]])
def test_extra_keys_do_not_run_together(keys):
    others = [[], [b"a"], [b"a", b""], [b"", b"a"], [b"aa"]]
    root = root_hash(None)
    equal = [o for o in others if hash_block(root, [1], o) == hash_block(root, [1], keys)]
    assert equal == [keys]


def test_extra_keys_apply_to_their_block_and_those_after():
    def media_in_second_block(request, start, end):
        return [b"image"] if start == 4 else []

    plain = make_request(range(12), make_block_hasher(4)).block_hashes
    hasher = make_block_hasher(4, of_each_block(media_in_second_block))
    media = make_request(range(12), hasher).block_hashes
    assert plain[0] == media[0]
    assert plain[1] != media[1]
    assert plain[2] != media[2]


def test_an_adapter_changes_the_block_in_which_it_begins_and_those_after():
    """Content and begin count: the same tokens may have the adapter from different ones on."""

    def hashes(content=None, begin=0):
        adapter = content and AdapterRef("name", "/x", content)
        core = core_request(
            "r", [7] * 16, CoreSamplingParams(), adapter=adapter, adapter_begin=begin
        )
        return Request(core, make_block_hasher(4)).block_hashes

    plain = hashes()
    for begin in range(16):
        assert [a == b for a, b in zip(hashes("a", begin), plain, strict=True)] == [
            index < begin // 4 for index in range(4)
        ]
    last = {hashes(content, begin)[-1] for content in "ab" for begin in range(16)}
    assert len(last) == 32


def test_a_range_of_texts_and_items_is_known_as_a_whole():
    """All that its tokens see counts from the block in which it begins, and nothing after it."""

    def hashes(tokens=(), name="a", offset=8, adapter_begin=None, end=14):
        ids = [*range(20)]
        for token in tokens:
            ids[token] = 99
        feature = picture(name, offset, 2, ranges=((5, end),))
        fields = {"mm_features": [feature]}
        if adapter_begin is not None:
            fields |= {"adapter": AdapterRef("n", "/x", "c"), "adapter_begin": adapter_begin}
        request = Request(
            core_request("r", ids, CoreSamplingParams(), **fields),
            make_block_hasher(4, input_keys),
        )
        return request.block_hashes

    plain = hashes()
    for other, first in [
        (hashes([13]), 1),
        (hashes(name="b"), 1),
        (hashes(offset=9), 1),
        (hashes(adapter_begin=13), 1),
        (hashes(end=13), 1),
        (hashes([0]), 0),
        (hashes([14]), 3),
        (hashes(adapter_begin=16), 4),
    ]:
        assert [a == b for a, b in zip(plain, other, strict=True)] == [i < first for i in range(5)]


def test_the_work_for_items_is_linear(monkeypatch):
    """Each item is read for its own blocks and its own range, as often as there are."""

    class Counted(list):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return super().__getitem__(index)

    for length in (8, 12):  # items alone, and ranges with four tokens of text
        counts = []
        for number in (10, 20):
            places = [16 * i for i in range(number)]
            items = Counted(picture("a", at, 8, ranges=((at, at + length),)) for at in places)
            keys = MediaKeys(make_request([1], None).options, items, [7] * 16 * number)
            found = [keys.of_block(at, at + 4) for at in range(0, 16 * number, 4)]
            ranges = [[key[:5] for key in found[i]].count(b"range") for i in range(4 * number)]
            assert ranges == [int(length == 12), 0, 0, 0] * number
            counts.append(items.read)
        assert counts[1] <= 2 * counts[0] + 8


def test_embeddings_are_known_by_their_content():
    """A block's hash follows from the embeddings in it and before it, not from placeholder ids."""

    def hashes(data, dtype="float32", count=6, more=(5, 6)):
        embeds = PromptEmbeds(data[: count * 8], dtype, 2 if dtype == "float32" else 4)
        core = core_request("r", [0] * count + [*more], CoreSamplingParams())
        core.prompt_embeds = embeds
        return Request(core, make_block_hasher(4, of_each_block(prompt_embeds_keys))).block_hashes

    data = bytes(range(48))
    first = hashes(data)
    assert hashes(bytes(bytearray(data))) == first
    assert len(first) == 2
    for at, same in ((0, 0), (31, 0), (32, 1), (47, 1)):
        other = bytearray(data)
        other[at] ^= 1
        found = hashes(bytes(other))
        assert [a == b for a, b in zip(found, first, strict=True)] == [True] * same + [False] * (
            2 - same
        )
    assert hashes(data, more=(5, 7))[0] == first[0]
    assert hashes(data, more=(5, 7))[1] != first[1]
    assert hashes(data, "bfloat16")[0] != first[0]
    # The embedding is a token here.
    assert hashes(data, count=5, more=(0, 5, 6))[0] == first[0]
    assert hashes(data, count=5, more=(0, 5, 6))[1] != first[1]
    tokens = make_request([0] * 6 + [5, 6], make_block_hasher(4, of_each_block(prompt_embeds_keys)))
    assert tokens.block_hashes == make_request([0] * 6 + [5, 6], make_block_hasher(4)).block_hashes
    assert not set(tokens.block_hashes) & set(first)
