"""POST /api/embed and /api/embeddings, with a fake engine."""

import numpy as np
import pytest
from pydantic import TypeAdapter

from octavo.server import ollama_answers
from tests.server.pooled import CLASSES, EMBED, PLAIN, good, serve, vector


@pytest.mark.parametrize("pooler", [EMBED, PLAIN])
def test_vectors(pooler):
    async def scenario(served):
        for value, texts in [
            ("one", ["one"]),
            (["one", "two"], ["one", "two"]),
            ("", []),
            ([], []),
        ]:
            found = await good(
                served, "/api/embed", model="fake:latest", input=value, options={"num_ctx": 5}
            )
            TypeAdapter(ollama_answers.OllamaEmbedAnswer).validate_python(found)
            assert found["model"] == "fake:latest"
            vectors = np.float32(found["embeddings"])
            np.testing.assert_array_equal(vectors, [vector(text) for text in texts])
            assert found["prompt_eval_count"] == sum(1 + len(text) for text in texts)
        old = await good(served, "/api/embeddings", model="fake", prompt="one")
        TypeAdapter(ollama_answers.OllamaEmbeddingsAnswer).validate_python(old)
        np.testing.assert_array_equal(np.float32(old["embedding"]), vector("one", pooler))
        old = await good(served, "/api/embeddings", model="fake", prompt="")
        assert old == {"embedding": []}

    serve(scenario, pooler)


def test_long_texts_are_cut_unless_the_client_forbids_it():
    async def scenario(served):
        await good(served, "/api/embed", model="fake", input="x" * 900)
        assert len(served.engine.requests[-1].prompt_token_ids) == served.engine.max_model_len
        body = {"model": "fake", "input": ["a", "x" * 900], "truncate": False}
        response = await served.post("/api/embed", **body)
        assert response.status_code == 400
        assert response.json()["error"].startswith("input[1]: This model's maximum context")

    serve(scenario)


def test_what_is_wrong():
    async def scenario(served):
        for body, status in [
            ({"input": "a"}, 400),
            ({"model": "other", "input": "a"}, 404),
            ({"model": "fake"}, 400),
            ({"model": "fake", "input": 5}, 400),
        ]:
            response = await served.post("/api/embed", **body)
            assert (response.status_code, list(response.json())) == (status, ["error"])

    serve(scenario)


def test_what_a_model_can_do():
    async def scenario(served):
        shown = await good(served, "/api/show", model="fake")
        assert shown["capabilities"] == []
        response = await served.post("/api/embed", model="fake", input="a")
        assert "It can: classify" in response.json()["error"]
        response = await served.post("/api/generate", model="fake", prompt="a")
        assert "generates no text" in response.json()["error"]

    serve(scenario, CLASSES)

    async def vectors(served):
        shown = await good(served, "/api/show", model="fake")
        assert shown["capabilities"] == ["embedding"]

    serve(vectors)
