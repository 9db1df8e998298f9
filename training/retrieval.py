"""Measures of retrieval: of the shipped encoder and reranker, beside BM25."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo import LLM, SentenceEncoder
from training.pairs import Pairs

Scores = NDArray[np.float64]
DEPTH = 10
"""Number of the encoder's best texts that the reranker sorts."""


class Quality(NamedTuple):
    """Share of queries whose text is the first one, and mean of 1 / its rank."""

    recall: float
    mrr: float

    def __str__(self) -> str:
        return f"{100 * self.recall:.0f} %, {self.mrr:.2f}"


Results = dict[str, tuple[int, int, list[Quality]]]
"""For each kind of pairs: numbers of queries and of texts, and the quality of each way."""


def bm25(queries: Sequence[str], texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> Scores:
    """Return the scores [queries, texts] of BM25 (Robertson and Zaragoza 2009), on whole words."""
    counts = [Counter(_words(text)) for text in texts]
    lengths = np.array([count.total() for count in counts], np.float64)
    documents = Counter(word for count in counts for word in count)
    norm = k1 * (1 - b + b * lengths / lengths.mean())
    scores = np.zeros((len(queries), len(texts)))
    for row, query in zip(scores, queries, strict=True):
        for word in set(_words(query)) & documents.keys():
            found = np.array([count[word] for count in counts], np.float64)
            rare = math.log(1 + (len(texts) - documents[word] + 0.5) / (documents[word] + 0.5))
            row += rare * found * (k1 + 1) / (found + norm)
    return scores


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def quality(scores: Scores) -> Quality:
    """Judge scores [queries, texts], where text i is query i's.

    Equal scores share their ranks: the result is the mean over their orders.
    """
    own = np.diagonal(scores)[:, None]
    better, equal = (scores > own).sum(1), (scores == own).sum(1)
    recall = np.where(better == 0, 1 / equal, 0).mean()
    return Quality(float(recall), float((1 / (1 + better + (equal - 1) / 2)).mean()))


def spearman(first: Scores, second: Scores) -> float:
    """Return Spearman's correlation of two series ``[n]``; equal numbers share their ranks."""
    ranks = []
    for series in (first, second):
        _, place, counts = np.unique(series, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[place])
    return float(np.corrcoef(*ranks)[0, 1])


def likeness(encoder: Path, texts: Sequence[str], teacher: NDArray[np.float32]) -> float:
    """Return Spearman's correlation of the similarities of texts: the encoder's, the teacher's.

    ``teacher`` are the teacher's vectors ``[texts, size]``, of length 1.
    """
    with SentenceEncoder(str(encoder)) as model:
        vectors = model.encode(list(texts))
    both = np.triu_indices(len(texts), 1)
    return spearman(*(np.float64(v @ v.T)[both] for v in (vectors, teacher)))


def rerank(reranker: LLM, queries: Sequence[str], texts: Sequence[str], scores: Scores) -> Scores:
    """Return scores in which the reranker sorts each query's best texts, above all others."""
    best = np.argsort(-scores, axis=1)[:, :DEPTH]
    asked = [query for query, row in zip(queries, best, strict=True) for _ in row]
    outputs = reranker.score(asked, [texts[i] for i in best.ravel()], use_tqdm=False)
    result = scores - 1e3
    found = np.array([output.outputs.score for output in outputs]).reshape(best.shape)
    np.put_along_axis(result, best, found, axis=1)
    return result


def measure(encoder: Path, reranker: Path | None, pairs: Pairs) -> Results:
    """Return the qualities on the held-out pairs of each kind.

    The ways are BM25, the encoder, and (if there is one) the reranker after the encoder.
    """
    results: Results = {}
    with SentenceEncoder(str(encoder)) as model:
        second = LLM(str(reranker)) if reranker is not None else None
        for kind in pairs.makers:
            queries, texts = pairs.heldout(kind)
            scores = np.float64(model.similarity(model.encode(queries), model.encode(texts)))
            found = [quality(bm25(queries, texts)), quality(scores)]
            if second is not None:
                found.append(quality(rerank(second, queries, texts, scores)))
            results[kind] = (len(queries), len(texts), found)
        if second is not None:
            second.shutdown()
    return results
