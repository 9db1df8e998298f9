"""Routes of text-embeddings-inference: /embed, /embed_all, /predict, /similarity, /info."""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter

from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.pooler import DenseSpec, SentencesSpec
from octavo.server import pooling_answers
from tests.server.fake_engine import fake_pool
from tests.server.pooled import (
    CLASSES,
    EMBED,
    PLAIN,
    RANKER,
    TOKEN_WEIGHTS,
    TOKENS,
    WEIGHTS,
    cosine,
    good,
    ids_of,
    serve,
    vector,
)


async def failed(served, path, **body):
    """Return the message of a request that must fail with 400."""
    response = await served.post(path, **body)
    assert response.status_code == 400, response.text
    error = response.json()
    TypeAdapter(pooling_answers.TEIError).validate_python(error)
    assert error["error_type"] == "Validation"
    return error["error"]


@pytest.mark.parametrize("pooler", [EMBED, PLAIN])
def test_vectors_are_normalized_unless_the_client_wants_them_bare(pooler):
    async def scenario(served):
        found = await good(served, "/embed", inputs=["one", "two"])
        np.testing.assert_array_equal(np.float32(found), [vector("one"), vector("two")])
        found = await good(served, "/embed", inputs="one", normalize=False)
        np.testing.assert_array_equal(np.float32(found), [vector("one", PLAIN)])

    serve(scenario, pooler)


def test_inputs_and_truncation():
    async def scenario(served):
        found = await good(served, "/embed", inputs=[ids_of("one")], dimensions=2)
        assert np.shape(found) == (1, 2)
        said = await failed(served, "/embed", inputs="x" * 900)
        assert said.startswith("inputs: ")
        assert "set truncate." in said
        for direction, token in [("Left", ord("y")), ("Right", ord("x"))]:
            body = {"inputs": "x" * 900 + "y", "truncate": True}
            await good(served, "/embed", **body, truncation_direction=direction)
            assert served.engine.requests[-1].prompt_token_ids[-1] == token
        assert "missing" in await failed(served, "/embed")
        assert "empty text" in await failed(served, "/embed", inputs=["a", ""])
        served.engine.spec.sentences = SentencesSpec((("query", "q: "),))
        found = await good(served, "/embed", inputs="one", prompt_name="query")
        np.testing.assert_array_equal(np.float32(found), [vector("q: one")])
        assert "prompt_name='x'" in await failed(served, "/embed", inputs="a", prompt_name="x")

    serve(scenario)


def test_vectors_of_tokens():
    async def scenario(served):
        found = await good(served, "/embed_all", inputs=["one", "three"])
        for text, rows in zip(("one", "three"), found, strict=True):
            expected = fake_pool(ids_of(text), TOKENS)
            np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
        assert not served.engine.requests[-1].pooling.bare

    serve(scenario)


def test_vectors_of_tokens_before_dense_layers():
    async def scenario(served):
        await good(served, "/embed_all", inputs="one")
        assert served.engine.requests[-1].pooling.bare
        await good(served, "/pooling", input="one", task="token_embed")
        assert not served.engine.requests[-1].pooling.bare

    dense = (DenseSpec(LinearSpec((("linear", 4),), 9)),)
    serve(scenario, replace(EMBED, dense=dense), replace(TOKENS, dense=dense))


def test_sparse_vectors_of_a_model_without():
    async def scenario(served):
        said = await failed(served, "/embed_sparse", inputs="a")
        assert "has no sparse vectors. It can: embed (POST /v1/embeddings)" in said

    serve(scenario)


def test_sparse_vectors_of_the_vocabulary():
    """SPLADE: one number for each entry."""

    async def scenario(served):
        found = await good(served, "/embed_sparse", inputs=["one", "three"])
        TypeAdapter(list[list[pooling_answers.TEISparseEntry]]).validate_python(found)
        for text, entries in zip(("one", "three"), found, strict=True):
            x = fake_pool(ids_of(text), WEIGHTS)
            expected = {i: float(w) for i, w in enumerate(x.astype(np.float32)) if w > 0}
            assert {entry["index"]: entry["value"] for entry in entries} == expected
        assert (await served.http.get("/info")).json()["model_type"] == {
            "embedding": {"pooling": "splade"}
        }

    serve(scenario, WEIGHTS)


def test_sparse_vectors_of_tokens():
    """BGE-M3: the greatest weight of an entry's tokens, without the special ones."""

    async def scenario(served):
        (entries,) = await good(served, "/embed_sparse", inputs="banana")
        weights = fake_pool(ids_of("banana"), TOKEN_WEIGHTS)[:, 0]
        expected: dict[int, float] = {}
        for token, weight in zip(b"banana", weights[1:], strict=True):
            if weight > 0 and token != ord("n"):
                expected[token] = max(expected.get(token, 0.0), float(np.float32(weight)))
        assert expected
        assert {entry["index"]: entry["value"] for entry in entries} == expected
        assert [entry["index"] for entry in entries] == sorted(expected)
        body = {"input": "banana", "task": "token_classify"}
        (row,) = (await good(served, "/pooling", **body))["data"]
        np.testing.assert_allclose(row["data"], np.maximum(weights[1:], 0), rtol=1e-6)
        assert (await served.http.get("/info")).json()["model_type"] == {
            "embedding": {"pooling": "mean"}
        }
        said = await failed(served, "/predict", inputs="a")
        assert "sparse vectors (POST /embed_sparse)" in said

    serve(scenario, EMBED, TOKEN_WEIGHTS)


def test_predictions():
    async def scenario(served):
        found = await good(served, "/predict", inputs="one")
        TypeAdapter(list[pooling_answers.TEIPrediction]).validate_python(found)
        scores = [row["score"] for row in found]
        assert scores == sorted(scores, reverse=True)
        assert {row["label"] for row in found} == set(CLASSES.labels)
        x = fake_pool(ids_of("one"), CLASSES)
        assert found[0]["label"] == CLASSES.labels[int(x.argmax())]
        (again,) = await good(served, "/predict", inputs=[["one"]])
        assert again == found
        await good(served, "/predict", inputs=["one", "two"])
        assert served.engine.requests[-1].prompt_token_ids == [256, *b"onetwo"]
        batch = await good(served, "/predict", inputs=[["one"], ["one", "two"]])
        assert (len(batch), batch[0]) == (2, found)
        raw = await good(served, "/predict", inputs="one", raw_scores=True)
        assert raw[0]["score"] == pytest.approx(x.max(), rel=1e-5)
        for wrong in (5, [], [[]], ["a", "b", "c"], [["a"], 5], [["a", "b", "c"]]):
            assert "inputs=" in await failed(served, "/predict", inputs=wrong)

    serve(scenario, CLASSES)


def test_similarity():
    async def scenario(served):
        inputs = {"source_sentence": "one", "sentences": ["two", "one"]}
        found = await good(served, "/similarity", inputs=inputs)
        assert found == [pytest.approx(cosine("one", text), rel=1e-6) for text in ("two", "one")]
        inputs["sentences"] = []
        assert "empty list" in await failed(served, "/similarity", inputs=inputs)
        inputs["sentences"] = ["x" * 900]
        assert "parameters.truncate" in await failed(served, "/similarity", inputs=inputs)
        await good(served, "/similarity", inputs=inputs, parameters={"truncate": True})

    serve(scenario)


@pytest.mark.parametrize(
    ("pooler", "kind", "about"),
    [
        (EMBED, "embedding", {"pooling": "mean"}),
        (RANKER, "reranker", {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}),
        (
            CLASSES,
            "classifier",
            {
                "id2label": {"0": "bad", "1": "so", "2": "good"},
                "label2id": {"bad": 0, "so": 1, "good": 2},
            },
        ),
    ],
)
def test_info(pooler, kind, about):
    async def scenario(served):
        found = (await served.http.get("/info")).json()
        TypeAdapter(pooling_answers.TEIInfo).validate_python(found)
        assert found["model_type"] == {kind: about}
        assert found["max_input_length"] == served.engine.max_model_len

    serve(scenario, pooler)


def test_errors_of_the_server():
    async def scenario(served):
        served.engine.pool = lambda ids, pooler: np.full(4, np.nan)
        response = await served.post("/embed", inputs="a")
        assert response.status_code == 500
        assert response.json()["error_type"] == "Backend"

    serve(scenario)
