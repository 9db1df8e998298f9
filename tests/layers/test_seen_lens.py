"""Numbers of tokens before the masks at the end of texts."""

import numpy as np

from octavo.layers.seen_lens import SeenLensArray
from octavo.messages import CoreSamplingParams, NewRequestData


def test_masks_at_the_end_are_unseen():
    filler = SeenLensArray(mask=9).make_filler(4)
    texts = [[1, 9, 2, 9, 9], [1, 2], [9, 9, 9]]
    for row, tokens in zip((3, 0, 2), texts, strict=True):
        filler.add_row(row, NewRequestData(tokens, len(tokens), CoreSamplingParams(), 0))
    out = np.zeros(3, np.int32)
    filler.fill(out, np.array([0, 2, 3]), np.zeros(3, np.int64), np.array([2, 3, 5]))
    assert out.tolist() == [2, 1, 3]
