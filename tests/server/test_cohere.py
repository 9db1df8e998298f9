"""POST /v2/embed and /v1/embed: vectors by Cohere's API."""

import base64

import numpy as np
import pytest
from pydantic import TypeAdapter

from octavo.models.blocks.pooler import SentencesSpec
from octavo.server import pooling_answers
from octavo.server.cohere import find_prompt
from octavo.server.pooling_schema import MAX_TEXTS
from tests.server.pooled import CLASSES, EMBED, good, ids_of, refused, serve, vector

TEXTS = ["one", "three"]
KINDS = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
PROMPTS = SentencesSpec((("Query", "q: "), ("passage", "p: "), ("Clustering", "c: ")))


def test_vectors_of_every_type():
    async def scenario(served):
        answer = await good(served, "/v2/embed", texts=TEXTS, model="fake", embedding_types=KINDS)
        TypeAdapter(pooling_answers.CohereVectorsByType).validate_python(answer)
        assert list(answer["embeddings"]) == KINDS
        assert answer["texts"] == TEXTS
        tokens = sum(len(ids_of(text)) for text in TEXTS)
        assert answer["meta"] == {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": tokens},
        }
        expected = np.array([vector(text) for text in TEXTS])
        found = {kind: answer["embeddings"][kind] for kind in KINDS}
        np.testing.assert_array_equal(np.float32(found["float"]), expected)
        packed = [np.frombuffer(base64.b64decode(row), "<f4") for row in found["base64"]]
        np.testing.assert_array_equal(packed, expected)
        most = np.abs(expected).max(1, keepdims=True)
        np.testing.assert_allclose(np.array(found["int8"]) / 127, expected / most, atol=0.004)
        assert np.abs(found["int8"]).max(1).tolist() == [127, 127]
        np.testing.assert_array_equal(np.array(found["uint8"]), np.array(found["int8"]) + 128)
        bits = [sum((x > 0) << (7 - i) for i, x in enumerate(row)) for row in expected]
        assert found["ubinary"] == [[int(byte)] for byte in bits]
        assert found["binary"] == [[int(byte) - 128] for byte in bits]

    serve(scenario)


def test_a_vector_of_zeros():
    async def scenario(served):
        served.engine.pool = lambda ids, pooler: np.zeros(4)
        answer = await good(served, "/v2/embed", texts=["a"], embedding_types=["int8", "binary"])
        assert answer["embeddings"] == {"int8": [[0] * 4], "binary": [[-128]]}

    serve(scenario)


def test_the_older_route():
    async def scenario(served):
        answer = await good(served, "/v1/embed", texts=TEXTS)
        TypeAdapter(pooling_answers.CohereVectors).validate_python(answer)
        expected = [vector(text) for text in TEXTS]
        np.testing.assert_array_equal(np.float32(answer["embeddings"]), expected)
        answer = await good(served, "/v1/embed", texts=TEXTS, embedding_types=["float"])
        TypeAdapter(pooling_answers.CohereVectorsByType).validate_python(answer)
        np.testing.assert_array_equal(np.float32(answer["embeddings"]["float"]), expected)
        assert answer["meta"]["api_version"] == {"version": "1"}

    serve(scenario)


def test_inputs_have_parts():
    async def scenario(served):
        parts = [{"type": "text", "text": text} for text in TEXTS]
        answer = await good(
            served, "/v2/embed", inputs=[{"content": parts}, {"content": parts[:1]}]
        )
        assert answer["texts"] == ["one\nthree", "one"]
        expected = [vector("one\nthree"), vector("one")]
        np.testing.assert_array_equal(np.float32(answer["embeddings"]["float"]), expected)

    serve(scenario)


@pytest.mark.parametrize(
    ("input_type", "name"),
    [
        (None, None),
        ("search_query", "Query"),
        ("search_document", "passage"),
        ("clustering", "Clustering"),
        ("classification", None),
    ],
)
def test_the_input_type_names_a_prompt(input_type, name):
    found, warning = find_prompt(PROMPTS, input_type)
    assert found == name
    assert (warning is None) == (input_type != "classification")
    assert find_prompt(SentencesSpec(), input_type) == (None, None)


def test_prompts_and_warnings():
    async def scenario(served):
        body = {"texts": ["one"], "embedding_types": ["float"]}
        await good(served, "/v2/embed", **body, input_type="search_query")  # without prompts
        assert served.engine.requests[-1].prompt_token_ids == ids_of("one")
        served.engine.spec.sentences = PROMPTS
        answer = await good(served, "/v2/embed", **body, input_type="search_query")
        np.testing.assert_array_equal(np.float32(answer["embeddings"]["float"]), [vector("q: one")])
        assert "warnings" not in answer["meta"]
        answer = await good(served, "/v2/embed", **body, input_type="classification")
        np.testing.assert_array_equal(np.float32(answer["embeddings"]["float"]), [vector("one")])
        (warning,) = answer["meta"]["warnings"]
        assert "no prompt for it; it has Query, passage, Clustering" in warning

    serve(scenario)


def test_long_texts():
    async def scenario(served):
        body = {"texts": ["x" * 900 + "y"]}
        for truncate, token in [(None, "x"), ("END", "x"), ("START", "y")]:
            await good(served, "/v2/embed", **body, truncate=truncate)
            ids = served.engine.requests[-1].prompt_token_ids
            assert (len(ids), ids[-1]) == (served.engine.max_model_len, ord(token))
        for most, count in [(3, 3), (10**9, served.engine.max_model_len)]:
            await good(served, "/v2/embed", **body, max_tokens=most)
            assert len(served.engine.requests[-1].prompt_token_ids) == count
        error = await refused(served, "/v2/embed", **body, truncate="NONE")
        assert error["param"] == "texts[0]"
        assert "set truncate." in error["message"]

    serve(scenario)


def test_shorter_vectors():
    async def scenario(served):
        answer = await good(served, "/v2/embed", texts=["one"], output_dimension=2)
        assert np.shape(answer["embeddings"]["float"]) == (1, 2)
        error = await refused(served, "/v2/embed", texts=["one"], output_dimension=3)
        assert error["param"] == "output_dimension"
        assert error["message"].startswith("output_dimension=3: this model's vectors")

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "texts", "either texts or inputs"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts", "or"),
        ({"texts": []}, "texts", "empty list"),
        ({"texts": ["a", ""]}, "texts", "texts[1] is an empty text"),
        ({"texts": ["a", 5]}, "texts", "texts[1]=5"),
        ({"texts": [[1, 2]]}, "texts", "texts[0]=[1, 2]"),
        ({"texts": ["a"] * 5000}, "texts", f"at most {MAX_TEXTS}"),
        ({"inputs": []}, "inputs", "inputs=[]"),
        ({"inputs": [{"content": []}]}, "inputs[0].content", "content=[]"),
        ({"inputs": [{"content": [{"type": "text", "text": ""}]}]}, "inputs", "empty text"),
        (
            {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "inputs[].content[].image_url",
            "is not supported",
        ),
        ({"images": ["data:"]}, "images", "is not supported"),
        ({"texts": ["a"], "input_type": "image"}, "input_type", "input_type='image'"),
        ({"texts": ["a"], "embedding_types": ["half"]}, "embedding_types[0]", "'half'"),
        ({"texts": ["a"], "embedding_types": "float"}, "embedding_types", "'float'"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension", "output_dimension=0"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate", "truncate='MIDDLE'"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 5}, "max_tokens", "contradict"),
    ],
)
def test_what_is_wrong(body, param, said):
    async def scenario(served):
        for path in ("/v1/embed", "/v2/embed"):
            error = await refused(served, path, **body)
            assert error["param"] == param
            assert said in error["message"]

    serve(scenario)


def test_a_model_without_vectors():
    async def scenario(served):
        error = await refused(served, "/v2/embed", texts=["a"])
        assert "does not have the task embed. It can: classify" in error["message"]

    serve(scenario, CLASSES)


def test_equal_types_count_once():
    async def scenario(served):
        answer = await good(served, "/v2/embed", texts=["one"], embedding_types=["int8", "int8"])
        assert list(answer["embeddings"]) == ["int8"]

    serve(scenario, EMBED)
