"""Slots of a step's tokens: those before the begin of an adapter have none."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.layers.adapter_table import ADAPTER_SLOTS
from octavo.messages import CoreSamplingParams, NewRequestData

requests = st.tuples(
    st.integers(-1, 3),  # slot
    st.integers(0, 12),  # begin of the adapter
    st.integers(0, 12),  # first token of the step
    st.integers(0, 6),  # number of tokens
)


@given(st.lists(requests, max_size=6), st.randoms())
def test_each_token_has_the_slot_of_its_position(step: list[tuple[int, ...]], random) -> None:
    filler = ADAPTER_SLOTS.make_filler(8)
    rows = random.sample(range(8), len(step))
    for row, (slot, begin, *_) in zip(rows, step, strict=True):
        data = NewRequestData([1], 1, CoreSamplingParams(), 0)
        data.adapter_slot, data.adapter_begin = slot, begin
        filler.add_row(row, data)
    starts, counts = (np.array([it[i] for it in step], np.int64) for i in (2, 3))
    out = np.full(counts.sum(), 99, np.int32)
    filler.fill(out, np.array(rows, np.int64), starts, counts)
    assert out.tolist() == [
        slot if position >= begin else -1
        for slot, begin, start, count in step
        for position in range(start, start + count)
    ]
