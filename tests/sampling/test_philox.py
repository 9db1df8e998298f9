"""The generator against the published vectors, and its use as numbers in [0, 1)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from octavo.sampling.philox import uniform

M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # the paper's multipliers for 4x32
W0, W1 = 0x9E3779B9, 0xBB67AE85  # Weyl constants: golden ratio, sqrt(3) - 1
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)
ROUNDS = 10


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10, row by row.

    Args:
        counter: uint32 [R, 4].
        key: uint32 [R, 2].

    Returns:
        uint32 [R, 4], the random words.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for step in range(ROUNDS):
        round_k0 = (k0 + np.uint64(step * W0)) & LOW
        round_k1 = (k1 + np.uint64(step * W1)) & LOW
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> SHIFT) ^ c1 ^ round_k0,
            p1 & LOW,
            (p0 >> SHIFT) ^ c3 ^ round_k1,
            p0 & LOW,
        )
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


# The known-answer vectors for philox4x32-10 of the authors' library, Random123.
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
    words = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert words.dtype == np.uint32
    assert words[0].tolist() == expected


def test_rows_are_independent():
    counters = np.array([c for c, _, _ in KNOWN_ANSWERS], np.uint32)
    keys = np.array([k for _, k, _ in KNOWN_ANSWERS], np.uint32)
    assert philox4x32(counters, keys).tolist() == [e for _, _, e in KNOWN_ANSWERS]


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1)), min_size=1),
    st.integers(0, 2**32 - 1),
)
def test_uniform_reads_the_words_of_its_counter(rows, stream):
    seeds, positions = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    parts = [positions & LOW, positions >> SHIFT, np.full(len(rows), stream), np.zeros(len(rows))]
    words = philox4x32(
        np.stack(parts, axis=1).astype(np.uint32),
        np.stack([seeds & LOW, seeds >> SHIFT], axis=1).astype(np.uint32),
    ).astype(np.uint64)
    expected = (((words[:, 1] << SHIFT) | words[:, 0]) >> np.uint64(11)).astype(np.float64) / 2**53
    assert uniform(seeds, positions.astype(np.int64), stream).tolist() == expected.tolist()


def test_uniform_is_uniform_and_below_one():
    count = 50_000
    numbers = uniform(np.full(count, 3, np.uint64), np.arange(count))
    assert numbers.dtype == np.float64
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert stats.kstest(numbers, "uniform").pvalue > 1e-4
    assert (
        stats.kstest(
            uniform(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64)), "uniform"
        ).pvalue
        > 1e-4
    )


def test_seed_position_and_stream_all_matter():
    seeds = np.array([1, 2, 1], np.uint64)
    positions = np.array([0, 0, 1])
    numbers = {*uniform(seeds, positions).tolist(), *uniform(seeds, positions, 1).tolist()}
    assert len(numbers) == 6


def test_no_rows():
    assert uniform(np.empty(0, np.uint64), np.empty(0, np.int64)).shape == (0,)
