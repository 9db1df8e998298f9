"""Processors, each against a reference that computes token by token."""

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from tests.params import Params
from tests.sampling.harness import (
    Row,
    make_metadata,
    random_logits,
    random_row,
    reference_process,
    tensor,
)

VOCAB = 150


def processed(logits, rows):
    out = tensor(logits)
    for processor, step in make_metadata(rows, VOCAB).processors:
        processor.apply(NativeOps(), out, step)
    return out.numpy()


PROMPT, OUTPUT = [5, 6, 6, 140], [6, 7, 7, 7, 149, 1, 2]
ALONE = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 1.9},
    "presence": {"presence_penalty": -1.5},
    "all penalties": {
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.3,
        "presence_penalty": 0.9,
    },
    "logit_bias": {"logit_bias": {0: 100.0, 149: -100.0, 7: 0.1}},
    "allowed_token_ids": {"allowed_token_ids": [3, 1, 149, 3]},
    "bad_words": {"bad_words_token_ids": [[3], [1, 2, 9], [2, 2, 10], [2, 11]]},
    "min_tokens": {"min_tokens": 8, "all_stop_token_ids": [0, 149]},
    "min_tokens reached": {"min_tokens": 7, "all_stop_token_ids": [0, 149]},
    "several": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.2,
        "logit_bias": {7: 2.0, 3: -1.0},
        "allowed_token_ids": [1, 2, 3, 7, 9, 140],
        "bad_words_token_ids": [[1, 2, 9]],
        "min_tokens": 10,
        "all_stop_token_ids": [1],
    },
}


@pytest.mark.parametrize("fields", ALONE.values(), ids=ALONE.keys())
def test_one_feature(fields):
    row = Row(Params(temperature=0.0, max_tokens=50, **fields), PROMPT, OUTPUT)
    plain = Row(Params(temperature=0.0), PROMPT, OUTPUT)
    logits = random_logits(3, VOCAB, seed=0) * 5
    logits[1, 6] = -np.inf  # another processor may have excluded a token that is penalised
    got = processed(logits, [plain, row, plain])
    np.testing.assert_array_equal(got[1], reference_process(logits[1], row))
    np.testing.assert_array_equal(got[[0, 2]], logits[[0, 2]])


def test_random_batches():
    rng = np.random.default_rng(1)
    rows = [random_row(rng, VOCAB) for _ in range(80)]
    logits = random_logits(len(rows), VOCAB, seed=2) * 5
    got = processed(logits, rows)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(got[i], reference_process(logits[i], row))
