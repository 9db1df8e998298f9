"""Ranges of tokens that see each other in both directions."""

import numpy as np

from octavo.layers.ranges import NO_BEGIN, RangeArray
from octavo.messages import CoreSamplingParams, NewRequestData
from tests.fakes import picture


def test_a_token_has_the_range_that_holds_it():
    several = [
        picture("a", 1, 3, ranges=((1, 4),)),
        picture("b", 5, 6, b"\1\1\0\0\1\1", ranges=((5, 7), (9, 11))),
    ]
    for widens in (False, True):
        filler = RangeArray(widens).make_filler(4)
        for row, features in ((3, several), (0, []), (1, several[:1])):
            data = NewRequestData([1] * 12, 12, CoreSamplingParams(), 0, mm_features=features)
            filler.add_row(row, data)
        out = np.zeros((15, 2), np.int32)
        filler.fill(out, np.array([0, 3, 1]), np.array([2, 1, 3]), np.array([2, 11, 2]))
        ends = [0, 0, 4, 4, 4, 0, 7, 7, 0, 0, 11, 11, 0, 4, 0]
        begins = {0: NO_BEGIN, 4: 1, 7: 5, 11: 9}
        assert out[:, 1].tolist() == ends
        assert out[:, 0].tolist() == [begins[end] if widens else NO_BEGIN for end in ends]
        # A row forgets the request that had it before.
        filler.add_row(3, NewRequestData([1] * 12, 12, CoreSamplingParams(), 0))
        filler.fill(out, np.array([3]), np.array([0]), np.array([15]))
        assert not out[:, 1].any()
