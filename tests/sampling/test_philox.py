"""Generator against the published vectors, and its use as numbers in [0, 1)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.kernels.reference import philox4x32, token_numbers
from octavo.sampling.philox import uniform

# Known-answer vectors for philox4x32-10 of the authors' library, Random123.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32))
    assert words.dtype == np.uint32
    assert words.tolist() == expected


def test_rows_are_independent():
    counters = np.array([c for c, _, _ in KNOWN_ANSWERS], np.uint32)
    keys = np.array([k for _, k, _ in KNOWN_ANSWERS], np.uint32)
    assert philox4x32(counters.T, keys.T).T.tolist() == [e for _, _, e in KNOWN_ANSWERS]


SHIFT = np.uint64(32)
SEEDS, WORDS = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(SEEDS, WORDS), min_size=1), WORDS)
def test_uniform_reads_the_words_of_its_counter(rows, stream):
    seeds = np.array([seed for seed, _ in rows], np.uint64)
    positions = np.array([position for _, position in rows], np.uint32)
    counter = np.zeros((4, len(rows)), np.uint32)
    counter[:2] = positions, np.full(len(rows), stream)
    key = np.stack([seeds & 0xFFFFFFFF, seeds >> SHIFT]).astype(np.uint32)
    words = philox4x32(counter, key).astype(np.uint64)
    expected = (((words[1] << SHIFT) | words[0]) >> np.uint64(11)).astype(np.float64) / 2**53
    assert uniform(seeds, positions, stream).tolist() == expected.tolist()


@given(SEEDS, WORDS, WORDS, st.integers(1, 300))
def test_a_token_has_a_word_of_its_own(seed, position, stream, vocab_size):
    params = np.zeros(1, SAMPLING_ROW)
    params["seed"], params["position"], params["stream"] = seed, position, stream
    numbers = token_numbers(params, vocab_size)
    assert numbers.shape == (1, vocab_size)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    for token, number in enumerate(numbers[0].tolist()):
        group, word, lane = token // 64, token // 16 % 4, token % 16
        counter = np.array([position, stream, 16 * group + lane, 0], np.uint32)
        assert number == 1 - (int(philox4x32(counter, key)[word]) + 0.5) / 2**32


def test_numbers_are_uniform_and_inside_of_the_interval():
    count = 50_000
    params = np.zeros(1, SAMPLING_ROW)
    positions, seeds = np.arange(count, dtype=np.uint32), np.arange(count, dtype=np.uint64)
    for numbers in (
        uniform(np.full(count, 3, np.uint64), positions, 0),
        uniform(seeds, np.zeros(count, np.uint32), 0),
        token_numbers(params, count)[0],
    ):
        assert numbers.dtype == np.float64
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
    assert numbers.min() > 0.0


def test_seed_position_and_stream_all_matter():
    seeds = np.array([1, 2, 1], np.uint64)
    positions = np.array([0, 0, 1], np.uint32)
    numbers = {*uniform(seeds, positions, 0).tolist(), *uniform(seeds, positions, 1).tolist()}
    assert len(numbers) == 6


def test_no_rows():
    assert uniform(np.empty(0, np.uint64), np.empty(0, np.uint32), 1).shape == (0,)
