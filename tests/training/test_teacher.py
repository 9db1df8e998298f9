from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from octavo import SentenceEncoder
from octavo.config.model import BUILTIN_ENCODER
from octavo.models.hub import resolve_model
from training import teacher
from training.corpus import Corpus
from training.encoder import make_wordpiece, tokenizer_texts
from training.pairs import Pairs
from training.teacher import load_lessons, sentences


@pytest.fixture(scope="module")
def words(corpus: Corpus) -> Tokenizer:
    return make_wordpiece(tokenizer_texts(corpus, 0), 400)


def test_lessons_are_the_vectors_of_the_teacher(
    words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "LESSONS", 90)
    path, pairs = tmp_path / "lessons.npz", Pairs()
    lessons = load_lessons(Path(resolve_model(BUILTIN_ENCODER)), path, pairs, words)
    assert lessons.pieces.shape == (400, 128)
    assert 60 < len(lessons.sentences) == len(set(lessons.sentences)) <= 90
    with SentenceEncoder(BUILTIN_ENCODER, max_model_len=128) as model:
        for texts, vectors in (
            (lessons.sentences, lessons.vectors),
            (lessons.heldout, lessons.heldout_vectors),
        ):
            assert len(texts) == len(vectors)
            np.testing.assert_allclose(model.encode(texts[:3]), vectors[:3], atol=1e-3)
        ending = next(i for i in range(400) if words.id_to_token(i).startswith("##th"))
        found = model.encode([words.id_to_token(ending)[2:]])[0]
        np.testing.assert_allclose(found, lessons.pieces[ending], atol=1e-3)
    again = load_lessons(None, path, pairs, words)
    assert again.sentences == lessons.sentences
    assert torch.equal(again.vectors, lessons.vectors)


def test_sentences_have_no_held_out_query() -> None:
    pairs = Pairs()
    heldout = set(pairs.heldout("titles")[0])
    drawn = sentences(pairs, "titles", random.Random(1))
    assert not heldout & {sentence for sentence, _ in zip(drawn, range(2000), strict=False)}


@pytest.mark.parametrize("folder", [None, "nowhere"])
def test_a_missing_teacher_is_named(folder: str | None, words: Tokenizer, tmp_path: Path) -> None:
    given = None if folder is None else tmp_path / folder
    with pytest.raises(FileNotFoundError, match="all-MiniLM-L6-v2"):
        load_lessons(given, tmp_path / "lessons.npz", Pairs(), words)
