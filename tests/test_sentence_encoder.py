"""`SentenceEncoder`: the interface of sentence-transformers on a small random model."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SentenceEncoder
from octavo.errors import ModelError, RequestError
from tests.encoders import write_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = write_encoder(tmp_path_factory.mktemp("encoder"), matryoshka_dimensions=[8, 16])
    prompts = {"prompts": {"query": "q: ", "document": "d: "}, "default_prompt_name": None}
    Path(folder, "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with SentenceEncoder(folder, load_format="dummy") as encoder:
        yield encoder


def test_vectors_are_those_of_the_engine(encoder):
    texts = ["one", "two"]
    vectors = encoder.encode(texts)
    expected = [o.outputs.embedding for o in encoder.llm.embed(texts, use_tqdm=False)]
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, np.array(expected, np.float32))
    assert np.array_equal(encoder.encode("one"), vectors[0])
    assert encoder.encode([]).shape == (0, 32)
    assert (encoder.max_seq_length, encoder.get_sentence_embedding_dimension()) == (64, 32)


def test_prompts_of_queries_and_documents(encoder):
    query = encoder.encode("q: one")
    assert np.array_equal(encoder.encode_query("one"), query)
    assert np.array_equal(encoder.encode("one", prompt_name="query"), query)
    assert np.array_equal(encoder.encode("one", prompt="q: "), query)
    assert encoder.embed_query("one") == query.tolist()
    assert encoder.embed_documents(["one"]) == encoder.encode(["d: one"]).tolist()
    with pytest.raises(RequestError, match="the prompts are query, document"):
        encoder.encode("one", prompt_name="other")


def test_asynchronous_calls_and_threads(encoder):
    texts = [f"{i} dogs" for i in range(8)]
    expected = [encoder.embed_query(text) for text in texts]

    async def at_once():
        return await asyncio.gather(*map(encoder.aembed_query, texts))

    assert asyncio.run(at_once()) == expected
    assert asyncio.run(encoder.aembed_documents(texts)) == encoder.embed_documents(texts)


def test_long_texts_are_cut(encoder):
    assert np.array_equal(encoder.encode("a" * 500), encoder.encode("a" * 62))


def test_shorter_vectors(encoder):
    whole, cut = encoder.encode("one"), encoder.encode("one", truncate_dim=8)
    assert cut.shape == (8,)
    assert np.allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    with pytest.raises(RequestError, match="choose one of: 8, 16"):
        encoder.encode("one", truncate_dim=9)


def test_similarity(encoder, monkeypatch):
    a, b = np.float32([[3, 4], [0, 2]]), np.float32([[1, 0]])
    assert np.allclose(encoder.similarity(a, b), [[0.6], [0]])
    for name, expected in (("dot", [[3], [0]]), ("manhattan", [[-6], [-3]])):
        monkeypatch.setattr(encoder, "similarity_fn_name", name)
        assert np.allclose(encoder.similarity(a, b), expected)
    monkeypatch.setattr(encoder, "similarity_fn_name", "euclidean")
    assert np.allclose(encoder.similarity(a, b), [[-(20**0.5)], [-(5**0.5)]])


def test_what_is_refused(encoder):
    with pytest.raises(RequestError, match="convert_to_numpy"):
        encoder.encode("one", convert_to_numpy=False)
    with pytest.raises(ModelError, match="makes no vectors of texts"):
        SentenceEncoder("octavo/stories", runner="generate")
    with LLM("octavo/stories") as llm:  # nothing is left of the refused one
        assert llm.embed("one", use_tqdm=False)[0].outputs.hidden_size > 0
