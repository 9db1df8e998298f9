"""POST /classify and /v1/classify, as in vLLM."""

import numpy as np
import pytest
from pydantic import TypeAdapter

from octavo.server import pooling_answers
from tests.server.fake_engine import fake_pool
from tests.server.pooled import CLASSES, good, ids_of, refused, serve

ANSWER = TypeAdapter(pooling_answers.ClassifyAnswer)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes(path):
    async def scenario(served):
        texts = ["one", "two"]
        answer = await good(served, path, input=texts, model="fake")
        ANSWER.validate_python(answer)
        for text, row in zip(texts, answer["data"], strict=True):
            x = fake_pool(ids_of(text), CLASSES)
            np.testing.assert_allclose(row["probs"], np.exp(x) / np.exp(x).sum(), rtol=1e-5)
            assert row["label"] == CLASSES.labels[int(x.argmax())]
            assert row["num_classes"] == 3
        assert answer["usage"]["prompt_tokens"] == 8
        for name in ("activation", "softmax", "use_activation"):
            raw = await good(served, path, input="one", **{name: False})
            expected = fake_pool(ids_of("one"), CLASSES)
            np.testing.assert_allclose(raw["data"][0]["probs"], expected, rtol=1e-5)
        assert (await refused(served, path, input="a", dimensions=2))["param"] == "dimensions"
        assert (await refused(served, path, input=[]))["param"] == "input"

    serve(scenario, CLASSES)


def test_a_model_of_vectors_has_no_classes():
    async def scenario(served):
        error = await refused(served, "/classify", input="a")
        assert error["code"] == "unsupported_task"
        assert "embed (POST /v1/embeddings), token_embed (POST /pooling)" in error["message"]

    serve(scenario)
