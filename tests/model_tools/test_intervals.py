"""Confidence intervals: Student's quantiles, and means over chunks, against scipy."""

import numpy as np
import pytest
import scipy.stats

from octavo.model_tools.intervals import Mean, mean_over_chunks, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 20, 1000])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.995])
def test_quantiles(freedom, probability):
    expected = scipy.stats.t.ppf(probability, freedom)
    within = 1e-9 if freedom < 3 else 0.03 if freedom == 3 else 0.012
    assert student_quantile(probability, freedom) == pytest.approx(expected, rel=within)


def test_chunks_of_equal_size_have_the_usual_interval():
    means = np.random.default_rng(0).normal(3.0, 0.5, 12)
    found = mean_over_chunks(means * 50, np.full(12, 50))
    low, high = scipy.stats.t.interval(0.95, 11, means.mean(), scipy.stats.sem(means))
    assert (found.value, found.low, found.high) == pytest.approx(
        (means.mean(), low, high), rel=1e-3
    )


def test_chunks_of_different_size_weigh_by_their_tokens():
    counts = np.array([100, 100, 10])
    found = mean_over_chunks(np.array([200.0, 200.0, 40.0]), counts)
    assert found.value == 440 / 210
    assert found.low is not None
    assert found.low < found.value < found.high


def test_the_interval_covers_the_truth_in_19_of_20_texts():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        counts = rng.integers(20, 60, 10)
        levels = rng.normal(2.0, 0.4, 10)  # tokens of a chunk depend on each other
        sums = np.array(
            [rng.normal(level, 1.0, n).sum() for level, n in zip(levels, counts, strict=True)]
        )
        found = mean_over_chunks(sums, counts)
        hits += found.low <= 2.0 <= found.high
    assert 925 <= hits <= 970


def test_one_chunk_has_no_interval():
    found = mean_over_chunks(np.array([8.0]), np.array([4]))
    assert found == Mean(2.0)
    assert found.map(lambda x: x + 1) == Mean(3.0)
    assert found.limited(0, 1) == found


def test_bounds():
    assert Mean(0.5, -0.1, 1.2).limited(0.0, 1.0) == Mean(0.5, 0.0, 1.0)
    assert Mean(1.0, 0.0, 2.0).map(lambda x: 2 * x) == Mean(2.0, 0.0, 4.0)
