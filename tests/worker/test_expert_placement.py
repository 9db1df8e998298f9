"""Placement of experts: complete, without repetition, and never worse than before."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.system.distributed import Rank
from octavo.worker.expert_placement import balance, first_placement, rank_loads


@st.composite
def mixtures(draw):
    """Experts, ranks and slots, with every number of copies that is allowed."""
    experts, ranks = draw(st.integers(1, 20)), draw(st.integers(2, 7))
    slots = draw(st.integers(-(-experts // ranks), experts))
    return experts, ranks, slots


@given(mixtures())
def test_ranks_begin_with_the_experts_that_they_load(mixture):
    experts, ranks, slots = mixture
    first = first_placement(experts, ranks, slots)
    for index, row in enumerate(first.tolist()):
        rank = Rank(index, ranks, redundant_experts=ranks * slots - experts)
        assert rank.experts(experts) == tuple(row)
    assert set(first.ravel().tolist()) == set(range(experts))


@settings(max_examples=300)
@given(mixtures(), st.data())
def test_a_placement_is_complete_and_never_worse(mixture, data):
    experts, ranks, slots = mixture
    placement = first_placement(*mixture)
    numbers = st.one_of(st.integers(0, 3), st.integers(0, 10**9))
    for _ in range(3):
        loads = np.array(data.draw(st.lists(numbers, min_size=experts, max_size=experts)))
        new = balance(loads, placement)
        assert new.shape == (ranks, slots)
        assert new.dtype == np.int32
        assert set(new.ravel().tolist()) == set(range(experts)), "every expert has a place"
        assert all(len(set(row)) == slots for row in new.tolist()), "no rank has an expert twice"
        before, after = (rank_loads(loads, each) for each in (placement, new))
        assert after.max() <= before.max()
        assert np.isclose(after.sum(), loads.sum())
        assert (new == balance(loads.copy(), placement.copy())).all()
        kept = new == placement
        for row, old, same in zip(new, placement, kept, strict=True):
            assert not set(row[~same].tolist()) & set(old.tolist()), "what a rank has stays there"
        placement = new


def test_the_loads_become_even():
    rng = np.random.default_rng(1)
    loads = (1000 * rng.pareto(1.0, 256)).astype(np.int64)
    placement = first_placement(256, 8, 36)
    assert rank_loads(loads, placement).max() > 2 * loads.sum() / 8
    assert rank_loads(loads, balance(loads, placement)).max() < 1.01 * loads.sum() / 8


def test_small_gains_move_nothing():
    placement = first_placement(4, 2, 2)
    assert balance(np.array([100, 104, 100, 100]), placement) is placement
    assert balance(np.zeros(4, np.int64), placement) is placement


def test_an_expert_gets_as_many_copies_as_it_needs():
    """One expert has most tokens: all ranks have it, and each has another one."""
    found = balance(np.array([900, 10, 10, 10]), first_placement(4, 3, 2))
    assert (found == 0).sum(1).tolist() == [1, 1, 1]
