"""Media that are kept by their uuids: scopes, bounds, and who gives up items."""

from octavo.frontend.media_cache import MediaCache, MediaKey


def key(uuid, scope=None):
    return MediaKey(scope, uuid, "image")


def test_an_item_is_found_in_its_scope_only():
    cache = MediaCache(10_000)
    cache.put(key("a", "mine"), "item", 100, "t")
    assert cache.get(key("a", "mine")) == "item"
    assert (
        cache.get(key("a", "other")) is cache.get(key("a")) is cache.get(key("b", "mine")) is None
    )
    cache.put(key("a", "other"), "evil", 100, "u")
    assert cache.get(key("a", "mine")) == "item"
    cache.put(key("a", "mine"), "newer", 200, "t")
    assert cache.get(key("a", "mine")) == "newer"
    assert (len(cache), cache.nbytes) == (2, 300 + 2 * 1024)
    cache.clear()
    assert (len(cache), cache.nbytes, cache.get(key("a", "mine"))) == (0, 0, None)


def test_who_holds_most_gives_up_the_item_unused_for_longest():
    cache = MediaCache(10 * 2024)
    cache.put(key("x"), 0, 1000, "small")
    for name in "abcdefghi":
        cache.put(key(name), 0, 1000, "large")
    assert len(cache) == 10
    cache.get(key("a"))
    for name in "yz":
        cache.put(key(name), 0, 1000, "small")
    left = {name for name in "abcdefghixyz" if cache.get(key(name)) is not None}
    assert left == set("adefghi") | set("xyz")
    for name in "uvw":  # the many scopes of one tenant are one holder
        cache.put(key(name, name), 0, 1000, "large")
    assert all(cache.get(key(name)) is not None for name in "xyz")
    assert cache.nbytes <= cache.max_nbytes


def test_an_item_that_never_fits_is_not_kept():
    cache = MediaCache(5000)
    cache.put(key("a"), 1, 1000, None)
    cache.put(key("b"), 1, 5000, None)
    assert cache.get(key("a")) == 1
    cache.put(key("a"), 1, 5000, None)
    assert (len(cache), cache.nbytes) == (0, 0)
    off = MediaCache(0)
    off.put(key("a"), 1, 0, None)
    assert len(off) == 0
