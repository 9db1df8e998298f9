"""Layout of memory that ranks share: no parts overlap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.layers.step_table import StepSize
from octavo.plan.group_layout import HANDED_SLOTS, ExpertGroupLayout, GroupLayout
from octavo.system.distributed import COUNTER_NBYTES, Rank


@given(
    st.builds(StepSize, *(st.integers(1, 50) for _ in range(3))),
    st.integers(0, 40),
    st.integers(2, 5),
    st.integers(1, 3),
    st.lists(st.integers(0, 500), min_size=1, max_size=4),
    st.integers(1, 300),
)
def test_places_are_apart(size, drafts, slots, ranks, buffers, handed):
    stages = len(buffers)
    layout = GroupLayout(size, drafts, slots, Rank(0, ranks, 0, stages), handed, buffers)
    places = [
        (layout.tokens, COUNTER_NBYTES + 8 * slots * layout.token_numbers),
        (layout.drafts, COUNTER_NBYTES + 8 * slots * layout.draft_numbers),
    ]
    assert layout.slot_nbytes >= size.tokens * handed
    for stage in range(stages - 1):
        for index in range(ranks):
            nbytes = 2 * COUNTER_NBYTES + HANDED_SLOTS * layout.slot_nbytes
            places.append((layout.handed(stage, index), nbytes))
    places += [(layout.buffers_of(stage), buffers[stage]) for stage in range(stages)]
    assert all(begin % 64 == 0 for begin, _ in places)
    end = 0
    for begin, nbytes in places:
        assert begin >= end
        end = begin + nbytes
    assert end <= layout.nbytes


@pytest.mark.parametrize(
    ("came", "mended", "arrivals", "behind"),
    [
        ((1, 1, 1), (1, 1, 1), (7, 7, 7), []),
        ((1, 1, 1), (1, 1, 1), (8, 7, 8), [1]),
        ((1, 1, 1), (1, 1, 1), (2**32 - 1, 0, 2**32 - 1), [0, 2]),
        ((2, 1, 2), (1, 1, 1), (0, 7, 9), [1]),  # of an earlier generation
        ((2, 2, 2), (2, 1, 2), (0, 7, 0), [1]),
        ((0, 0, 2**32 - 1), (0, 0, 0), (0, 0, 0), [2]),
    ],
)
def test_the_engines_that_others_wait_for(came, mended, arrivals, behind):
    layout = ExpertGroupLayout(3)
    counters = bytearray(layout.nbytes)
    for offset, values in (
        (layout.came, came),
        (layout.mended, mended),
        (layout.arrivals, arrivals),
    ):
        for rank, value in enumerate(values):
            counters[offset(rank) : offset(rank) + 4] = value.to_bytes(4, "little")
    assert layout.behind(bytes(counters)) == behind
    of_one = [0] if behind else []
    assert ExpertGroupLayout(3, per_engine=3).behind(bytes(counters)) == of_one
    assert layout.behind(b"") == []
