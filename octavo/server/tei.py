"""Routes of text-embeddings-inference: /embed, /predict, /similarity, /info and their like."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.frontend.pooling import cosine, sparse_vector
from octavo.frontend.prompts import Prompt
from octavo.outputs import PoolingOutput, PoolingRequestOutput
from octavo.plan.memory_plan import resolve_dtype
from octavo.pooling_params import PoolingTask
from octavo.server import answers, pooling_answers
from octavo.server.abilities import cannot, find_pooler
from octavo.server.pooling import Floats, Input, PoolingCall, encode, numbers_json, text_inputs
from octavo.server.pooling_schema import (
    MAX_TEXTS,
    SimilarityBody,
    TEIEmbedBody,
    TEIInputsBody,
    TEIPredictBody,
)
from octavo.server.rerank import as_inputs
from octavo.server.state import state_of


async def embed(request: Request) -> Response:
    """Return the vector of each text, in the form of text-embeddings-inference."""
    return await Embed.read(request, TEIEmbedBody)


async def embed_all(request: Request) -> Response:
    """Return the vectors of the tokens of each text."""
    return await EmbedAll.read(request, TEIInputsBody)


async def embed_sparse(request: Request) -> Response:
    """Return the entries of the vocabulary that have a weight in each text."""
    return await EmbedSparse.read(request, TEIInputsBody)


async def predict(request: Request) -> Response:
    """Return the scores of the classes for each text, the best first."""
    return await Predict.read(request, TEIPredictBody)


async def similarity(request: Request) -> Response:
    """Return the cosine of a text's vector with the vectors of other texts."""
    return await Similarity.read(request, SimilarityBody)


async def info(request: Request) -> Response:
    """Describe the model and the limits of requests."""
    state = state_of(request)
    engine = await state.get_engine()
    spec, config = engine.spec, engine.config
    return answers.respond(
        pooling_answers.TEIInfo(
            model_id=config.model.model,
            model_sha=None,
            served_model_name=state.model_names[0],
            model_dtype=resolve_dtype(config, spec),
            model_type=_model_type(spec),
            max_concurrent_requests=state.config.max_num_queued_reqs,
            max_input_length=engine.max_model_len,
            max_batch_tokens=engine.max_num_batched_tokens,
            max_batch_requests=config.scheduler.max_num_seqs,
            max_client_batch_size=MAX_TEXTS,
            auto_truncate=False,
            tokenization_workers=1,
            version=__version__,
            sha=None,
            docker_label=None,
        )
    )


def _model_type(spec: Any) -> dict[str, dict[str, Any]]:
    """Return the kind of a model by text-embeddings-inference's names."""
    pooler = spec.pooler("embed")
    scorer = spec.pooler("classify") or spec.pooler("token_classify")
    if scorer is not None and pooler is None:
        labels = {str(i): label for i, label in enumerate(scorer.labels)}
        kind = "reranker" if scorer.size == 1 else "classifier"
        return {kind: {"id2label": labels, "label2id": {v: int(k) for k, v in labels.items()}}}
    if pooler is None:
        return {}
    return {"embedding": {"pooling": "splade" if pooler.sparse else "+".join(pooler.pooling)}}


class Embed(PoolingCall[TEIInputsBody]):
    """Request for vectors."""

    id_prefix = "embed"
    param = "inputs"
    task: PoolingTask = "embed"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        find_pooler(engine.spec, self.task)
        params = self.body.pooling_params(self.task)
        of_text = engine.spec.pooler("embed")
        # As in text-embeddings-inference. The vectors of ColBERT have no others beside them.
        params.bare = self.task == "token_embed" and of_text is not None and bool(of_text.dense)
        inputs = text_inputs(self.body.inputs, "inputs")
        rows = await self.results(engine, inputs, params, lambda _, x: numbers_json(x))
        return await self.write(b"[", rows, b"]")


class EmbedAll(Embed):
    """Request for the vectors of tokens."""

    task = "token_embed"


class EmbedSparse(PoolingCall[TEIInputsBody]):
    """Request for sparse vectors."""

    id_prefix = "embed"
    param = "inputs"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        pooler = next((pooler for pooler in engine.spec.poolers if pooler.sparse), None)
        if pooler is None:
            raise cannot(engine.spec, "has no sparse vectors")
        params = self.body.pooling_params(pooler.task)

        def write(_: int, output: PoolingRequestOutput[PoolingOutput]) -> bytes:
            entries, weights = sparse_vector(output, pooler, params)
            pairs = zip(entries.tolist(), weights.tolist(), strict=True)
            return encode([{"index": entry, "value": weight} for entry, weight in pairs])

        rows = await self.made(engine, text_inputs(self.body.inputs, "inputs"), params, write)
        return await self.write(b"[", rows, b"]")


class Predict(PoolingCall[TEIPredictBody]):
    """Request for the classes of texts."""

    id_prefix = "predict"
    param = "inputs"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        labels = find_pooler(engine.spec, "classify").labels
        given = self.body.inputs
        is_batch = isinstance(given, list) and isinstance(given[0], list)
        items = cast(list[str | list[str]], given if is_batch else [given])
        inputs = []
        for i, item in enumerate(items):
            texts = [item] if isinstance(item, str) else item
            prompt: Prompt = dict(zip(("prompt", "text_pair"), texts, strict=False))
            inputs.append(Input(prompt, f"inputs[{i}]" if is_batch else "inputs"))

        def write(_: int, x: Floats) -> bytes:
            order = np.argsort(-x, kind="stable").tolist()
            return encode([{"score": float(x[i]), "label": labels[i]} for i in order])

        params = self.body.pooling_params("classify")
        rows = await self.results(engine, inputs, params, write)
        return await self.write(b"[", rows, b"]") if is_batch else await self.write(b"", rows, b"")


class Similarity(PoolingCall[SimilarityBody]):
    """Request for the similarity of texts."""

    id_prefix = "similarity"
    param = "inputs"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        find_pooler(engine.spec, "embed")
        given = self.body.inputs
        inputs = [Input(given.source_sentence, "inputs.source_sentence")]
        inputs += as_inputs(given.sentences, "inputs.sentences")

        def keep(_: int, x: Floats) -> Floats:
            return x

        params = self.body.pooling_params("embed")
        source, *others = await self.results(engine, inputs, params, keep)
        return Response(
            encode([cosine(source, other) for other in others]), media_type="application/json"
        )
