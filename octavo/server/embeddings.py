"""POST /v1/embeddings, as in OpenAI's API, and POST /pooling, as in vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.abilities import cannot, find_pooler
from octavo.server.pooling import Floats, InputCall, numbers_json
from octavo.server.pooling_schema import EmbeddingsBody, PoolingBody


async def create_embeddings(request: Request) -> Response:
    """Return the vector of each text."""
    return await Embeddings.read(request, EmbeddingsBody)


async def create_pooling(request: Request) -> Response:
    """Return the result of each text for a task of the model."""
    return await Pooling.read(request, PoolingBody)


class Embeddings(InputCall[EmbeddingsBody]):
    """Request for vectors."""

    id_prefix = "embd"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        find_pooler(engine.spec, "embed")
        encoding = self.body.encoding_format or "float"

        def write(index: int, x: Floats) -> bytes:
            vector = numbers_json(x, encoding)
            return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector)

        return await self.run(engine, "embed", write)


_TASKS = {"encode": "token_embed", "score": "classify"}
"""Older names of tasks."""


class Pooling(InputCall[PoolingBody]):
    """Request for the results of a task."""

    id_prefix = "pool"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        spec, asked = engine.spec, self.body.task
        if not spec.poolers:
            raise cannot(spec, "has no vectors and no scores")
        task = spec.poolers[0].task if asked is None else _TASKS.get(asked, asked)
        find_pooler(spec, task)
        encoding = self.body.encoding_format or "float"

        def write(index: int, x: Floats) -> bytes:
            return b'{"index":%d,"object":"pooling","data":%b}' % (
                index,
                numbers_json(x, encoding),
            )

        return await self.run(engine, task, write)
