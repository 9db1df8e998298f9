"""Places of the tokens around each token of a step."""

import numpy as np
import pytest

from octavo.layers.neighbors import NeighborArray


@pytest.mark.parametrize(
    ("distance", "index", "inside"),
    [
        (-1, [0, 0, 1, 3, 4, 4], [0, 1, 1, 0, 0, 1]),
        (2, [2, 1, 2, 3, 4, 5], [1, 0, 0, 0, 0, 0]),
    ],
)
def test_neighbors_of_three_texts(distance, index, inside):
    for part, expected in (("index", index), ("inside", inside)):
        array, out = NeighborArray(distance, part), np.full(6, -9)
        rows = np.array([5, 0, 2])
        array.make_filler(8).fill(out, rows, 0 * rows, np.array([3, 1, 2]))
        assert out.tolist() == expected


def test_no_text():
    none = np.zeros(0, np.int64)
    NeighborArray(1, "index").fill(none, none, none, none)
