"""Fake engines of models with vectors and scores."""

from dataclasses import replace

import numpy as np

from octavo.config import EngineConfig
from octavo.frontend.pooling import normalize
from octavo.models.blocks.pooler import PoolerSpec, RoleSpec
from tests.server.fake_engine import BOS, FakeAsyncLLM, fake_pool, make_tokenizer, with_server

EMBED = PoolerSpec("embed", ("mean",), 4, activation="normalize", dimensions=(2,))
PLAIN = PoolerSpec("embed", ("mean",), 4, activation="normalize", activates=False)
TOKENS = PoolerSpec("token_embed", ("all",), 4, activation="normalize")
CLASSES = PoolerSpec("classify", ("cls",), 3, activation="softmax", labels=("bad", "so", "good"))
RANKER = PoolerSpec("classify", ("cls",), 1, activation="sigmoid", labels=("relevant",))

WEIGHTS = PoolerSpec("embed", ("max",), 9, sparse=True)
TOKEN_WEIGHTS = PoolerSpec(
    "token_classify", ("all",), 1, activation="relu", edges=(BOS, None), sparse=True
)
TOKEN_WEIGHTS = replace(TOKEN_WEIGHTS, weightless=(BOS, ord("n")))

QUERIES = RoleSpec("query", ord("Q"), 8, mask=ord("M"))
DOCUMENTS = RoleSpec("document", ord("D"), 9, skipped=(ord("."),))
LATE = replace(TOKENS, roles=(QUERIES, DOCUMENTS))


def serve(scenario, *poolers, engine=None, template=None, headers=None, **settings):
    """Run a scenario with a model of some poolers; `engine` has settings of it."""
    config = EngineConfig.from_kwargs(served_model_name=["fake"], **(engine or {}))
    tokenizer = make_tokenizer(template)
    with_server(
        scenario,
        lambda: FakeAsyncLLM(config, tokenizer, poolers=poolers or (EMBED, TOKENS)),
        headers,
        **settings,
    )


def ids_of(text):
    return [BOS, *text.encode()]


def vector(text, pooler=EMBED):
    """Return the vector of a text, float32 [4]."""
    x = fake_pool(ids_of(text), pooler).astype(np.float32)
    return normalize(x) if pooler.activates else x


def cosine(a, b):
    x, y = vector(a), vector(b)
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


async def good(served, path, **body):
    """Return the answer to a request that must succeed."""
    response = await served.post(path, **body)
    assert response.status_code == 200, response.text
    assert "X-Octavo-Ignored-Fields" not in response.headers
    return response.json()


async def refused(served, path, **body):
    """Return the error of a request that must fail with 400."""
    response = await served.post(path, **body)
    assert response.status_code == 400, response.text
    return response.json()["error"]
