from __future__ import annotations

import random

import pytest

from training.corpus import Corpus
from training.pairs import SYNONYMS, Pairs, note, passage, reword, title

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
    assert list(pairs.makers) == ["notes", "facts", "titles", "stories", "books"]
    no_books = Corpus(corpus.stories, corpus.heldout, ())
    assert "books" not in Pairs(no_books).makers


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


def test_words_are_replaced_by_their_synonyms() -> None:
    assert reword("the happy rabbit", random.Random(0), 1.0) == "the glad bunny"
    assert reword("the happy rabbit", random.Random(0), 0.0) == "the happy rabbit"
    for word, others in SYNONYMS.items():
        assert word not in others
        assert all(word in SYNONYMS[other] for other in others), word


def test_short_pairs_have_short_texts() -> None:
    short = Pairs(short=True)
    assert list(short.makers) == ["notes", "facts"]
    for kind in short.makers:
        texts = [pair.text for pair in short.train(kind, random.Random(0), 100)]
        assert max(len(text.split()) for text in texts) < 25
