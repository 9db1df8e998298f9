"""Sequences of tokens that an answer may not contain again."""

import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from octavo.errors import RequestError
from octavo.kernels.native import NativeOps
from octavo.messages import CoreSamplingParams
from octavo.sampling.logits_processors.base import NewRow, StepRows
from octavo.sampling.logits_processors.repeated_ngrams import KEY, NGrams, RepeatedNGrams

VOCAB = 5


def new_row(row, size, tokens, num_prompt):
    return NewRow(row, CoreSamplingParams(extra_args={KEY: size}), tokens, num_prompt)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_same_as_transformers(size):
    """Rows with different tokens, one of which has resumed, in one step."""
    ops, generator = NativeOps(), np.random.default_rng(size)
    tokens = generator.integers(0, VOCAB - 1, (3, 90)).astype(np.int64)
    processor = RepeatedNGrams(4, VOCAB)
    for row in range(3):
        assert processor.add_row(new_row(row, size, tokens[row, :1].tolist(), 1))
    assert not processor.add_row(new_row(3, 0, [1], 1))
    theirs = NoRepeatNGramLogitsProcessor(size)
    for count in range(1, 90):
        if count == 50:
            processor.remove_row(1)
            processor.add_row(new_row(1, size, tokens[1, :count].tolist(), 1))
        logits = generator.normal(size=(4, VOCAB)).astype(np.float32)
        at = np.array([2, 0, 1])  # rows 0, 1 and 2; the last row of logits is of another request
        expected = logits.copy()
        theirs_ = theirs(torch.tensor(tokens[:, :count]), torch.tensor(logits[at]))
        expected[at] = theirs_.numpy()
        processor.apply(ops, found := ops.to_device(logits), StepRows(at, np.arange(3), at))
        assert np.array_equal(ops.to_host(found), expected)
        processor.append(np.arange(3), tokens[:, count])


def test_tokens_without_logits():
    """A prompt's placeholders of pictures may be beyond the vocabulary."""
    ops, processor = NativeOps(), RepeatedNGrams(1, VOCAB)
    processor.add_row(new_row(0, 1, [VOCAB + 7, 2], 2))
    logits = ops.to_device(np.zeros((1, VOCAB), np.float32))
    processor.apply(ops, logits, StepRows(np.arange(1), np.arange(1), np.arange(1)))
    assert np.flatnonzero(np.isinf(ops.to_host(logits)[0])).tolist() == [2]


@pytest.mark.parametrize("size", [20, 10**30])
def test_long_sequences_of_one_token(size):
    found = NGrams(size, [7] * 1000)
    for _ in range(100):
        found.append(7)
    assert found.banned().tolist() == ([7] if size == 20 else [])
    found.append(8)
    assert not len(found.banned())


@pytest.mark.parametrize("size", [-1, 1.5, True, "2"])
def test_wrong_sizes(size):
    with pytest.raises(RequestError, match=r"no_repeat_ngram_size=.* is not allowed"):
        RepeatedNGrams(1, VOCAB).add_row(new_row(0, size, [1], 1))
