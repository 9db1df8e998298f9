from __future__ import annotations

import math

import numpy as np
import pytest

from octavo import LLM, SentenceEncoder
from training.pairs import Pairs
from training.retrieval import DEPTH, Quality, bm25, likeness, quality, rerank, spearman

TEXTS = ["the red cat", "the blue dog", "the blue cat"]


def test_bm25_by_hand() -> None:
    scores = bm25(["blue cat cat", "zebra"], TEXTS)
    # Texts of mean length: a word that occurs once counts its idf alone.
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    assert scores[0] == pytest.approx([idf, idf, 2 * idf])
    assert not scores[1].any()


def test_bm25_prefers_shorter_texts() -> None:
    scores = bm25(["cat"], ["a cat", "a cat and a dog"])
    assert scores[0, 0] > scores[0, 1] > 0


def test_quality_by_hand() -> None:
    # Ranks 1 and 3, and one of two equal texts.
    scores = np.array([[9, 1, 1, 0], [5, 3, 4, 0], [1, 2, 2, 0]], float)
    assert quality(scores) == pytest.approx(((1 + 0 + 0.5) / 3, (1 + 1 / 3 + 1 / 1.5) / 3))
    assert str(Quality(0.5, 0.625)) == "50 %, 0.62"


def test_texts_of_equal_score_are_no_success() -> None:
    assert quality(np.zeros((4, 8))).recall == 1 / 8


def test_spearman_by_hand() -> None:
    assert spearman(np.array([1.0, 2, 9]), np.array([10.0, 20, 21])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 9]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    # Ranks 1.5, 1.5, 3 and 1, 2, 3.
    expected = 1.5 / math.sqrt(1.5 * 2)
    assert spearman(np.array([4.0, 4, 9]), np.array([1.0, 2, 3])) == pytest.approx(expected)


def test_an_encoder_is_like_itself(encoder) -> None:
    assert likeness("octavo/stories-encoder", TEXTS, encoder.encode(TEXTS)) == pytest.approx(1)


@pytest.fixture(scope="module")
def encoder():
    with SentenceEncoder("octavo/stories-encoder") as encoder:
        yield encoder


class TestBuiltin:
    """The shipped models on held-out pairs: 50 queries and 200 texts, so chance is 0.5 %."""

    def scores(self, encoder, kind):
        queries, texts = Pairs().heldout(kind, 50, 200)
        found = encoder.similarity(encoder.encode(queries), encoder.encode(texts))
        return queries, texts, np.float64(found)

    @pytest.mark.parametrize(
        ("kind", "bound"), [("notes", 0.95), ("facts", 0.75), ("titles", 0.65)]
    )
    def test_the_encoder(self, kind, bound, encoder) -> None:
        _, _, scores = self.scores(encoder, kind)
        assert quality(scores).recall > bound

    @pytest.mark.parametrize(("kind", "bound"), [("notes", 0.85), ("facts", 0.25)])
    def test_the_reranker(self, kind, bound, encoder) -> None:
        queries, texts, scores = self.scores(encoder, kind)
        with LLM("octavo/stories-reranker") as reranker:
            found = quality(rerank(reranker, queries, texts, scores))
            # It decides, also if the encoder's order of the best texts is the wrong one.
            again = quality(rerank(reranker, queries, texts, _reversed_best(scores)))
        within = (np.sort(scores, axis=1)[:, -DEPTH] <= np.diagonal(scores)).mean()
        assert bound < found.recall <= within
        assert again == found


def _reversed_best(scores):
    """Return scores with the same best texts in the opposite order."""
    best = np.argsort(-scores, axis=1)[:, :DEPTH]
    result = scores.copy()
    turned = np.take_along_axis(scores, best[:, ::-1], axis=1)
    np.put_along_axis(result, best, turned, axis=1)
    return result
