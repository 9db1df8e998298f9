import random

import pytest

from octavo.scheduler.speculation import DraftLengths


def run(lengths, steps, seconds, right, *, num_reqs=1, found=1.0, seed=0):
    """Run steps; return their time and their number of tokens.

    Args:
        seconds: seconds of a step, by the computed rows and by the drafts of each request.
        right: probability that a draft is right, if the one before it was.
        found: probability that drafts exist at all.
    """
    rng = random.Random(seed)
    total = tokens = 0.0
    for _ in range(steps):
        most = lengths.choose(num_reqs)
        drafted = [most if rng.random() < found else 0 for _ in range(num_reqs)]
        accepted = []
        for count in drafted:
            good = 0
            while good < count and rng.random() < right:
                good += 1
            accepted.append(good)
        took = seconds(num_reqs + sum(drafted), most)
        lengths.record(took, drafted, accepted)
        total += took
        tokens += num_reqs + sum(accepted)
    return total, tokens


def memory_bound(rows, drafts):
    """Return the time of a large model: rows cost little; each draft costs its drafter a bit."""
    return 1.0 + 0.02 * rows + 0.03 * drafts


def compute_bound(rows, drafts):
    return 0.1 + rows + 0.03 * drafts


def test_many_drafts_where_they_cost_little_and_are_right():
    lengths = DraftLengths(8)
    run(lengths, 300, memory_bound, 0.95)
    total, tokens = run(lengths, 1000, memory_bound, 0.95)
    assert lengths.choose(1) >= 6
    assert tokens / total > 4


@pytest.mark.parametrize(
    ("seconds", "right", "num_reqs"),
    [(memory_bound, 0.02, 1), (compute_bound, 0.5, 1), (compute_bound, 0.5, 16)],
)
def test_drafts_that_do_not_pay_cost_next_to_nothing(seconds, right, num_reqs):
    lengths = DraftLengths(5)
    run(lengths, 200, seconds, right, num_reqs=num_reqs)
    total, tokens = run(lengths, 3000, seconds, right, num_reqs=num_reqs)
    without = seconds(num_reqs, 0) / num_reqs
    assert total / tokens < 1.03 * without


def test_the_first_answers_of_a_large_batch_are_not_held_up():
    """Numbers of a model with 1.1 billion parameters on two cores: drafts do not pay."""

    def seconds(rows, drafts):
        return max(0.06, 0.0055 * rows) + 0.002 * drafts

    total, tokens = run(DraftLengths(5), 80, seconds, 0.62, num_reqs=16)
    assert total / tokens < 1.03 * seconds(16, 0) / 16
    total, tokens = run(DraftLengths(5), 40, seconds, 0.62)
    assert total / tokens < 0.7 * seconds(1, 0)


def test_it_says_that_drafts_do_not_pay_at_a_load():
    lengths = DraftLengths(5)
    assert not lengths.paused  # nothing is known yet
    states = []
    for _ in range(300):
        run(lengths, 1, compute_bound, 0.5, num_reqs=16)
        states.append(lengths.paused)
    # From the first measurement on, also while it checks for improvements.
    assert states == sorted(states)
    assert states[-1]
    lengths.choose(0)
    assert lengths.paused  # without requests the load is unknown
    run(lengths, 300, memory_bound, 0.95)
    assert not lengths.paused


def test_what_a_method_does_not_find_costs_nothing():
    """It continues to search, and finds repetitions at once."""
    lengths = DraftLengths(5)
    run(lengths, 2000, lambda rows, drafts: 0.1 + 0.5 * rows, 0.9, found=0.0)
    assert lengths.choose(1) > 0


def test_it_follows_the_text():
    lengths = DraftLengths(6)
    run(lengths, 1000, memory_bound, 0.02)
    assert lengths.choose(1) <= 2
    run(lengths, 1500, memory_bound, 0.95)
    assert lengths.choose(1) >= 4
    run(lengths, 300, memory_bound, 0.02)
    assert lengths.choose(1) <= 2


def test_loads_are_told_apart():
    """The best number for one request need not be the best for sixteen."""
    lengths = DraftLengths(6)

    def seconds(rows, drafts):
        return max(1.0, rows / 16) + 0.02 * drafts

    for seed in range(10):
        run(lengths, 100, seconds, 0.8, seed=seed)
        run(lengths, 100, seconds, 0.8, num_reqs=64, seed=seed)
    assert lengths.choose(1) >= 3
    assert lengths.choose(64) <= 2


def test_a_step_that_was_held_up_changes_little():
    lengths = DraftLengths(4)
    run(lengths, 500, memory_bound, 0.9)
    best = lengths.choose(1)
    lengths.record(1000.0, [best], [best])
    run(lengths, 20, memory_bound, 0.9)
    assert lengths.choose(1) >= best - 1


def test_what_a_drafter_does_once_for_a_prompt_is_not_held_against_it():
    lengths, first = DraftLengths(5), [True]

    def seconds(rows, drafts):
        slow = 20.0 if drafts and first.pop() else 0.0
        first.append(False)
        return slow + memory_bound(rows, drafts)

    total, tokens = run(lengths, 60, seconds, 0.8, num_reqs=8)
    assert (total - 20.0) / tokens < 0.7 * memory_bound(8, 0) / 8


def test_time_that_stands_still():
    lengths = DraftLengths(4)
    run(lengths, 50, lambda rows, drafts: 0.0, 0.5)
    assert 0 <= lengths.choose(1) <= 4


def test_a_gain_within_the_error_of_what_is_measured_is_none():
    lengths = DraftLengths(3)
    run(lengths, 500, lambda rows, drafts: 1.0, 0.0)
    lengths._accepted = [0.01, 0.0, 0.0]
    assert [lengths.choose(1) for _ in range(60)].count(0) > 30
