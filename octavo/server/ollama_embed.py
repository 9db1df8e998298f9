"""POST /api/embed and the older /api/embeddings: vectors by Ollama's API."""

from __future__ import annotations

import time
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.abilities import find_pooler
from octavo.server.body import read_model
from octavo.server.ollama_models import served_name
from octavo.server.pooling import Input, PoolingCall, encode, numbers_json
from octavo.server.pooling_schema import (
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaPooledBody,
)
from octavo.server.rerank import as_inputs
from octavo.server.state import state_of

B = TypeVar("B", bound=OllamaPooledBody)


async def create_ollama_embed(request: Request) -> Response:
    """Return the vector of each text."""
    limit = state_of(request).config.max_request_bytes
    return await _respond(request, OllamaEmbed, await read_model(request, OllamaEmbedBody, limit))


async def create_ollama_embeddings(request: Request) -> Response:
    """Return the vector of a text; older than /api/embed."""
    limit = state_of(request).config.max_request_bytes
    body = await read_model(request, OllamaEmbeddingsBody, limit)
    return await _respond(request, OllamaEmbeddings, body)


async def _respond(request: Request, kind: type[PoolingCall[B]], body: B) -> Response:
    asked, body.model = body.model, served_name(state_of(request), body.model)
    call = kind(request, body)
    call.model_name = asked
    return await call.respond()


class OllamaEmbed(PoolingCall[OllamaEmbedBody]):
    """Request of /api/embed."""

    id_prefix = "ollama"
    param = "input"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        loaded = time.monotonic()
        find_pooler(engine.spec, "embed")
        texts = [text for text in self.body.input if text or len(self.body.input) > 1]
        params = self.body.pooling_params("embed")
        params.use_activation = True  # Ollama normalizes the vectors of all models
        inputs = as_inputs(texts, "input")
        rows = await self.results(engine, inputs, params, lambda _, x: numbers_json(x))
        head = encode({"model": self.model_name})[:-1] + b',"embeddings":['
        arrival = self.context.arrival
        counts = {
            "total_duration": int((time.monotonic() - arrival) * 1e9),
            "load_duration": int((loaded - arrival) * 1e9),
            "prompt_eval_count": self.counts.prompt_tokens,
            **await self.explanation(),
        }
        return await self.write(head, rows, b"]," + encode(counts)[1:])


class OllamaEmbeddings(PoolingCall[OllamaEmbeddingsBody]):
    """Request of /api/embeddings."""

    id_prefix = "ollama"
    param = "prompt"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        find_pooler(engine.spec, "embed")
        inputs = [Input(self.body.prompt, "prompt")] if self.body.prompt else []
        params = self.body.pooling_params("embed")
        rows = await self.results(engine, inputs, params, lambda _, x: numbers_json(x))
        told = await self.explanation()
        tail = b"," + encode(told)[1:] if told else b"}"
        return await self.write(b'{"embedding":', rows or [b"[]"], tail)
