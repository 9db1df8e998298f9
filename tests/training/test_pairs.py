from __future__ import annotations

import random

import pytest

from training.corpus import Corpus
from training.pairs import (
    SYNONYMS,
    Pair,
    Pairs,
    keywords,
    note,
    passage,
    rare_words,
    rename,
    reword,
    title,
)

LETTERS = (*"abcdefghijklmnopqrstuvwxyz", "aa", "bb", "cc", "dd")
STORY = "Mia was happy. She had a big kite. Her mom smiled. They went home. The end was good."


@pytest.fixture(scope="module")
def pairs(corpus: Corpus) -> Pairs:
    return Pairs(corpus)


@pytest.mark.parametrize("kind", ["notes", "facts", "titles", "stories"])
def test_pairs_of_a_batch_have_different_subjects(kind: str, pairs: Pairs) -> None:
    count = 30
    drawn = pairs.train(kind, random.Random(1), count)
    assert len({pair.subject for pair in drawn}) == len(drawn) == count
    assert drawn == pairs.train(kind, random.Random(1), count)
    assert drawn != pairs.train(kind, random.Random(2), count)
    assert not any(pair.held_out for pair in drawn)


@pytest.mark.parametrize("kind", ["notes", "facts", "titles"])
def test_held_out_queries_are_new_to_training(kind: str) -> None:
    queries, texts = Pairs().heldout(kind, 20, 100)
    assert (len(queries), len(texts)) == (20, 100)
    assert len(set(texts)) == 100
    trained = set()
    for seed in range(5):
        trained |= {pair.query for pair in Pairs().train(kind, random.Random(seed), 500)}
    assert len(trained & set(queries)) <= (0 if kind != "facts" else 1)


def test_a_corpus_adds_passages(corpus: Corpus, pairs: Pairs) -> None:
    assert list(Pairs().makers) == ["notes", "facts", "titles"]
    passages = ["stories", "quotes", "books", "extracts"]
    assert list(pairs.makers) == ["notes", "facts", "titles", *passages]
    no_books = Corpus(corpus.stories, corpus.heldout, ())
    assert list(Pairs(no_books).makers)[3:] == passages[:2]


def test_pairs_belong_together() -> None:
    rng = random.Random(0)
    for _ in range(300):
        pair = note(rng)
        name = pair.subject.split("/")[0]
        assert name in pair.query
        assert name in pair.text
        hero, _, friend, _ = title(rng).subject.split("/")
        assert hero != friend


def test_a_passage_lacks_its_query() -> None:
    rng = random.Random(0)
    sentences = STORY.split(". ")
    whole = 0
    for _ in range(200):
        pair = passage(STORY, "mia", rng)
        if pair is None:  # too few words are left
            continue
        missing = [s for s in sentences if s.rstrip(".") not in pair.text]
        assert missing
        whole += any(pair.query.rstrip(".") == s.rstrip(".") for s in missing)
    assert 10 < whole < 190  # some are reworded or have fewer words
    assert passage("One. Two. Three.", "few", rng) is None


def test_a_kept_sentence_is_in_its_place() -> None:
    rng = random.Random(0)
    for _ in range(50):
        pair = passage(STORY, "mia", rng, kept=True)
        if pair is not None:
            assert pair.text in STORY


def test_keywords_are_the_words_of_a_sentence_or_fewer() -> None:
    rng, sentence = random.Random(0), "Zoe had seven zebras and one kazoo"
    found = [keywords(sentence, rng).split() for _ in range(200)]
    assert 100 < sum(words == sentence.split() for words in found) < 170
    assert all(not words or len(words) >= 3 for words in found)
    assert all(set(words) <= set(sentence.split()) for words in found)
    assert keywords("Hello there", rng) == ""


def test_shared_words_are_renamed_alike() -> None:
    pair = Pair("What color is the Plum?", "The plum is purple.", "plum")
    found = rename(pair, ["lantern"], random.Random(0))
    assert found == Pair("What color is the lantern?", "The lantern is purple.", "plum")
    apart = Pair("What do you eat?", "The plum is purple.", "plum")
    assert rename(apart, ["lantern"], random.Random(0)) == apart


@pytest.fixture(scope="module")
def wordy() -> Corpus:
    """Return a corpus of 300 words, of which the first 200 are more frequent."""
    words = [f"b{first}{second}o" for first in "aeiouylrwh" for second in LETTERS]
    text = " ".join(words * 5 + words[:200])
    return Corpus(stories=(text,), heldout=(), books=())


def test_rare_words_are_the_less_frequent_ones(wordy: Corpus) -> None:
    words = wordy.stories[0].split()[200:300]
    assert rare_words(wordy) == sorted(words)
    assert rare_words(Corpus((" ".join(["seldom"] * 4),), (), ())) == []


def test_training_renames_some_pairs_and_the_evaluation_none(wordy: Corpus) -> None:
    pairs, plain = Pairs(wordy), Pairs()
    mine, theirs = (p.train("facts", random.Random(3), 100) for p in (pairs, plain))
    assert 20 < sum(a != b for a, b in zip(mine, theirs, strict=True)) < 80
    assert pairs.heldout("facts") == plain.heldout("facts")


def test_words_are_replaced_by_their_synonyms() -> None:
    assert reword("the happy rabbit", random.Random(0), 1.0) == "the glad bunny"
    assert reword("the happy rabbit", random.Random(0), 0.0) == "the happy rabbit"
    for word, others in SYNONYMS.items():
        assert word not in others
        assert all(word in SYNONYMS[other] for other in others), word


def test_short_pairs_have_short_texts(corpus: Corpus) -> None:
    assert list(Pairs(short=True).makers) == ["notes", "facts"]
    short = Pairs(corpus, short=True)
    assert list(short.makers) == ["notes", "facts", "lines"]
    for kind in short.makers:
        texts = [pair.text for pair in short.train(kind, random.Random(0), 100)]
        assert max(len(text.split()) for text in texts) < 25
