"""Words and their times."""

import itertools

import numpy as np
import pytest

from octavo.speech.alignment import TimedWord, fit_words, split_words, time_words, warp

BYTES = ["He", "llo", ",", " wor", "ld", ".", " “", "Hi", "\ufffd", "!", " -", "ed", "\xe4", "\xb8"]


def decode(ids):
    """Decode characters that are ids; the ids 1000 and 1001 are halves of one character."""
    text = ""
    for i, token in enumerate(ids):
        if token == 1000:
            text += "" if ids[i + 1 : i + 2] == [1001] else "\ufffd"
        elif token == 1001:
            text += "世" if i and ids[i - 1] == 1000 else "\ufffd"
        else:
            text += BYTES[token]
    return text


def test_words_begin_with_spaces_or_are_punctuation():
    assert split_words([0, 1, 2, 3, 4, 5], decode, "en") == [
        ("Hello", 2),
        (",", 1),
        (" world", 2),
        (".", 1),
    ]
    assert split_words([0, 10, 11], decode, "en") == [("He", 1), (" -ed", 2)]
    assert split_words([8, 3], decode, "en") == [("\ufffd", 1), (" wor", 1)]
    assert split_words([], decode, "en") == []


def test_characters_are_words_without_spaces():
    assert split_words([1000, 1001, 0, 1], decode, "ja") == [("世", 2), ("He", 1), ("llo", 1)]
    assert split_words([1000, 1001, 0, 1], decode, "en") == [("世Hello", 4)]
    assert split_words([0, 1000], decode, "ja") == [("He", 1), ("\ufffd", 1)]


def cheapest(cost):
    """Return the least cost of all paths, and the first columns of such a path."""
    rows, columns = cost.shape
    best = None
    for steps in itertools.product(((1, 0), (0, 1), (1, 1)), repeat=rows + columns - 2):
        i = j = 0
        total, first = cost[0, 0], {0: 0}
        for di, dj in steps:
            if (i, j) == (rows - 1, columns - 1):
                break
            i, j = i + di, j + dj
            if i >= rows or j >= columns:
                break
            total += cost[i, j]
            first.setdefault(i, j)
        if (i, j) == (rows - 1, columns - 1) and (best is None or total < best[0]):
            best = total, [first[k] for k in range(rows)]
    return best[1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (3, 4), (4, 3)])
def test_warp_finds_the_cheapest_path(shape):
    rng = np.random.default_rng(0)
    for _ in range(3):
        cost = rng.normal(size=shape).astype(np.float32)
        assert warp(cost).tolist() == cheapest(cost)


def test_times_of_words():
    tokens = [0, 1, 2, 6, 7, 9]  # Hello, “Hi!
    begins = [10, 20, 50, 60, 70, 90, 100]
    weights = np.full((7, 120), -1, np.float32)
    for row, (begin, end) in enumerate(zip(begins, [*begins[1:], 120], strict=True)):
        weights[row, begin:end] = 1
    weights[0, :10] = 1
    words = time_words(weights, tokens, decode, "en")
    assert [(w.word, w.start, w.end, w.num_tokens) for w in words] == [
        ("Hello,", 0.0, 1.0, 3),
        (" “Hi!", 1.2, 1.8, 3),
    ]


def test_a_pause_is_no_part_of_a_word():
    words = [TimedWord("a", 0.0, 5.0, 1), TimedWord("b", 5.0, 5.2, 1)]
    fit_words(words, 4.0, 5.1, 0.0, 0.2)
    assert (words[0].start, words[0].end) == (4.6, 5.0)
    words = [TimedWord("a", 0.0, 2.0, 1), TimedWord("b", 2.0, 9.0, 1)]
    fit_words(words, 0.0, 4.0, 0.0, 0.5)
    assert (words[1].start, words[1].end) == (2.0, 4.0)
