from __future__ import annotations

import math

import numpy as np
import pytest

from octavo import LLM, SentenceEncoder
from training.pairs import Pairs
from training.retrieval import DEPTH, Quality, bm25, quality, rerank

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


class TestBuiltin:
    """The shipped models on held-out pairs, far above chance (1 % and less)."""

    @pytest.fixture(scope="class")
    def encoder(self):
        with SentenceEncoder("octavo/stories-encoder") as encoder:
            yield encoder

    @pytest.fixture(scope="class")
    def reranker(self):
        with LLM("octavo/stories-reranker") as reranker:
            yield reranker

    @pytest.mark.parametrize(("kind", "bound"), [("notes", 0.8), ("facts", 0.6), ("titles", 0.7)])
    def test_held_out_pairs(self, kind, bound, encoder, reranker) -> None:
        queries, texts = Pairs().heldout(kind, 50, 200)
        scores = np.float64(encoder.similarity(encoder.encode(queries), encoder.encode(texts)))
        found = quality(scores)
        assert found.recall > bound
        again = quality(rerank(reranker, queries, texts, scores))
        assert again.recall > bound
        within = (np.sort(scores, axis=1)[:, -DEPTH] <= np.diagonal(scores)).mean()
        assert again.recall <= within  # the reranker finds none that the encoder did not find
