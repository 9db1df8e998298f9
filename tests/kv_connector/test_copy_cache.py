import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.kv_connector.copy_cache import EVICTION_POLICIES, ARCCopyCache, LRUCopyCache


def key(number):
    return 0, number.to_bytes(4, "little")


def names(cache, numbers):
    return [n for n in numbers if key(n) in cache]


def test_the_oldest_goes_first():
    cache = LRUCopyCache(3)
    for n in range(3):
        cache.insert(key(n))
    cache.touch(key(0))
    cache.insert(key(3))
    assert names(cache, range(4)) == [0, 2, 3]


def test_pinned_ones_stay():
    cache = LRUCopyCache(2)
    cache.insert(key(0), pin=True)
    cache.insert(key(1))
    assert cache.insert(key(2)) is not None
    assert names(cache, range(3)) == [0, 2]
    cache.pin(key(2))
    cache.pin(key(2))
    assert cache.insert(key(3)) is None
    cache.unpin(key(2))
    assert cache.insert(key(3)) is None
    cache.unpin(key(2))
    assert cache.insert(key(3)) is not None
    cache.clear()
    assert names(cache, range(4)) == [0]


def test_what_was_asked_for_again_outlives_a_scan():
    kept = {}
    for policy in (LRUCopyCache, ARCCopyCache):
        cache = policy(20)
        for n in range(10):
            cache.insert(key(n))
            cache.touch(key(n))
        for n in range(100, 200):
            cache.insert(key(n))
        kept[policy] = len(names(cache, range(10)))
    assert kept == {LRUCopyCache: 0, ARCCopyCache: 10}


def test_places_are_restored():
    cache = LRUCopyCache(3)
    cache.restore(key(5), 1)
    assert cache.slot(key(5)) == 1
    assert {cache.insert(key(6)), cache.insert(key(7))} == {0, 2}


class CopyCacheMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(sorted(EVICTION_POLICIES)), num_slots=st.integers(1, 5))
    def make(self, policy, num_slots):
        self.cache = EVICTION_POLICIES[policy](num_slots)
        self.pins = {}

    @rule(number=st.integers(0, 9), pin=st.booleans())
    def insert(self, number, pin):
        cache, pinned = self.cache, sum(count > 0 for count in self.pins.values())
        if key(number) in cache:
            cache.touch(key(number))
            return
        slot = cache.insert(key(number), pin=pin)
        assert (slot is None) == (pinned == cache.num_slots)
        if slot is not None:
            self.pins[number] = int(pin)

    @rule(number=st.integers(0, 9), more=st.booleans())
    def pin(self, number, more):
        if key(number) not in self.cache:
            return
        if more:
            self.cache.pin(key(number))
            self.pins[number] += 1
        elif self.pins[number]:
            self.cache.unpin(key(number))
            self.pins[number] -= 1
        else:
            self.cache.remove(key(number))

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        slots = [cache.slot(key(n)) for n in names(cache, range(10))]
        assert len(set(slots)) == len(slots) == len(cache) <= cache.num_slots
        assert set(slots) <= set(range(cache.num_slots))
        for number, count in self.pins.items():
            if count:
                assert key(number) in cache
                assert cache.pinned(key(number))
        self.pins = {n: count for n, count in self.pins.items() if key(n) in cache}


TestCopyCacheMachine = CopyCacheMachine.TestCase
TestCopyCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", EVICTION_POLICIES.values())
def test_its_books_stay_small(policy):
    cache = policy(4)
    for n in range(1000):
        cache.insert(key(n))
    lists = [value for value in vars(cache).values() if hasattr(value, "__len__")]
    assert max(map(len, lists)) <= 8
