import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv_cache.encoder_cache import EncoderCacheManager
from octavo.request import Request
from tests.fakes import picture
from tests.params import core_params, core_request


def make(name, *pictures):
    return Request(core_request(name, range(100), core_params(), mm_features=list(pictures)))


def test_rows_are_shared_and_stay_until_others_need_the_space():
    cache = EncoderCacheManager(20)
    first, second = make("1", picture("a", 0, 8)), make("2", picture("a", 10, 8))
    assert cache.acquire(first, 0)
    assert not cache.acquire(second, 0)
    assert (cache.num_queries, cache.num_hits, cache.num_used_rows) == (2, 1, 8)
    first.num_computed_tokens = 8
    cache.release_computed()
    assert cache.num_used_rows == 8  # the second one still uses them
    cache.check_integrity([second])
    cache.free(second)
    assert "a" in cache
    assert cache.is_unused("a")
    assert cache.take_freed() == []
    assert not cache.acquire(make("3", picture("a", 0, 8)), 0)


def test_the_items_unused_for_the_longest_time_are_given_up():
    cache = EncoderCacheManager(20)
    for name in "abcab":
        request = make(name, picture(name, 0, 6))
        cache.acquire(request, 0)
        cache.free(request)
    cache.acquire(make("large", picture("d", 0, 12)), 0)
    assert cache.take_freed() == ["c", "a"]
    assert cache.take_freed() == []
    assert "b" in cache
    assert cache.num_free_rows == 8


def test_items_that_cost_little_are_given_up_before_those_that_cost_much():
    cache = EncoderCacheManager(20)

    def use(name, num_encoder_tokens):
        request = make(name, picture(name, 0, 6, tokens=num_encoder_tokens))
        cache.acquire(request, 0)
        cache.free(request)

    use("dear", 24)
    for name in "abcdef":
        use(name, 6)
    assert cache.take_freed() == ["a", "b", "c", "d"]
    for name in "ghijk":
        use(name, 6)
    assert "dear" not in cache  # others were used since


@given(
    uses=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), min_size=1, max_size=200)
)
def test_the_least_of_the_values_is_given_up(uses):
    """A plain search is the reference; the heap stays small."""
    cache, values, freed = EncoderCacheManager(20), {}, []
    given_up = 0.0
    for name, is_kept in uses:
        request = make(name, picture(name, 0, 6, tokens=6 * (1 + ord(name) % 3)))
        known = name in values
        values.pop(name, None)
        if not known and len(values) == 3:
            least = min(values, key=values.get)
            given_up = values.pop(least)
            freed.append(least)
        cache.acquire(request, 0)
        cache.free(request)
        values[name] = given_up + 1 + ord(name) % 3
        if not is_kept:
            cache.forget(request)
            del values[name]
            freed.append(name)
        cache.check_integrity([])
    assert cache.take_freed() == freed
    for _ in range(500):
        request = make("a", picture("a", 0, 6))
        cache.acquire(request, 0)
        cache.free(request)
    assert len(cache._order) <= 2 * 3 + 64 + 1


def test_forgotten_items_are_freed_in_the_worker():
    cache = EncoderCacheManager(20)
    request = make("1", picture("a", 0, 8))
    cache.acquire(request, 0)
    assert not cache.forget_all()
    assert (cache.take_freed(), len(cache)) == ([], 1)
    cache.free(request)
    assert cache.forget_all()
    assert (cache.take_freed(), len(cache), cache.num_free_rows) == (["a"], 0, 20)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c, r: c._sizes.update(b=3), "lost"),
        (lambda c, r: c._sizes.update(a=3), "other rows"),
        (lambda c, r: setattr(c, "num_used_rows", 3), "counted wrongly"),
        (lambda c, r: setattr(c, "num_rows", 3), "8 of 3"),
        (lambda c, r: setattr(r, "num_computed_tokens", 8), "keeps the rows"),
    ],
)
def test_integrity(spoil, message):
    cache, request = EncoderCacheManager(20), make("1", picture("a", 0, 8))
    cache.acquire(request, 0)
    cache.check_integrity([request])
    with pytest.raises(AssertionError, match="does not run"):
        cache.check_integrity([])
    spoil(cache, request)
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity([request])
